"""The text of `hetrain VERB --keys`: every key with its type, default and comment, read off the schemas' source.

No torch, no Hydra: the list is there at once, and a key cannot be added without being in it.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

from hetrain.cli.evaluated import takes
from hetrain.config.schema import RunConfig

HEAD = """\
Every key, as KEY=DEFAULT, its type and its meaning. These are the schemas' defaults: a config group or an experiment
may set others, and `hetrain VERB ... --cfg job` prints what a command would run with. An optional key takes null.
"""
MODEL = "  model.* are _target_ and the arguments of that class: `hetrain train model=NAME --cfg job` lists them"
OWN = {
    "run": "run=runs/NAME         the run, with the config it saved",
    "checkpoint": "checkpoint=best       or last, step_N; left out: the one that summary.json is about",
    "split": "split=test            or validation, train",
    "out": "out=FILE              .parquet or .csv",
}
KEY_WIDTH, TYPE_WIDTH = 44, 16


def key_list(verb: str, own: tuple[str, ...]) -> str:
    """The text for `verb`, whose keys that are in no config are `own`."""
    lines = [HEAD]
    if own:
        lines += [f"keys of {verb} itself", *(f"  {OWN[key]}" for key in own), ""]
    for prefix, section in _sections(RunConfig, ""):
        keys = [line for line in _keys(section, prefix) if _has(verb, line.strip().partition("=")[0])]
        if keys:
            lines += [f"{prefix.rstrip('.') or 'top level'}: {_meaning(section)}", *keys, ""]
    return "\n".join(lines)


def _has(verb: str, key: str) -> bool:
    if verb in ("prepare", "stats"):
        return key.startswith("data.")
    return verb not in ("eval", "predict") or takes(key)


def _sections(schema: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The dotted prefix and the dataclass of every section, in the order of the schema."""
    yield prefix, schema
    for name, kind in get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from _sections(kind, f"{prefix}{name}.")


def _meaning(section: Any) -> str:
    return " ".join((section.__doc__ or "").replace("``", "`").split())


def _keys(section: Any, prefix: str) -> Iterator[str]:
    """The lines of a section's own keys."""
    source = textwrap.dedent(inspect.getsource(section))
    rows = source.splitlines()
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    defaults = {field.name: field for field in dataclasses.fields(section)}
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        name, kind = node.target.id, ast.unparse(node.annotation)
        if name == "model":
            yield MODEL
        elif kind.isidentifier() and kind.endswith("Config"):
            continue  # a section of its own
        else:
            comment = rows[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
            key = f"{prefix}{name}={_shown(_default(defaults[name]))}"
            line = f"  {key:<{KEY_WIDTH}} {kind.replace(' | None', ', optional'):<{TYPE_WIDTH}} {comment.strip(' #')}"
            yield line.rstrip()


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
