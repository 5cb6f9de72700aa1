"""Layouts made table by table, the dearest first, each with the cut and places that suit what is there already."""

import numpy as np

from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.insert import WASTE, Inserter
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.place import Layout
from hetrain.planner.search.worth import Worth


def build(
    menu: Menu, spent: Worth, target: float, how: int, memory: float = 0.0, choice: Ints | None = None
) -> Layout | None:
    """A layout of all tables for a slowest rank of `target` ms; None: memory does not suffice.

    Args:
        menu: the tables.
        spent: what a cut wastes.
        target: the milliseconds that no rank should exceed.
        how: SNUG, LOOSE or ALIGNED.
        memory: 0 to 1, the weight of bytes in what is dear.
        choice: a cut for every table [tables], that or one like it is taken as long as memory suffices.
    """
    layout = Layout(menu)
    inserter = Inserter(layout, spent)
    inserter.target = target
    order = _dearest_first(menu, inserter.waste / (WASTE * target), memory)
    if choice is not None:  # what many ranks share goes first: single ranks even out the rest
        order.sort(key=lambda t: menu.cuts[menu.kind_of[t]][choice[t]].place)
    for table in order:
        like = None if choice is None else int(choice[table])
        if not inserter.insert(table, how, like=like) and (like is None or not inserter.insert(table, how)):
            return None
    return layout


def _dearest_first(menu: Menu, ranks: Floats, memory: float) -> list[int]:
    size = sum(
        np.where(menu.there, used, np.inf).min(1) * menu.cluster.world_size / most
        for used, most in ((menu.hbm, menu.cluster.hbm_bytes), (menu.ddr, menu.cluster.ddr_bytes))
        if most
    )
    time = np.where(menu.there, ranks, np.inf).min(1)
    dear = ((1 - memory) * time + memory * size)[menu.kind_of]
    order: list[int] = np.argsort(-dear, kind="stable").tolist()
    return order
