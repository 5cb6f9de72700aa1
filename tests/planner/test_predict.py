"""The cost of any plan is what the strategy that made it says; stats become a skew that gives the counted figures."""

from pathlib import Path

import numpy as np
import pytest

from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.measured import skew_of
from hetrain.planner.options import Constraint, Options
from hetrain.planner.piece import SHARDING_TYPES
from hetrain.planner.predict import bottleneck_of, predict
from hetrain.planner.strategies import make_plan
from hetrain.planner.workload import TableLoad
from hetrain.stats.measure import measure
from hetrain.stats.spectrum import Spectrum
from hetrain.tables import Table

CLUSTER = Cluster("cuda", 2, 2, GIB, 4 * GIB, 1000.0, 50.0, 300.0, 20.0)


def test_every_kind_of_cut_costs_what_its_maker_said() -> None:
    loads = [TableLoad(Table(kind, 4000, 32, (kind,), 0.0), (3.0,), 4, 128) for kind in SHARDING_TYPES]
    rules = {kind: Constraint((kind,), ("ddr",) if kind == "row_wise" else ()) for kind in SHARDING_TYPES}
    planned = make_plan("memory_balanced", loads, CLUSTER, "torchrec", 512, Options(constraints=rules))
    assert set(planned.plan.sharding.values()) == set(SHARDING_TYPES)
    found = predict(planned.plan, loads, CLUSTER, 512)
    for one, other in zip(found, planned.ranks, strict=True):
        assert vars(one) == pytest.approx(vars(other))
    slowest = max(found, key=lambda cost: cost.total_ms)
    said = bottleneck_of(planned.plan, loads, CLUSTER, 512, slowest)
    share = max(slowest.compute_ms, slowest.comm_ms) / slowest.total_ms
    assert said.startswith(f"rank {slowest.rank}: {share:.0%} of its time is ")
    assert "Most is table 'row_wise'" in said  # its rows lie in the host's memory


def test_a_columns_skew_gives_the_counted_figures(sample: Path) -> None:
    for column in measure(sample)["columns"]:
        skew = skew_of(column)
        assert skew is not None
        for batch, ids in column["unique"].items():
            assert skew.unique_ids(int(batch) * column["pooling"]) == pytest.approx(ids, rel=0.02)
        groups = np.array(column["spectrum"])
        spectrum = Spectrum(groups[:, 0].astype(np.int64), groups[:, 1])
        for share in (0.1, 0.3, 1.0):
            ids = round(share * column["distinct"])
            exact = spectrum.share_of_hottest(ids)
            assert skew.top_share(ids / column["distinct"]) == pytest.approx(exact, abs=1e-6)
        assert skew.share_below(column["rows"]) == 1
    assert skew_of({"spectrum": []}) is None
