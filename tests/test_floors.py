"""An import points strictly downwards, between floors and inside packages."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hetrain"

# Lowest first; a name is a module or a package of hetrain. Names on one line must not import each other.
FLOORS = [
    # 0: pure rules, bytes, errors, the run's log
    ["errors"],
    ["tables", "consistency", "durable", "json_file", "capacity", "roles", "stop_signals", "codec"],
    ["telemetry", "ranks"],
    # 1: schemas and what composes and checks them; batches; networks; optimizers
    ["config"],
    ["data", "models", "optim", "value_codec"],
    ["stats"],
    # 2
    ["planner", "store"],
    # 3
    ["transport"],
    ["comms"],
    # 4
    ["lookups"],
    ["width_group"],
    ["embedding"],
    ["pulled_bags"],
    # 5
    ["engine"],
    # 6
    ["checkpoint", "evaluate"],
    # 7
    ["training"],
    ["trainer"],
    # 8
    ["readers"],
    ["build"],
    ["launch"],
    # 9
    ["cli"],
    ["__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def files():
    return sorted(p for p in PACKAGE.rglob("*.py") if "configs" not in p.parts)


def dotted(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path):
    """Every hetrain module that a file imports, anywhere in it: late imports obey the floors too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hetrain")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "hetrain":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if exists(full) or node.module == "hetrain" else node.module


def exists(name):
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("path", files(), ids=dotted)
def test_imports_point_downwards(path):
    me = dotted(path).split(".")
    if me == ["hetrain"]:
        return
    assert me[1] in FLOOR, f"{me[1]} has no floor: give it one in FLOORS"
    for name in imported(path):
        other = name.split(".")
        if other[1:] in ([], ["__version__"]) or (other[1] == me[1] and (PACKAGE / me[1]).is_dir()):
            continue
        assert FLOOR[other[1]] < FLOOR[me[1]], f"{'.'.join(me)} imports {name}"


def test_files_of_a_package_import_each_other_without_cycles():
    uses = {dotted(p): {n for n in imported(p) if exists(n)} - {dotted(p)} for p in files()}
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, f"cycle: {' -> '.join([*open_, name])}"
        if name in done or name not in uses:
            return
        open_.append(name)
        for other in sorted(uses[name]):
            visit(other)
        open_.pop()
        done.add(name)

    for name in uses:
        visit(name)


def test_the_trainer_knows_no_consistency_mode():
    for path in (PACKAGE / "trainer.py", PACKAGE / "evaluate.py", *(PACKAGE / "training").glob("*.py")):
        text = path.read_text()
        assert "bsp" not in text, path
        assert "store_engine" not in text
        assert "torchrec_engine" not in text


def test_no_utils_and_no_long_files():
    for path in files():
        assert path.stem not in ("utils", "helpers", "common", "misc")
        assert len(path.read_text().splitlines()) < 400, path
