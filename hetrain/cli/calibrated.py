"""What `hetrain plan --calibrate` takes."""

from collections.abc import Sequence

from hetrain.config.compose import parse
from hetrain.errors import ConfigError

OTHER_MACHINES = (
    "To plan for other machines by measured speeds, calibrate on one of them; then give `hetrain plan` "
    "cluster.profile=FILE, cluster.nodes, cluster.gpus_per_node and their memory, and no preset: its speeds would win."
)


def check_calibrated(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a word that `--calibrate`, which measures the machines it runs on, does not read."""
    for override in parse(overrides):
        key = str(override.key_or_group)
        section = key.partition(".")[0]
        if section == "launch" or key == "cluster.profile":
            continue
        others = f" {OTHER_MACHINES}" if section == "cluster" else ""
        raise ConfigError(
            f"{override.input_line}: --calibrate measures the machine it runs on, with launch.nproc ranks, and reads "
            f"nothing but launch.* and cluster.profile=FILE, where it writes. Leave it out.{others}"
        )
