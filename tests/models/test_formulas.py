"""Each model against a slow computation of its formula from its own weights."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from hetrain.models import DCN, DLRM, WDL, DeepFM
from hetrain.models.cross import VectorCross
from hetrain.models.deepfm import factorization_machine
from hetrain.models.dlrm import PairwiseDots
from hetrain.models.pooling import Pooled
from tests.models.bags import DENSE, DIM, FEATURES, PlainBags, batch

SIZE = 5


def linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def mlp(layers: list[nn.Linear], x: Tensor, *, last_relu: bool = True) -> Tensor:
    for i, layer in enumerate(layers):
        x = x @ layer.weight.T + layer.bias
        x = x.clamp(min=0) if last_relu or i < len(layers) - 1 else x
    return x


def rows_of(model: nn.Module, sparse) -> Tensor:
    """[B, F, D], each bag summed id by id."""
    rows = torch.zeros(SIZE, len(FEATURES), DIM)
    for f, name in enumerate(FEATURES):
        for b, ids in enumerate(sparse[name].to_dense()):
            for i in ids.tolist():
                rows[b, f] += model.bags.tables[name][i].detach()
    return rows


@pytest.fixture
def inputs():
    torch.manual_seed(7)
    return batch(SIZE)


def check(model: nn.Module, inputs, expected: Tensor) -> None:
    torch.testing.assert_close(model(*inputs).detach(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("deep", ["all", "dense"])
def test_wdl_is_a_linear_model_plus_an_mlp(inputs, deep: str) -> None:
    dense, sparse = inputs
    model = WDL(PlainBags(), DENSE, FEATURES, DIM, hidden=[8, 6], deep=deep)
    rows = rows_of(model, sparse).flatten(1)
    both = torch.cat([rows, dense], 1)
    wide, mlp_in = (both, both) if deep == "all" else (rows, dense)
    expected = wide @ model.wide.weight[0] + model.wide.bias + mlp(linears(model.deep), mlp_in) @ model.out.weight[0]
    check(model, inputs, expected)


def test_wdl_of_hets_experiments_has_their_dense_parameters() -> None:
    """137.98K in the paper, where no layer has a bias."""
    features = [f"C{i}" for i in range(26)]
    model = WDL(nn.Identity(), 13, features, 128, deep="dense")
    assert sum(p.numel() for p in model.parameters() if p.dim() == 2) == 137_984


@torch.no_grad()
def test_deepfm_against_the_double_sum(inputs) -> None:
    dense, sparse = inputs
    model = DeepFM(PlainBags(), DENSE, FEATURES, DIM, hidden=[8, 6])
    rows = rows_of(model, sparse)
    x = torch.cat([rows.flatten(1), dense], 1)
    pairs = sum((rows[:, i] * rows[:, j]).sum(1) for i, j in combinations(range(len(FEATURES)), 2))
    first = x @ model.first_order.weight[0] + model.first_order.bias
    check(model, inputs, first + pairs + mlp(linears(model.deep), x) @ model.out.weight[0])


@torch.no_grad()
@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("kind", ["v2", "low_rank", "v1"])
def test_dcn_against_the_loop_over_elements(inputs, kind: str, structure: str) -> None:
    dense, sparse = inputs
    hyper = {"low_rank": {"cross_rank": 3}, "v1": {"cross": "v1"}, "v2": {}}[kind]
    model = DCN(PlainBags(), DENSE, FEATURES, DIM, hidden=[8, 6], cross_layers=3, structure=structure, **hyper)
    for parameter in model.cross.parameters():
        parameter.normal_()  # biases start at zero: give them a part
    x0 = torch.cat([rows_of(model, sparse).flatten(1), dense], 1)
    crossed = torch.stack([crossed_by_hand(model.cross, kind, example) for example in x0])
    if structure == "stacked":
        expected = mlp(linears(model.deep), crossed) @ model.out.weight[0] + model.out.bias
    else:
        last = torch.cat([model.cross_out.weight[0], model.out.weight[0]])
        expected = torch.cat([crossed, mlp(linears(model.deep), x0)], 1) @ last + model.out.bias
    torch.testing.assert_close(model(*inputs), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def crossed_by_hand(cross: nn.Module, kind: str, x0: Tensor) -> Tensor:
    x = x0.double()
    for layer in range(3):
        bias = cross.bias[layer].flatten().double()
        if kind == "v1":
            x = x0 * torch.dot(cross.weight[layer].double(), x) + bias + x
            continue
        matrix = cross.kernels[layer] if kind == "v2" else cross.W_kernels[layer] @ cross.V_kernels[layer]
        x = torch.stack([x0[i] * (torch.dot(matrix[i].double(), x) + bias[i]) + x[i] for i in range(len(x))])
    return x.float()


@torch.no_grad()
@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_dlrm_against_explicit_pairs(inputs, interaction: str) -> None:
    dense, sparse = inputs
    model = DLRM(
        PlainBags(), DENSE, FEATURES, DIM, bottom=[8, DIM], top=[8, 1], interaction=interaction, cross_layers=3
    )
    vectors = torch.cat([mlp(linears(model.bottom), dense).unsqueeze(1), rows_of(model, sparse)], 1)
    if interaction == "dcn":
        top = torch.stack([crossed_by_hand(model.cross, "v2", example) for example in vectors.flatten(1)])
    else:
        pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i, j in combinations(range(len(FEATURES) + 1), 2)]
        top = torch.cat([vectors[:, 0], torch.stack(pairs, 1)], 1)
    expected = mlp(linears(model.top), top, last_relu=False).squeeze(1)
    torch.testing.assert_close(model(*inputs), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_blocks_have_the_gradients_of_their_formulas() -> None:
    torch.manual_seed(1)
    double = {"dtype": torch.float64, "requires_grad": True}
    assert torch.autograd.gradcheck(factorization_machine, torch.randn(3, 4, 2, **double))
    assert torch.autograd.gradcheck(PairwiseDots(4), torch.randn(3, 4, 2, **double))
    assert torch.autograd.gradcheck(VectorCross(5, 3).double(), torch.randn(3, 5, **double))


def test_our_blocks_equal_torchrecs_where_both_compute_the_same() -> None:
    from torchrec.models.dlrm import InteractionArch
    from torchrec.modules.crossnet import VectorCrossNet

    vectors = torch.randn(3, len(FEATURES) + 1, DIM)
    theirs = InteractionArch(len(FEATURES))(vectors[:, 0], vectors[:, 1:])
    torch.testing.assert_close(PairwiseDots(len(FEATURES) + 1)(vectors), theirs[:, DIM:])
    ours, reference = VectorCross(6, 2), VectorCrossNet(6, 2)
    with torch.no_grad():
        for layer in range(2):
            reference.kernels[layer].copy_(ours.weight[layer].unsqueeze(1))
    x = torch.randn(4, 6)
    torch.testing.assert_close(ours(x), reference(x))


def test_pooled_shares_memory_when_the_keys_stand_in_order() -> None:
    bags = PlainBags()(batch(3)[1])
    assert Pooled(FEATURES)(bags).data_ptr() == bags.values().data_ptr()
    with pytest.raises(KeyError):
        Pooled([*FEATURES, "C9"])(bags)
