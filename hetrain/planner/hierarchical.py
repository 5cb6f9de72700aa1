"""The hierarchical strategy: every table's cut chosen against the lower bound, placed largest first, then improved."""

from hetrain.planner.bound import Bound, lower_bound
from hetrain.planner.menu import Menu
from hetrain.planner.place import Layout

TARGETS = (1.0, 1.02, 1.05, 1.1, 1.2)  # of the bound: a slowest rank that choices are made for
EVERYWHERE = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)  # of that: what every rank may spend on all
SIZES = (1.0, 0.5, 0.25, 0.12, 0.06)  # of the rest: the largest part
ROOMS = (1.0, 0.985, 0.95, 0.9)  # shares of the memory of the mean rank that a choice may use
GOOD = 1.002  # of the bound: the search stops
IMPROVED = 4  # layouts that the local search works on


def search(menu: Menu) -> tuple[Layout | None, Bound]:
    """The best layout found, None where no placing succeeds, and the bound on all of them."""
    bound = lower_bound(menu)
    if not bound.feasible:
        return None, bound
    return bound
