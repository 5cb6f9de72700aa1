"""Where train, validation and test begin and end, by position in the rows: train first."""

from hetrain.config import SplitConfig
from hetrain.data.schema import SPLITS
from hetrain.errors import ConfigError, DataError

Bounds = dict[str, tuple[int, int]]  # split -> first and last position


def needs_total(split: SplitConfig) -> bool:
    """Whether the split is given in shares, so that its bounds depend on the number of rows."""
    values = _checked(split)
    return max(values) <= 1


def split_bounds(split: SplitConfig, total: int | None) -> Bounds:
    """First and last position of each split. `total` rows may be unknown (None) when the split is in row counts."""
    values = _checked(split)
    if max(values) <= 1:
        assert total is not None
        ends = [round(total * min(sum(values[: i + 1]), 1.0)) for i in range(len(values))]
    else:
        ends = [int(sum(values[: i + 1])) for i in range(len(values))]
        if total is not None and ends[-1] > total:
            raise too_few(split, total)
    bounds = dict(zip(SPLITS, zip([0, *ends], ends, strict=False), strict=True))
    if bounds["train"][1] == 0 or (total is not None and bounds["test"][0] == bounds["test"][1]):
        raise DataError(
            f"data.split={_shown(split)}: of {total} rows none are left to {'train' if not ends[0] else 'test'} on. "
            "Give both a share."
        )
    return bounds


def too_few(split: SplitConfig, total: int) -> DataError:
    """The error for row counts that the data cannot fill."""
    wanted = int(split.train + split.validation + split.test)
    return DataError(
        f"data.split={_shown(split)}: asks for {wanted} rows, the data has {total}. Ask for fewer, or for shares."
    )


def _checked(split: SplitConfig) -> list[float]:
    values = [split.train, split.validation, split.test]
    shares, counts = max(values) <= 1, all(value == 0 or value > 1 for value in values)
    if min(values) < 0 or split.train == 0 or split.test == 0:
        problem = "train and test must be above 0, validation 0 or above"
    elif not (shares or counts):
        problem = "expected either shares (each at most 1) or row counts (each above 1), not both"
    elif shares and sum(values) > 1 + 1e-9:
        problem = f"the shares sum to {sum(values):g}, expected at most 1"
    elif counts and any(value != int(value) for value in values):
        problem = "row counts must be whole numbers"
    else:
        return values
    raise ConfigError(f"data.split={_shown(split)}: {problem}.")


def _shown(split: SplitConfig) -> str:
    return f"{{train: {split.train:g}, validation: {split.validation:g}, test: {split.test:g}}}"
