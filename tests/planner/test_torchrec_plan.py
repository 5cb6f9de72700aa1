"""Our plans as TorchRec's: the pieces as they stand, the kernel that trains them, refusals by name."""

from dataclasses import replace

import pytest
import torch

from hetrain.errors import ConfigError
from hetrain.planner.torchrec_plan import check_row_optimizer, sharding_plan_of
from hetrain.planner.torchrec_planner import plan_of
from tests.engine.cuts import FOUR, TABLES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("kind", FOUR)
def test_there_and_back(kind):
    made = sharding_plan_of(FOUR[kind], TABLES, CPU)
    back = plan_of(made, TABLES, 4)
    assert (sorted(back.pieces), back.replicated, back.sharding) == (
        sorted(FOUR[kind].pieces),
        FOUR[kind].replicated,
        FOUR[kind].sharding,
    )
    for name, parameter in made.plan[""].items():
        assert parameter.compute_kernel == ("dense" if name in FOUR[kind].replicated else "fused")


def in_tiers(*tiers):
    plan = FOUR["mixed"]
    pieces = [replace(piece, tier=tiers[n % len(tiers)]) for n, piece in enumerate(plan.pieces)]
    return replace(plan, pieces=tuple(pieces))


def test_each_memory_has_its_kernel_on_the_ranks_own_device():
    for tier, kernel in (("hbm", "fused"), ("ddr", "fused_uvm")):
        parameters = sharding_plan_of(in_tiers(tier), TABLES, CUDA, ranks_per_host=2).plan[""]
        assert {p.compute_kernel for p in parameters.values()} <= {kernel, "dense"}
        places = [shard.placement for p in parameters.values() if p.sharding_spec for shard in p.sharding_spec.shards]
        assert {(place.rank(), str(place.device())) for place in places} == {(r, f"cuda:{r % 2}") for r in range(4)}


@pytest.mark.parametrize(
    ("tiers", "device", "words"),
    [
        (["hbm"], CPU, "in the memory hbm; expected ddr, from which launch.device=cpu trains"),
        (["cached"], CUDA, "in the memory cached; expected hbm or ddr"),
        (["hbm", "ddr"], CUDA, "in the memory ddr and hbm at once"),
    ],
)
def test_memories_that_no_kernel_trains_from_are_refused(tiers, device, words):
    with pytest.raises(ConfigError, match=words):
        sharding_plan_of(in_tiers(*tiers), TABLES, device)


def test_columns_of_odd_widths_are_refused():
    plan = FOUR["column_wise"]
    first, second = (piece for piece in plan.pieces if piece.table == "a")
    narrow = (replace(first, columns=6), replace(second, first_column=6, columns=10))
    odd = replace(plan, pieces=(*narrow, *(piece for piece in plan.pieces if piece.table != "a")))
    odd.check(TABLES)
    with pytest.raises(ConfigError, match="rank 3 holds 6 columns of table 'a'; expected a multiple of 4"):
        sharding_plan_of(odd, TABLES, CPU)


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise", "grid_shard"])
def test_row_wise_sums_of_some_columns_are_refused(kind):
    for name in ("sgd", "adagrad"):
        check_row_optimizer(FOUR[kind], TABLES, name)
    with pytest.raises(ConfigError, match=rf"rowwise_adagrad: table 'a' is {kind}.*adagrad or sgd"):
        check_row_optimizer(FOUR[kind], TABLES, "rowwise_adagrad")
    check_row_optimizer(FOUR["table_row_wise"], TABLES, "rowwise_adagrad")
