"""The option of every path of a run, and what of it cannot run. Nothing here imports torch."""

from collections.abc import Iterator

from hetrain.codec import OF_MODE, OPTIONS, PATHS, RUNS, Codecs, of_name
from hetrain.config.schema import RunConfig


def codecs_of(cfg: RunConfig) -> Codecs:
    """What travels on the paths that `consistency.mode` has: a finer key, else what `comms.name` means for it."""
    return Codecs(**{path: _option(cfg, path) for path in OF_MODE.get(cfg.consistency.mode, ())})


def comms_findings(cfg: RunConfig) -> Iterator[str]:
    """Every setting below `comms` that cannot run: key, value, what was expected, what to do."""
    comms, mode = cfg.comms, cfg.consistency.mode
    for key in ("name", *PATHS):
        value = getattr(comms, key)
        if value is not None and value not in OPTIONS:
            yield f"comms.{key}={value}: expected one of {', '.join(OPTIONS)}."
            return
    for path in PATHS:
        if path in OF_MODE.get(mode, PATHS):
            yield from _refused(cfg, path)
        elif getattr(comms, path) not in (None, "none"):
            has = " or ".join(f"comms.{p}" for p in OF_MODE[mode])
            yield f"comms.{path}={getattr(comms, path)}: consistency.mode={mode} has no such path. Set {has} instead."
    yield from _mask(cfg)
    yield from _thresholds(cfg)


def _option(cfg: RunConfig, path: str) -> str:
    finer: str | None = getattr(cfg.comms, path)
    return of_name(cfg.comms.name, path) if finer is None else finer


def _refused(cfg: RunConfig, path: str) -> Iterator[str]:
    mode, option = cfg.consistency.mode, _option(cfg, path)
    runs = RUNS.get((mode, path), OPTIONS)
    if option == "none" or option in runs:
        return
    key = "name" if getattr(cfg.comms, path) is None else path
    instead = f"Set comms.{path} to one of {', '.join(('none', *runs))}."
    yield f"comms.{key}={option}: cannot run for {path} with consistency.mode={mode}. {instead}"


def _mask(cfg: RunConfig) -> Iterator[str]:
    """Pooled gradients travel on the mask of what was sent forward: without one there is nothing to go by."""
    found = codecs_of(cfg)
    if found.pooled_backward == "dct" and found.pooled_forward != "dct":
        key = "name" if cfg.comms.pooled_backward is None else "pooled_backward"
        yield (
            f"comms.{key}=dct: the gradients of pooled embeddings travel where comms.pooled_forward=dct sent values, "
            f"and that is {found.pooled_forward}. Set comms.pooled_forward=dct, or comms.pooled_backward to one of "
            "none, fp16, bf16, int8."
        )


def _thresholds(cfg: RunConfig) -> Iterator[str]:
    dct = cfg.comms.dct
    for key in ("dense_sparsity", "pooled_sparsity", "rows_sparsity"):
        share = getattr(dct, key)
        if not 0 <= share < 1:
            yield f"comms.dct.{key}={share}: expected a share of at least 0 and below 1. 0 sends everything."
    warmups = [(f"{path}_warmup_steps", 0) for path in ("dense", "pooled", "rows")]
    for key, least in (("refresh_steps", 1), *warmups, ("smallest", 0), ("max_age", 1)):
        if getattr(dct, key) is not None and getattr(dct, key) < least:
            yield f"comms.dct.{key}={getattr(dct, key)}: expected at least {least}."
