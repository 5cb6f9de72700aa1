"""`bsp` with pooled embeddings in fewer bytes: two ranks against plain torch, and against itself without."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetrain.comms.pooled_codec import PooledComms
from hetrain.config import DctConfig
from hetrain.planner.torchrec_planner import plan_of
from hetrain.telemetry import Traffic
from tests.engine.bsp import DIM, SEED, TABLES, WIDTH, Net, engine_of, global_batches, optimizer, part, plan
from tests.engine.plain_bags import PlainBags
from tests.engine.test_torchrec_engine_ranks import KINDS, STEPS, shares
from tests.ranks import run_ranks

SPARSITY = 0.5


def engine(comms, kinds, world_size=2, traffic=None):
    made = plan_of(plan(kinds, world_size), TABLES, world_size)
    return engine_of(made, TABLES, optimizer("sgd"), traffic=traffic, pooled=comms)


def train(rank, kinds, comms):
    """Losses, tables and predictions of every step, and the traffic."""
    traffic = Traffic()
    e = engine(comms, kinds, traffic=traffic)
    iterator, losses, predicted = iter(shares(rank)), [], []
    while (out := e.step(iterator)) is not None:
        losses.append(out.loss.item() / out.global_size)
        with traffic.set_aside(), e.evaluating():  # while the next batch's exchange is in flight
            predicted.append(e.predict(shares(rank)[2]).numpy())
    tables = {t: [(p.first_row, p.value.numpy()) for p in pieces] for t, pieces in e._bags.pieces().items()}
    return losses, tables, predicted, traffic


def largest_half(column):
    """1 where a value is among the larger half of its column, per example."""
    order = column.abs().argsort(1, descending=True)[:, : -(-column.shape[1] // 2)]
    return torch.zeros_like(column).scatter_(1, order, 1.0)


class MaskedBags(nn.Module):
    """Plain bags of which every rank's part is masked, per example, before the parts are added."""

    def __init__(self, kinds):
        super().__init__()
        self.plain = PlainBags(TABLES, SEED)
        self.kinds = kinds

    def held(self, rank):
        """Tables of a rank with 1 for its rows."""
        for i, (table, kind) in enumerate(zip(TABLES, self.kinds, strict=True)):
            rows = torch.arange(table.rows)[:, None]
            if kind == "row_wise":
                yield table, (rows // -(-table.rows // 2) == rank).float()
            elif i % 2 == rank:
                yield table, torch.ones(table.rows, 1)

    def forward(self, sparse):
        parts, sums = sparse.to_dict(), {}
        for rank in range(2):
            names = [(f, t, rows) for t, rows in self.held(rank) for f in t.features]
            pooled = torch.cat([self.pooled(parts[f], t, rows) for f, t, rows in names], 1)
            mask = torch.cat([largest_half(part) for part in pooled.split([t.dim for _, t, _ in names], 1)], 1)
            sent = pooled + (pooled.half().float() - pooled).detach()
            for (f, _, _), block in zip(names, (sent * mask).split([t.dim for _, t, _ in names], 1), strict=True):
                sums[f] = sums[f] + block if f in sums else block
        return sums

    def pooled(self, bags, table, rows):
        weight = self.plain.tables[table.name].weight * rows
        return F.embedding_bag(bags.values(), weight, bags.offsets(), mode="sum", include_last_offset=True)


def train_masked(kinds):
    bags = MaskedBags(kinds)
    torch.manual_seed(SEED)
    net = Net(bags)
    dense, losses = torch.optim.Adam(net.layers.parameters(), lr=0.01), []
    for batch in global_batches([sum(s) for s in STEPS]):
        loss = F.binary_cross_entropy_with_logits(net(batch.dense, batch.sparse), batch.labels)
        net.zero_grad()
        loss.backward()
        dense.step()
        with torch.no_grad():
            for weight in bags.plain.weights:
                weight -= optimizer("sgd").lr * weight.grad
        losses.append(loss.item())
    return losses, {t.name: w.detach().numpy() for t, w in zip(TABLES, bags.plain.weights, strict=True)}


def dct(backward, warmup_steps=0):
    return PooledComms("dct", backward, DctConfig(pooled_sparsity=SPARSITY, pooled_warmup_steps=warmup_steps))


def train_dct(rank, world_size, kinds):
    losses, tables, _, _ = train(rank, kinds, dct("none"))
    return losses, tables


@pytest.mark.parametrize("kinds", ["table_wise", "row_wise"])
def test_dct_trains_as_a_masked_model(kinds):
    results = run_ranks(2, train_dct, KINDS[kinds])
    losses, tables = train_masked(KINDS[kinds])
    assert np.sum([found for found, _ in results], 0) == pytest.approx(losses, abs=1e-5)
    for _, held in results:
        for table, pieces in held.items():
            for first, value in pieces:
                assert value == pytest.approx(tables[table][first : first + len(value)], abs=1e-5)


def train_one_hot(rank, world_size):
    """Logits after two steps, every bag with one id."""
    found = {}
    for kinds in ("table_wise", "row_wise", "mixed"):
        e = engine(dct("none"), KINDS[kinds])
        batches = [part(b, 8 * rank, 8 * rank + 8) for b in global_batches([16] * 3, multi_hot=False)]
        iterator = iter(batches[:2])
        while e.step(iterator) is not None:
            pass
        found[kinds] = e.predict(batches[2]).numpy()
    return found


def test_one_process_computes_the_same_function():
    batches = global_batches([16] * 3, multi_hot=False)
    predicted = {}
    for name, comms in {"dct": dct("none"), "none": None}.items():
        single = engine(comms, KINDS["table_wise"], world_size=1)
        iterator = iter(batches[:2])
        while single.step(iterator) is not None:
            pass
        predicted[name] = single.predict(batches[2]).numpy()
    results = run_ranks(2, train_one_hot)
    for kinds in ("table_wise", "row_wise", "mixed"):  # a replicated table among them
        found = np.concatenate([result[kinds] for result in results])
        assert found == pytest.approx(predicted["dct"], abs=1e-4)  # nothing is rounded where nothing travels
        assert np.abs(found - predicted["none"]).max() > 1e-3


def test_predictions_leave_out_what_training_does():
    (batch,) = global_batches([16], multi_hot=False)
    thin, warm, plain = (
        engine(comms, KINDS["table_wise"], world_size=1) for comms in (dct("none"), dct("none", warmup_steps=1), None)
    )
    expected = plain.predict(batch)
    assert torch.equal(warm.predict(batch), expected)  # nothing is left out yet
    warm.step(iter([batch]))
    plain.step(iter([batch]))
    assert torch.equal(warm.predict(batch), plain.predict(batch))  # what the last step did not leave out stays in
    warm.step(iter([batch]))
    plain.step(iter([batch]))
    assert float((warm.predict(batch) - plain.predict(batch)).abs().max()) > 1e-3
    plain = engine(None, KINDS["table_wise"], world_size=1)
    masked = Net(MaskedBags(KINDS["table_wise"]))
    masked.load_state_dict(plain._model.state_dict(), strict=False)
    assert thin.predict(batch).numpy() == pytest.approx(masked(batch.dense, batch.sparse).detach().numpy(), abs=1e-4)
    assert float((thin.predict(batch) - expected).abs().max()) > 1e-3


def compare(rank, world_size):
    plain = train(rank, KINDS["mixed"], None)
    warm = train(rank, KINDS["mixed"], dct("dct", warmup_steps=99))
    assert warm[0] == plain[0]
    assert warm[3].bytes == plain[3].bytes
    for table, pieces in plain[1].items():
        for (_, mine), (_, theirs) in zip(warm[1][table], pieces, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    part_warm = train(rank, KINDS["mixed"], dct("dct", warmup_steps=2))
    assert part_warm[0][:2] == plain[0][:2]
    assert part_warm[0][2:] != plain[0][2:]
    assert engine(PooledComms(), KINDS["mixed"])._bags.exchange is None  # TorchRec's own
    everything = PooledComms("dct", "dct", DctConfig(pooled_sparsity=0.0))
    pairs = [(PooledComms("fp16", "fp16"), "mixed"), (PooledComms("int8", "fp16"), "row_wise"), (everything, "mixed")]
    for comms, kinds in pairs:
        one, other = engine(comms, KINDS[kinds]), engine(None, KINDS[kinds])
        for e in (one, other):
            e.step(iter([shares(rank)[0], shares(rank)[1]]))
        for name, pieces in one._bags.pieces().items():
            for mine, theirs in zip(pieces, other._bags.pieces()[name], strict=True):
                theirs.value.copy_(mine.value)
        other._model.load_state_dict(one._model.state_dict())
        assert torch.equal(one.predict(shares(rank)[2]), other.predict(shares(rank)[2]))  # the codec is for training


def test_warm_up_steps_and_predictions_are_those_of_none_bit_for_bit():
    run_ranks(2, compare)


def count(rank, world_size):
    """Bytes of one full step with every pair, and values clipped."""
    found = {}
    for kinds in ("table_wise", "row_wise"):
        for forward, backward in [
            ("none", "none"),
            ("fp16", "bf16"),
            ("none", "int8"),
            ("dct", "dct"),
            ("dct", "none"),
        ]:
            traffic = Traffic()
            e = engine(PooledComms(forward, backward, DctConfig(pooled_sparsity=0.75)), KINDS[kinds], traffic=traffic)
            e.step(iter([part(global_batches([16])[0], 8 * rank, 8 * rank + 8)]))
            found[kinds, forward, backward] = (traffic.bytes["pooled_fwd"], traffic.bytes["pooled_bwd"])
    clipped = {}
    for name in ("fp16", "bf16"):
        traffic = Traffic()
        e = engine(PooledComms(name, "none"), KINDS["table_wise"], traffic=traffic)
        for pieces in e._bags.pieces().values():
            for piece in pieces:
                piece.value.fill_(1e5)
        e.step(iter([part(global_batches([16], multi_hot=False)[0], 8 * rank, 8 * rank + 8)]))
        clipped[name] = traffic.clipped
    return found, clipped


def test_bytes_and_clipped_values():
    # rank 0 holds a (8 wide) and c (4), rank 1 holds b for two features (16); batches of 8 examples
    for rank, (found, clipped) in enumerate(run_ranks(2, count)):
        mine, others = ((DIM + 4, 2 * DIM), (2 * DIM, DIM + 4))[rank]
        assert found["table_wise", "none", "none"] == (8 * 4 * mine, 8 * 4 * others)
        assert found["table_wise", "fp16", "bf16"] == (8 * 2 * mine, 8 * 2 * others)
        assert found["table_wise", "none", "int8"] == (8 * 4 * mine, 8 * (others + 8))  # scale and offset
        # a quarter of the values, as float16, and a byte of a bitmap for each of two columns
        assert found["table_wise", "dct", "dct"] == (8 * (2 * mine // 4 + 2), 8 * 2 * others // 4)
        assert found["table_wise", "dct", "none"] == (8 * (2 * mine // 4 + 2), 8 * 4 * others // 4)
        assert found["row_wise", "none", "none"] == (8 * 4 * WIDTH, 8 * 4 * WIDTH)
        assert found["row_wise", "fp16", "bf16"] == (8 * 2 * WIDTH, 8 * 2 * WIDTH)
        assert found["row_wise", "none", "int8"] == (8 * 4 * WIDTH, 8 * (WIDTH + 8))
        assert found["row_wise", "dct", "dct"] == (8 * (2 * WIDTH // 4 + 4), 8 * 2 * WIDTH // 4)
        assert clipped == {"fp16": 16 * mine, "bf16": 0}
