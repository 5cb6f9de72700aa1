"""What holds for every model, whatever it computes."""

import pytest
import torch
import yaml
from torch import nn

from hetrain.errors import ConfigError
from hetrain.models import DCN, DLRM, WDL, DeepFM
from tests.conftest import ROOT
from tests.models.bags import DENSE, DIM, FEATURES, PlainBags, batch

VARIANTS = {
    "wdl": (WDL, {"hidden": [8, 6]}),
    "wdl_dense": (WDL, {"hidden": [8, 6], "deep": "dense"}),
    "dcn": (DCN, {"hidden": [8, 6], "cross_layers": 2}),
    "dcn_low_rank": (DCN, {"hidden": [8, 6], "cross_layers": 2, "cross_rank": 3}),
    "dcn_v1": (DCN, {"hidden": [8, 6], "cross": "v1"}),
    "dcn_stacked": (DCN, {"hidden": [8, 6], "structure": "stacked"}),
    "deepfm": (DeepFM, {"hidden": [8, 6]}),
    "dlrm": (DLRM, {"bottom": [8, DIM], "top": [8, 1]}),
    "dlrm_dcn": (DLRM, {"bottom": [8, DIM], "top": [8, 1], "interaction": "dcn", "cross_layers": 2, "cross_rank": 3}),
}
MODELS = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, bags: nn.Module | None = None, dense: int = DENSE, seed: int = 0) -> nn.Module:
    model, hyper = VARIANTS[variant]
    torch.manual_seed(seed)
    bags = PlainBags() if bags is None else bags
    torch.manual_seed(seed)
    return model(bags, dense, FEATURES, DIM, **hyper)


@MODELS
@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize("size", [1, 7])
def test_one_finite_logit_per_example_and_a_gradient_everywhere(variant: str, multi_hot: bool, size: int) -> None:
    model = build(variant)
    torch.manual_seed(5)
    logits = model(*batch(size, multi_hot=multi_hot))
    assert logits.shape == (size,)
    assert logits.dtype == torch.float32
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    if size > 1:
        assert all(table.grad.any() for table in model.bags.tables.values())


@MODELS
def test_empty_batch_goes_forward_and_backward(variant: str) -> None:
    model = build(variant)
    logits = model(*batch(0))
    assert logits.shape == (0,)
    logits.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.startswith("bags"))


@MODELS
def test_order_of_the_keys_does_not_matter(variant: str) -> None:
    model, shuffled = build(variant), build(variant, PlainBags([FEATURES[i] for i in (3, 0, 4, 2, 1)]))
    shuffled.load_state_dict(model.state_dict())
    dense, sparse = batch(6)
    ours, theirs = model(dense, sparse), shuffled(dense, sparse)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), shuffled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@MODELS
def test_dense_weights_depend_on_the_seed_alone(variant: str) -> None:
    class OtherBags(nn.Module):
        pass

    ours = {k: v for k, v in build(variant).state_dict().items() if not k.startswith("bags")}
    theirs = build(variant, OtherBags()).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "wdl_dense"])
def test_data_without_dense_columns(variant: str) -> None:
    dense, sparse = batch(4)
    logits = build(variant, dense=0)(dense[:, :0], sparse)
    assert logits.shape == (4,)
    logits.sum().backward()


@MODELS
def test_pipelines_can_trace_it(variant: str) -> None:
    """TorchRec's pipelines trace every module that contains embeddings, and no other."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return name != ""

    model = build(variant)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    inputs = batch(5)
    assert torch.equal(traced(*inputs), model(*inputs))
    assert traced(*batch(0)).shape == (0,)


@pytest.mark.parametrize("name", ["wdl", "dcn", "deepfm", "dlrm", "dlrm_dcn"])
def test_shipped_config_builds(name: str) -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    group = yaml.safe_load((ROOT / "configs" / "model" / f"{name}.yaml").read_text())
    cfg = OmegaConf.create({"model": {**group, "embedding_dim": 16}})
    if name == "dlrm_dcn":
        cfg.model.cross_rank = 8
    features = [f"C{i}" for i in range(26)]
    model = instantiate(cfg.model, bags=PlainBags(features, 16), dense_features=DENSE, sparse_features=features)
    assert model(*batch(3, features=features)).shape == (3,)


@pytest.mark.parametrize(
    ("model", "hyper", "key"),
    [
        (WDL, {"hidden": []}, "model.hidden="),
        (WDL, {"hidden": [8, 0]}, "model.hidden[1]=0"),
        (WDL, {"hidden": [8, 2.5]}, "model.hidden[1]=2.5"),
        (WDL, {"hidden": "256"}, "model.hidden='256'"),
        (WDL, {"hidden": 256}, "model.hidden=256"),
        (WDL, {"deep": "wide"}, "model.deep='wide'"),
        (WDL, {"deep": "dense", "dense_features": 0}, "model.deep=dense"),
        (DeepFM, {"embedding_dim": 0}, "model.embedding_dim=0"),
        (DeepFM, {"sparse_features": []}, "no sparse column"),
        (DeepFM, {"sparse_features": ["C1", "C1"]}, "repeat a name"),
        (DeepFM, {"dense_features": -1}, "-1 dense columns"),
        (DCN, {"cross": "v3"}, "model.cross='v3'"),
        (DCN, {"cross_layers": 0}, "model.cross_layers=0"),
        (DCN, {"cross_rank": 0}, "model.cross_rank=0"),
        (DCN, {"cross_rank": 10_000}, "model.cross_rank=10000"),
        (DCN, {"cross": "v1", "cross_rank": 2}, "model.cross_rank=2"),
        (DCN, {"structure": "both"}, "model.structure='both'"),
        (DLRM, {"bottom": [8, DIM + 1]}, f"model.bottom=[8, {DIM + 1}]"),
        (DLRM, {"top": [8, 2]}, "model.top=[8, 2]"),
        (DLRM, {"interaction": "cat"}, "model.interaction='cat'"),
        (DLRM, {"sparse_features": ["C1"], "dense_features": 0}, "make no pair"),
    ],
)
def test_misuse_names_key_and_remedy(model: type[nn.Module], hyper: dict, key: str) -> None:
    inputs = {"dense_features": DENSE, "sparse_features": FEATURES, "embedding_dim": DIM}
    with pytest.raises(ConfigError) as error:
        model(PlainBags(), **(inputs | hyper))
    assert key in str(error.value)
