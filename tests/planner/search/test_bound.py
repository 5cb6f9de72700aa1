"""The functions behind the bound add up to at most 1 on a rank, and known models are planned near it."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.planner.options import Options
from hetrain.planner.search.bound import lower_bound
from hetrain.planner.search.hierarchical import search
from hetrain.planner.search.menu import make_menu
from hetrain.planner.search.packing import shares
from hetrain.planner.torchrec_prices import TorchRecPrices

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from planner import RECORDED, cluster
from planner_tables import workload


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 30))
def test_shares_of_a_rank_add_up_to_at_most_one(parts, idle):
    of_rank = np.array(parts, dtype=float) / (sum(parts) + idle)
    for reason, share in shares():
        assert share(of_rank).sum() <= 1 + 1e-9, reason


@pytest.mark.parametrize(("ranks", "near"), [(8, 1.003), (16, 1.003), (128, 1.003)])
def test_criteo_is_planned_at_the_bound_and_better_than_by_torchrec(ranks, near):
    loads = workload("kaggle")
    c = cluster(loads, ranks, reserve_ids=True)
    found, bound = search(make_menu(loads, c, TorchRecPrices(c, 8192).cuts, Options()))
    assert bound.ms <= found.slowest <= bound.ms * near
    assert found.slowest < min(RECORDED["kaggle"][ranks])


def test_buffers_alone_can_be_too_much():
    loads = workload("colossal")
    c = cluster(loads, 128, reserve_ids=True)
    bound = lower_bound(make_menu(loads, c, TorchRecPrices(c, 8192).cuts, Options()))
    assert not bound.feasible
    assert bound.reason == "the leanest cuts need 13.16 GiB of hbm on the mean rank of 10.26"
