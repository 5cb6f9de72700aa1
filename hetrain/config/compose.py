"""Config files and command line overrides -> one checked RunConfig, through Hydra's compose API.

Hydra and OmegaConf are imported late: `hetrain --help` needs neither.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetrain.config.checks import check
from hetrain.config.loading import Origins, load
from hetrain.config.schema import RunConfig
from hetrain.config.schema_keys import OPEN, check_key, expected, flatten, is_section, schema_keys
from hetrain.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

GROUPS = ("data", "model", "optimizer", "planner", "cluster", "consistency", "comms", "launch")
EXPERIMENT = "experiment"
STRUCTURED = re.compile(  # values that the grammar must read: lists, mappings, quoted text, functions
    r"[\[{'\"]|(choice|range|interval|glob|sort|shuffle|tag|extend_list|int|float|str|bool|json_str)\("
)


def shipped_configs() -> Path:
    """The folder of our own configs: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"hetrain's own configs are missing: no config.yaml in {package / 'configs'}. Install it again.")


def config_folders(user: str | None) -> list[Path]:
    """Folders searched for configs, first match wins: the user's own (--config-dir), then ours."""
    if user is None:
        return [shipped_configs()]
    folder = Path(user).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir {user}: there is no such folder.\n"
            f"  It should hold your own groups as GROUP/NAME.yaml (groups: {', '.join((*GROUPS, EXPERIMENT))})."
        )
    return [folder, shipped_configs()]


def group_options(group: str, folders: Sequence[Path]) -> list[str]:
    """Names that GROUP=NAME accepts."""
    files = (file for folder in folders for file in (folder / group).glob("*.yaml") if file.is_file())
    return sorted({file.stem for file in files})


def quoted(argument: str) -> str:
    """KEY=VALUE with the value in quotes, for text that Hydra's grammar has no letters for (accents, brackets, =).

    Values that look like a list, a mapping or a function stay as they are: a slip in them must not become text.
    """
    key, equals, value = argument.partition("=")
    if not equals or not value or STRUCTURED.match(value):
        return argument
    parts = [_in_quotes(part) for part in value.split(",")]
    return f"{key}={','.join(parts)}"


def _in_quotes(text: str) -> str:
    """Quoted as Hydra reads it: only quotes, and backslashes before a quote, are escaped."""
    inner = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{inner}'"


def parse(arguments: Sequence[str]) -> "list[Override]":
    """The command line's overrides, read with Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    found = []
    for argument in arguments:
        try:
            found += parser.parse_overrides([argument])
        except HydraException as error:
            with suppress(HydraException):
                found += parser.parse_overrides([quoted(argument)])
                continue
            raise ConfigError(
                f"{argument!r} is not an override (KEY=VALUE or GROUP=NAME): {str(error).splitlines()[0]}\n"
                "  Quote a value with spaces or brackets for the shell: 'model.hidden=[256,64]'"
            ) from None
    return found


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """One list of overrides per job of a sweep: the product of all comma lists, choice() and range()."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    try:
        jobs: list[list[str]] = BasicSweeper.split_arguments(parse(arguments), None)[0]
    except HydraException as error:
        raise ConfigError(f"{error}\n  Sweep with a comma list, choice(...) or range(...).") from None
    return jobs


def compose(arguments: Sequence[str], folders: Sequence[Path], base: Path | None = None, verb: str = "") -> RunConfig:
    """The checked config of one run.

    base: a run's saved config.yaml to start from in place of ours; groups named on the command line are laid over it.
    verb: what the config is for; "": any.
    Raises ConfigError naming the key, what was expected and what is allowed; a setting without effect is refused too,
    unless it may be one of `base`.
    """
    cfg = drafted(arguments, folders, base)
    check_drafted(cfg, arguments, folders, base, verb)
    return cfg


def check_drafted(
    cfg: RunConfig,
    arguments: Sequence[str],
    folders: Sequence[Path],
    base: Path | None = None,
    verb: str = "",
    without: Collection[str] = (),
) -> None:
    """The checks of `compose` on what is `drafted`; `without`: keys and groups of the command line to pass over."""
    said = {key: value for key, value in typed(arguments).items() if key not in without}
    origins = Origins(said, _lines(arguments, folders, base), folders, base)
    check(cfg, strict=base is None, verb=verb, typed=said, origin=origins)


def typed(arguments: Sequence[str]) -> dict[str, Any]:
    """Keys, as deep as they go, and groups of the command line with their values."""
    return flatten({o.key_or_group: o.value() for o in parse(arguments) if not o.is_delete()})


def drafted(arguments: Sequence[str], folders: Sequence[Path], base: Path | None = None) -> RunConfig:
    """What `compose` gives, unchecked but for names of keys and types of values. Raises ConfigError for those."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    lines = _lines(arguments, folders, base)
    with _readable_errors(parse(arguments)):
        composed = load(lines, folders, base)
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), composed)
        try:
            cfg = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(cfg, RunConfig)
    return cfg


def to_yaml(cfg: RunConfig) -> str:
    """The resolved config as YAML, every key present."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def from_yaml(text: str) -> RunConfig:
    """What `to_yaml` wrote, checked again."""
    from omegaconf import OmegaConf

    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.create(text)))
    assert isinstance(cfg, RunConfig)
    check(cfg)
    return cfg


def chosen_experiment(arguments: Sequence[str]) -> str | None:
    """NAME of experiment=NAME or +experiment=NAME among the overrides."""
    names = [str(override.value()) for override in parse(arguments) if override.key_or_group == EXPERIMENT]
    return names[-1] if names else None


def _lines(arguments: Sequence[str], folders: Sequence[Path], base: Path | None = None) -> list[str]:
    return [_hydra_override(override, folders, base is not None) for override in parse(arguments)]


def _hydra_override(override: "Override", folders: Sequence[Path], over_base: bool) -> str:
    """The override as Hydra wants it, after its key or group option was checked."""
    line, key = str(override.input_line), str(override.key_or_group)
    bare = line.lstrip("+~")
    if key == EXPERIMENT or (key in GROUPS and not override.is_delete() and isinstance(override.value(), str)):
        _check_option(line, key, str(override.value()), folders)
        return f"+{bare}" if key == EXPERIMENT or over_base else bare
    check_key(key, where=f"{line}: ")
    if override.is_delete():
        if not key.startswith(f"{OPEN}."):
            raise ConfigError(f"{line}: only keys below {OPEN!r} can be removed; set {key} to another value instead.")
        return line
    if override.is_sweep_override():
        raise ConfigError(f"{line}: this sweeps over several values.\n  Add -m to run one job for each of them.")
    if key in GROUPS and not isinstance(override.value(), dict):
        options = ", ".join(group_options(key, folders))
        raise ConfigError(f"{line}: {key} is one of: {options}; or set a key below it, as in {key}.KEY=VALUE.")
    if is_section(key) and not isinstance(override.value(), dict):
        raise ConfigError(f"{line}: {key!r} is {expected(key)}; set one of those, as in {key}.KEY=VALUE.")
    return f"++{bare}"


def _check_option(line: str, group: str, name: str, folders: Sequence[Path]) -> None:
    from difflib import get_close_matches

    allowed = group_options(group, folders)
    if name in allowed:
        return
    close = get_close_matches(name, allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{line}: there is no {group} {name!r}.{hint}\n  {group} is one of: {', '.join(allowed)}")


@contextmanager
def _readable_errors(overrides: "Sequence[Override]") -> Iterator[None]:
    """Turn Hydra's and OmegaConf's exceptions into one ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error, overrides) from None
    except YAMLError as error:
        raise ConfigError(f"a config file is not valid YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"a config file among {_files(overrides)} is no UTF-8 text: {error}") from None


def _files(overrides: "Sequence[Override]") -> str:
    """The group options and experiments that were asked for."""
    asked = [o for o in overrides if o.key_or_group in (*GROUPS, EXPERIMENT) and isinstance(o.value(), str)]
    return ", ".join(f"{override.key_or_group}/{override.value()}" for override in asked) or "those of the defaults"


def _explained(error: BaseException, overrides: "Sequence[Override]") -> ConfigError:
    from omegaconf.errors import (
        ConfigAttributeError,
        ConfigKeyError,
        ConfigTypeError,
        KeyValidationError,
        OmegaConfBaseException,
        ValidationError,
    )

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    file = re.search(r"In '([^']+)'", str(error))
    where = f"in config {file.group(1)!r}: " if file else ""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        try:
            check_key(cause.full_key, where)
        except ConfigError as unknown:
            return unknown
    key = _key_of(str(getattr(cause, "full_key", None)))
    if isinstance(cause, ValidationError | KeyValidationError | ConfigTypeError) and key in schema_keys():
        given = [str(override.input_line) for override in overrides if override.key_or_group == key]
        value = re.search(r"Value '(.*?)'", str(cause))
        shown = given[-1] if given else f"{where}{key}={value.group(1)}" if value else f"{where}{key}"
        return ConfigError(f"{shown}: {key} must be {expected(key)}.")
    if merge := re.search(r"Merge error: (\w+) is not a subclass of (\w+)\. value: (.*)", str(cause or error)):
        found, schema, shown = merge.groups()
        section = next((key for key, kind in schema_keys().items() if getattr(kind, "__name__", "") == schema), schema)
        return ConfigError(f"{where}{section} is {shown}, of type {found}: expected {expected(section)}.")
    if isinstance(cause, ValidationError) and cause.full_key:  # a key of a mapping's value
        return ConfigError(f"{where}{cause.full_key}: {str(cause).splitlines()[0]}.")
    text = " ".join(line.strip() for line in str(cause or error).splitlines() if line.strip())
    return ConfigError(where + text)


def _key_of(full_key: str) -> str:
    """The schema's key of what OmegaConf names: a list's item as KEY[I], a mapping's as KEY.NAME."""
    key = full_key.partition("[")[0]
    mapping = key.rpartition(".")[0]
    return mapping if mapping in schema_keys() and not is_section(mapping) else key
