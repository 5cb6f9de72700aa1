"""The config.yaml that a run left, whatever has become of it."""

from pathlib import Path

from hetrain.config.schema import RunConfig
from hetrain.errors import ConfigError


def read_saved(file: Path) -> RunConfig:
    """The config.yaml of a run, not checked against this machine; ConfigError naming it when it is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        found = OmegaConf.create(file.read_text())
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), found))
        if isinstance(cfg, RunConfig) and "_target_" in cfg.model:
            return cfg
        why = "it names no model"
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError, AssertionError) as error:
        why = " ".join(str(error).split()) or "not a mapping"
    raise ConfigError(
        f"{file} is damaged or is not a run's config ({why}). Write it anew with the arguments of that run: "
        f"`hetrain train ARGUMENTS --cfg job > {file}`; or remove the folder, or choose another name."
    )
