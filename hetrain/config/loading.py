"""Config files found and composed by Hydra, and which of them a value comes from. Hydra is imported late."""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hetrain.config.schema import RunConfig
from hetrain.config.schema_keys import flatten

OURS = ("schema", "config")  # the base of every run, which nobody chose


def load(lines: list[str], folders: Sequence[Path], base: Path | None) -> dict[str, Any]:
    """The composed config by its top-level keys. `lines`: overrides as Hydra wants them; `base`: in place of ours."""
    from hydra.types import RunMode

    composed = _loader(folders, base).load_configuration(_name(base), lines, RunMode.RUN)
    return {str(key): composed[key] for key in composed if key != "hydra"}


def _loader(folders: Sequence[Path], base: Path | None) -> Any:
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    ConfigStore.instance().store(name="schema", node=RunConfig)
    version.setbase("1.3")
    Plugins.instance()  # registers what reads file:// and structured://
    path = ConfigSearchPathImpl()  # hydra.initialize_config_dir would search our folder before the user's
    path.append("hydra", "pkg://hydra.conf")
    for folder in [base.parent.resolve(), *folders] if base else folders:
        path.append("hetrain", f"file://{folder}")
    path.append("schema", "structured://")
    return ConfigLoaderImpl(path)


def _name(base: Path | None) -> str:
    return base.stem if base else "config"


class Origins:
    """Which file says what a key is, in the words that chose it. The files are read again when first asked."""

    def __init__(
        self, typed: Collection[str], lines: Sequence[str], folders: Sequence[Path], base: Path | None = None
    ) -> None:
        self._typed, self._lines, self._folders, self._base = typed, list(lines), folders, base

    def __call__(self, key: str) -> str | None:
        """Such as `+experiment=criteo_het`; None where the command line says it, or nobody does."""
        return None if key in self._typed else self._files.get(key)

    @cached_property
    def _files(self) -> dict[str, str]:
        from hydra._internal.config_repository import CachingConfigRepository
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        loader = _loader(self._folders, self._base)
        found: dict[str, str] = {}
        files = CachingConfigRepository(loader.repository)
        for part in loader.compute_defaults_list(_name(self._base), self._lines, RunMode.RUN).defaults:
            path = str(part.config_path)
            if path.startswith("hydra") or (path in OURS and self._base is None):
                continue
            group, _, name = path.rpartition("/")
            words = str(self._base) if not group else f"+{group}={name}" if group == "experiment" else f"{group}={name}"
            settings = OmegaConf.to_container(loader._load_single_config(part, files).config)
            found |= dict.fromkeys(map(str, flatten(settings)), words)  # type: ignore[arg-type]
        return found
