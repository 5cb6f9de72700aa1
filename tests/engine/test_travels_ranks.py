"""Rows that travel as a codec's bytes between real ranks, in rounds and at one's own pace."""

from typing import Any

import numpy as np
import torch

from hetrain.config import ScheduleConfig
from hetrain.store.row_codec import RowCodec
from hetrain.store.threshold import Dct
from hetrain.telemetry import Traffic
from tests.engine.async_cases import make_async
from tests.engine.held import load, reproducible, save, tables_of, whole_tables
from tests.engine.plain_bags import PlainBags
from tests.engine.store_cases import SEED, batches, make_engine, make_tables, train
from tests.handed_to_gloo import handed_to_gloo
from tests.ranks import run_ranks

DCT = Dct(sparsity=0.7, max_age=2, refresh_steps=4, warmup_steps=1)
OPTIONS = ["none", "fp16", "bf16", "int8", "dct"]
CUT = 7


def _settings(travels: str) -> dict[str, Any]:
    return {"rows": travels, "dct": DCT if travels == "dct" else None}


def _round(rank: int, world_size: int, travels: str, capacity: float) -> dict[str, Any]:
    """Bytes counted and handed to gloo, what looking shows and what the flush leaves; a resume midway."""
    traffic = Traffic()
    kwargs = {"capacity": capacity, "staleness": 2, "audit_every": 1, "clock": "sum", **_settings(travels)}
    data = batches(rank, world_size, multi_hot=True)
    with handed_to_gloo() as handed:
        engine = make_engine(world_size, "sgd", traffic=traffic, **kwargs)
        losses = train(engine, iter(data))
        before = tables_of(engine)
        engine.finish()
        counted = sum(n for of in (traffic.bytes, traffic.aside) for channel, n in of.items() if channel != "dense")
    first, second = (make_engine(world_size, "sgd", **kwargs) for _ in range(2))
    stream = iter(data)
    for _ in range(CUT):
        first.step(stream)
    saved = save(first)
    load(second, saved, exact=True)
    same = train(first, stream) == train(second, iter(data[CUT:])) == losses[CUT:]
    return {
        "losses": losses,
        "same": same and reproducible(first) == reproducible(second),
        "before": before,
        "after": tables_of(engine),
        "bytes": dict(traffic.bytes),
        "sent": handed.nbytes,
        "counted": counted,
        "report": engine.report(),
    }


def _rounds(rank: int, world_size: int) -> dict[tuple[str, float], dict[str, Any]]:
    return {(t, c): _round(rank, world_size, t, c) for t in OPTIONS for c in (0, 60)}


def test_rounds_send_what_they_count_and_lose_nothing() -> None:
    ranks = run_ranks(2, _rounds)
    for key in ranks[0]:
        travels, capacity = key
        found, exact = [rank[key] for rank in ranks], [rank["none", capacity] for rank in ranks]
        for ours, plain in zip(found, exact, strict=True):
            assert ours["sent"] == ours["counted"], key
            assert ours["same"], key
            np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=0.05, err_msg=str(key))
            for name, value in ours["before"].items():
                np.testing.assert_array_equal(value, ours["after"][name], err_msg=f"{key} {name}")
            assert ours["report"]["missed_updates_max"] == plain["report"]["missed_updates_max"]
            share = {"none": 1, "int8": 16 / 32}.get(travels, 0.5)  # of rows of 8 values; which travel, clocks decide
            assert ours["bytes"]["rows_pull"] == share * plain["bytes"]["rows_pull"], key
            if travels == "dct":
                # what a small cache evicts goes whole, and so does what waits at the end
                assert ours["bytes"]["rows_push"] < 0.55 * plain["bytes"]["rows_push"]
                assert 0 < ours["report"]["residue_age_max"] <= DCT.max_age
            else:
                assert ours["bytes"]["rows_push"] == share * plain["bytes"]["rows_push"], key
        tables, plain_tables = (whole_tables([rank["after"] for rank in side]) for side in (found, exact))
        for name in ("t0.value", "t1.value", "t2.value"):
            np.testing.assert_allclose(tables[name], plain_tables[name], rtol=0, atol=0.02, err_msg=str(key))


def _pushing(rank: int, world_size: int, mode: str, travels: str) -> dict[str, Any]:
    """Gradients computed, and the rows at the end; looked at in between."""
    traffic = Traffic()
    settings = {"capacity": 0.3, "staleness": 2, **_settings(travels)}
    engine = make_async(mode, dims=(8, 8, 8), traffic=traffic, schedule=ScheduleConfig(), **settings)
    (group,) = engine._groups
    made = torch.zeros(group.space.rows, 8, dtype=torch.float64)
    table = group._table_for

    def recorded(rows: int) -> Any:
        kernel = table(rows)
        if "gradients" not in vars(kernel):
            gradients = kernel.gradients

            def taken(slots: torch.Tensor) -> torch.Tensor:
                found = gradients(slots)
                made.index_add_(0, engine._bags._reads[0].reading.rows, found.double())
                return found

            kernel.gradients = taken
        return kernel

    group._table_for = recorded
    data = batches(rank, world_size, multi_hot=True)
    losses = train(engine, iter(data))
    engine.finish()
    engine._transport.barrier()
    tables = tables_of(engine)
    return {"losses": losses, "made": made.numpy(), "tables": tables, "bytes": dict(traffic.bytes)}


def _paces(rank: int, world_size: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {(m, t): _pushing(rank, world_size, m, t) for m in ("asp", "ssp") for t in OPTIONS}


def test_at_ones_own_pace_all_gradients_arrive() -> None:
    """With SGD rows end where they start less the rate times all gradients, to the codec's rounding."""
    ranks = run_ranks(2, _paces)
    start = torch.cat([w.detach() for w in PlainBags(make_tables((8, 8, 8)), SEED).weights]).double().numpy()
    for key in ranks[0]:
        tables = whole_tables([rank[key]["tables"] for rank in ranks])
        found = np.concatenate([tables[f"t{i}.value"] for i in range(3)])
        moved = 0.3 * sum(rank[key]["made"] for rank in ranks)
        off = {"none": 1e-6, "int8": 2e-4, "bf16": 1e-4}.get(key[1], 3e-5)
        np.testing.assert_allclose(found, start - moved, rtol=0, atol=off, err_msg=str(key))
        assert np.abs(moved).max() > 2e-3
        assert all(np.isfinite(rank[key]["losses"]).all() for rank in ranks)
    for rank in ranks:
        for mode in ("asp", "ssp"):
            pushed = {t: rank[mode, t]["bytes"]["rows_push"] for t in OPTIONS}
            assert pushed["fp16"] == pushed["bf16"] == pushed["int8"] == pushed["none"] / 2
            assert pushed["dct"] < 1.1 * pushed["fp16"]  # whole at the end


def test_bytes_of_small_rows() -> None:
    """8-bit rows of 8 values cost as much as 16-bit ones: their scale and offset take 8 bytes."""
    assert [RowCodec(t, 8).row_bytes for t in OPTIONS] == [32, 16, 16, 16, 16]
