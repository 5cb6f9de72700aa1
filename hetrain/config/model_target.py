"""`model._target_`: a class by its import path, and whether the config's keyword arguments fit it."""

import importlib
import inspect
from difflib import get_close_matches
from typing import Any

from hetrain.errors import ConfigError

GIVEN = ("bags", "dense_features", "sparse_features")  # what hetrain itself passes in


def model_class(target: str) -> type:
    """The class at import path `target`; ConfigError says which part of the path is wrong."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise ConfigError(
            f"model._target_={target}: there is no module {module_name!r}.\n"
            "  Your own class must be importable: its module in the current folder or on PYTHONPATH."
        ) from None
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = sorted(key for key, value in vars(module).items() if isinstance(value, type) and key[0] != "_")
        raise ConfigError(f"model._target_={target}: {module_name} has no class {name!r}, but {', '.join(classes)}.")
    return found


def check_model(model: dict[str, Any]) -> None:
    """Raise ConfigError when the class of `model` cannot be made with the given keys."""
    kind = model_class(model["_target_"])
    parameters = _parameters(model["_target_"], kind)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [p.name for p in named if p.name not in GIVEN]
    given = [key for key in model if key != "_target_"]
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        missing = [name for name in GIVEN if name not in {p.name for p in named}]
        if missing:
            raise ConfigError(
                f"model._target_={model['_target_']}: its constructor lacks {', '.join(missing)}.\n"
                f"  A model class takes {', '.join(GIVEN)} and then its own keyword arguments."
            )
        for key in given:
            if key not in allowed:
                close = get_close_matches(key, allowed, n=1)
                hint = f" Did you mean model.{close[0]}?" if close else ""
                raise ConfigError(
                    f"model.{key}={model[key]}: {kind.__name__} has no argument {key!r}.{hint}\n"
                    f"  It takes: {', '.join(allowed)}"
                )
    needed = [p.name for p in named if p.default is p.empty and p.name in allowed and p.name not in given]
    if needed:
        raise ConfigError(f"model: {kind.__name__} needs {', '.join(f'model.{name}' for name in needed)} as well.")


def _parameters(target: str, kind: type) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):  # built-in classes have none
        raise ConfigError(
            f"model._target_={target}: its arguments cannot be read, so it is no model class.\n"
            f"  A model class takes {', '.join(GIVEN)} and then its own keyword arguments."
        ) from None
