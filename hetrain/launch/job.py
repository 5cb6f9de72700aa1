"""What the processes of a run are asked to do: a verb and the resolved config, written to a file for the workers."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from hetrain.config import RunConfig
from hetrain.config.compose import from_yaml, to_yaml


@dataclass(frozen=True)
class Job:
    """One verb to perform.

    `options` are the verb's own keys (run, checkpoint, split, out of eval and predict); `restarts` counts those that
    this launch made since the checkpoint it goes on from was written.
    """

    verb: str
    config: RunConfig
    options: dict[str, str] = field(default_factory=dict)
    restarts: int = 0

    @property
    def places(self) -> list[str]:
        """Where it writes."""
        return [self.config.runs, self.config.data.path, *filter(None, [self.options.get("out")])]

    def write(self, path: Path) -> None:
        """Write what `read` reads."""
        text = {"verb": self.verb, "config": to_yaml(self.config), "options": self.options, "restarts": self.restarts}
        path.write_text(json.dumps(text))

    @staticmethod
    def read(path: Path) -> "Job":
        """The job in `path`."""
        text = json.loads(path.read_text())
        return Job(text["verb"], from_yaml(text["config"]), text["options"], text["restarts"])
