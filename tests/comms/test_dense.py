"""Dense gradients are sums over ranks, empty batches take part, bytes are a ring's."""

from typing import Any

import pytest
import torch
from torch import nn

from hetrain.comms.dense import DenseReducer, wrap_dense
from hetrain.engine.loss import loss_share
from hetrain.errors import TrainingError
from hetrain.telemetry import Traffic
from tests.ranks import run_ranks


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.rand(12, 5, generator=g), (torch.rand(12, generator=g) > 0.5).float()


def _train(rank: int, world_size: int, cuts: list[list[int]]) -> dict[str, Any]:
    traffic = Traffic()
    reducer = DenseReducer(traffic)
    plain = _model()
    model = wrap_dense(plain, reducer)
    start = dict(traffic.bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = _data()
    waits = []
    for cut in cuts:
        lo, hi = cut[rank], cut[rank + 1]
        loss, _ = loss_share(model(x[lo:hi]).squeeze(1), y[lo:hi], None, 12)
        optimizer.zero_grad()
        loss.backward()
        reducer.wait()
        optimizer.step()
        waits.append(reducer.take_wait_s())
    return {
        "weights": [p.detach().numpy() for p in plain.parameters()],
        "dense": traffic.bytes["dense"] - start["dense"],
        "total": traffic.total - sum(start.values()),
        "waits": waits,
    }


def test_sum_over_ranks_with_uneven_and_empty_batches() -> None:
    cuts = [[0, 6, 12], [0, 1, 12], [0, 12, 12], [0, 0, 12]]
    alone = _train(0, 1, [[0, 12]] * len(cuts))
    ranks = run_ranks(2, _train, cuts)
    size = 4 * sum(w.size for w in alone["weights"])
    for result in ranks:
        for ours, plain in zip(result["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(plain), atol=1e-6, rtol=1e-6)
        assert result["dense"] == result["total"] == len(cuts) * size
        assert all(w > 0 for w in result["waits"])
    for first, second in zip(ranks[0]["weights"], ranks[1]["weights"], strict=True):
        assert (first == second).all()


def _deserted(rank: int, world_size: int) -> str:
    reducer = DenseReducer(Traffic())
    model = wrap_dense(_model(), reducer)
    if rank == 1:
        return ""
    x, _ = _data()
    model(x).sum().backward()
    with pytest.raises(TrainingError) as error:
        reducer.wait()
    return str(error.value)


def test_a_rank_that_left_is_an_error_with_advice() -> None:
    assert "launch.timeout_s" in run_ranks(2, _deserted)[0]


def test_one_rank_is_left_alone() -> None:
    module = _model()
    assert wrap_dense(module, DenseReducer(Traffic())) is module
    assert _train(0, 1, [[0, 12]])["dense"] == 0


def test_weights_mask_padding() -> None:
    logits = torch.tensor([0.5, -1.0, 3.0], requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 1.0])
    masked, total = loss_share(logits, labels, torch.tensor([1.0, 1.0, 0.0]), 4)
    plain, _ = loss_share(logits[:2], labels[:2], None, 4)
    assert torch.equal(masked, plain)
    torch.testing.assert_close(total / 4, masked)
