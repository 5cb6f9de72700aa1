"""Checks of a model's hyper-parameters, made before a parameter is allocated."""

from collections.abc import Sequence

from hetrain.errors import ConfigError


def sizes(key: str, value: object) -> list[int]:
    """`value` as a list of layer widths, at least one, or a ConfigError naming `key`."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"{key}={value!r}: expected a list of layer widths, such as {key}=[256,256,256].")
    return [positive(f"{key}[{i}]", width) for i, width in enumerate(value)]


def positive(key: str, value: object) -> int:
    """`value` as an int of at least 1, or a ConfigError naming `key`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value!r}: expected a whole number of at least 1; set it to one.")
    return value


def one_of(key: str, value: str, allowed: Sequence[str]) -> str:
    """`value` when it is allowed, or a ConfigError that lists what is."""
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: expected one of {', '.join(allowed)}; set {key} to one of them.")
    return value


def inputs(dense_features: int, sparse_features: Sequence[str], embedding_dim: int) -> None:
    """Every model needs at least one bag to read; dense columns may be absent."""
    positive("model.embedding_dim", embedding_dim)
    if not sparse_features:
        raise ConfigError("data: no sparse column, but a model over embeddings needs one; prepare data that has some.")
    if len(set(sparse_features)) != len(sparse_features):
        raise ConfigError(f"data: sparse columns {list(sparse_features)} repeat a name; rename them.")
    if dense_features < 0:
        raise ConfigError(f"data: {dense_features} dense columns; expected 0 or more.")
