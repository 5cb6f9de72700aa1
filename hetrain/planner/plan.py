"""A plan: which rank holds which rows and columns of which table. Plain data, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetrain.errors import ConfigError
from hetrain.json_file import whole_number
from hetrain.planner.cuts import check_bounds, check_cover, check_torchrec_cut, refuse_columns
from hetrain.planner.piece import SHARDING_TYPES, Piece
from hetrain.tables import Table

ENGINES = ("torchrec", "store")


@dataclass(frozen=True)
class Plan:
    """Where every row lives. A replicated table has no piece: every rank holds it whole."""

    engine: str  # torchrec | store
    world_size: int
    pieces: tuple[Piece, ...]
    replicated: frozenset[str]
    sharding: dict[str, str]  # table name -> one of SHARDING_TYPES
    ranks_per_node: int = 0  # 0: all ranks on one node

    def of_table(self, name: str) -> tuple[Piece, ...]:
        """The pieces of one table, by first row, then first column."""
        return self.by_table.get(name, ())

    @cached_property
    def by_table(self) -> dict[str, tuple[Piece, ...]]:
        """Table name -> its pieces, by first row, then first column."""
        held: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            held.setdefault(piece.table, []).append(piece)
        return {name: tuple(sorted(ps, key=lambda p: (p.first_row, p.first_column))) for name, ps in held.items()}

    def to_json(self) -> dict[str, Any]:
        """The plan as `plan.json` and a checkpoint's layout hold it."""
        return {
            "engine": self.engine,
            "world_size": self.world_size,
            "ranks_per_node": self.ranks_per_node,
            "replicated": sorted(self.replicated),
            "sharding": dict(sorted(self.sharding.items())),
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` wrote; raises ConfigError naming what is missing or wrong.

        It is not checked against any tables: `check` does that.
        """
        try:
            return cls(
                str(held["engine"]),
                whole_number(held["world_size"]),
                tuple(Piece.from_json(piece) for piece in held["pieces"]),
                frozenset(_texts(held["replicated"])),
                {str(name): str(kind) for name, kind in dict(held["sharding"]).items()},
                whole_number(held.get("ranks_per_node", 0)),
            )
        except KeyError as error:
            raise ConfigError(f"plan: {error} is missing; expected what hetrain wrote as plan.json") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"plan: {error}; expected what hetrain wrote as plan.json") from error

    def check(self, tables: Sequence[Table]) -> None:
        """Raise ConfigError unless every element of every table is held exactly once (or by all, replicated).

        For TorchRec, blocks of rows must be ceil(rows / ranks): other blocks train silently wrong
        there. For the store, pieces are whole columns (and see replicas.check_replicas).
        """
        if self.engine not in ENGINES:
            raise ConfigError(f"plan.engine={self.engine!r}: expected one of {', '.join(ENGINES)}")
        if self.ranks_per_node < 0 or (self.ranks_per_node and self.world_size % self.ranks_per_node):
            raise ConfigError(
                f"plan.ranks_per_node={self.ranks_per_node}: expected a divisor of the {self.world_size} ranks"
            )
        for name, kind in self.sharding.items():
            if kind not in SHARDING_TYPES:
                raise ConfigError(f"plan: table {name!r} is {kind!r}; expected one of {', '.join(SHARDING_TYPES)}")
        known = {t.name for t in tables}
        for name in sorted(self.by_table.keys() | self.replicated):
            if name not in known:
                raise ConfigError(f"plan: table {name!r} is not a table of this run; make the plan again")
        for table in tables:
            self._check_table(table)

    def _check_table(self, table: Table) -> None:
        pieces = self.of_table(table.name)
        if table.name in self.replicated:
            if pieces:
                raise ConfigError(f"plan: table {table.name!r} is replicated and also held in pieces; choose one")
            return
        for p in pieces:
            check_bounds(p, table, self.world_size)
        check_cover(pieces, table)
        if self.engine == "store":
            refuse_columns(pieces, table)
        else:
            kind = self.sharding.get(table.name)
            check_torchrec_cut(pieces, table, kind, self.world_size, self.ranks_per_node or self.world_size)


def _texts(held: object) -> list[str]:
    if not isinstance(held, list) or not all(isinstance(text, str) for text in held):
        raise ValueError(f"{held!r} is no list of names")
    return held
