"""What `hetrain stats` takes: the words about data."""

from collections.abc import Sequence

from hetrain.config.compose import EXPERIMENT, parse
from hetrain.errors import ConfigError


def check_counted(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a word that counting ids has no use for. An experiment, which has some, may say data too.

    Keys that there are not have been refused before.
    """
    for override in parse(overrides):
        key = str(override.key_or_group)
        if key != EXPERIMENT and key.partition(".")[0] != "data":
            raise ConfigError(
                f"{override.input_line}: `hetrain stats` counts the ids of a data set and reads nothing but data.*, as "
                "in data.path=DIR. Leave it out."
            )
