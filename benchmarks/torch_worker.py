"""Contenders in hetrain's own environment: dense compute alone, and the loop a TorchRec user would write.

dense        forward and backward of our model; its pooled rows are one leaf tensor: no lookup, no update
dense_adam   the same and torch's fused Adam
fused        data in RAM -> FusedEmbeddingBagCollection (row-wise Adagrad) -> our model -> fused Adam
dmp          the same under DistributedModelParallel, one process, table-wise
The model classes and the optimizers are ours in all four, so that only what surrounds them is compared.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from worker import repeated, serve

from hetrain import models

CLASSES = {"wdl": "WDL", "deepfm": "DeepFM", "dcn": "DCN", "dcn_v1": "DCN", "dlrm": "DLRM"}
HYPER = {"dcn_v1": {"cross": "v1"}}
Step = Callable[[], int]


class LeafBags(nn.Module):
    """Stands for a bag collection whose lookup costs nothing."""

    def __init__(self, features: list[str], dim: int, batch: int) -> None:
        super().__init__()
        self.features, self.dim = features, dim
        self.rows = torch.randn(batch, len(features) * dim, requires_grad=True)

    def forward(self, sparse: object) -> KeyedTensor:
        return KeyedTensor(self.features, [self.dim] * len(self.features), self.rows)


def make_model(name: str, bags: nn.Module, dense: int, features: list[str], dim: int) -> nn.Module:
    return getattr(models, CLASSES[name])(bags, dense, features, dim, **HYPER.get(name, {}))


def dense_step(args: argparse.Namespace, data: dict[str, np.ndarray], *, adam: bool) -> Step:
    features = [f"C{i}" for i in range(data["ids"].shape[1])]
    bags = LeafBags(features, args.dim, args.batch_size)
    model = make_model(args.model, bags, data["dense"].shape[1], features, args.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True) if adam else None
    dense, labels = (torch.from_numpy(data[key][: args.batch_size]) for key in ("dense", "labels"))

    def step() -> int:
        model.zero_grad(set_to_none=True)
        bags.rows.grad = None
        nn.functional.binary_cross_entropy_with_logits(model(dense, None), labels).backward()
        if optimizer is not None:
            optimizer.step()
        return args.batch_size

    return step


def ram_batches(data: dict[str, np.ndarray], batch: int) -> Iterator[tuple[Tensor, KeyedJaggedTensor, Tensor]]:
    """Full batches, over and over, made once."""
    features = [f"C{i}" for i in range(data["ids"].shape[1])]
    lengths = torch.ones(len(features) * batch, dtype=torch.int32)
    made = []
    for first in range(0, len(data["labels"]) - batch + 1, batch):
        part = slice(first, first + batch)
        ids = torch.from_numpy(np.ascontiguousarray(data["ids"][part].T).reshape(-1))
        sparse = KeyedJaggedTensor(features, ids, lengths=lengths, stride=batch)
        made.append((torch.from_numpy(data["dense"][part]), sparse, torch.from_numpy(data["labels"][part])))
    return cycle(made)


def loop_step(args: argparse.Namespace, data: dict[str, np.ndarray], *, dmp: bool) -> Step:
    model, optimizer = (dmp_model if dmp else fused_model)(args, data)
    batches = ram_batches(data, args.batch_size)

    def step() -> int:
        dense, sparse, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels).backward()
        optimizer.step()
        return args.batch_size

    return step


def table_configs(args: argparse.Namespace, data: dict[str, np.ndarray]) -> list:
    from torchrec import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=args.dim, num_embeddings=int(rows), feature_names=[f"C{i}"])
        for i, rows in enumerate(data["rows"])
    ]


def fused_model(args: argparse.Namespace, data: dict[str, np.ndarray]) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    bags = FusedEmbeddingBagCollection(
        table_configs(args, data), optimizer_type=RowWiseAdagrad, optimizer_kwargs={"lr": 0.02, "eps": 1e-8}
    )
    features = [f"C{i}" for i in range(len(data["rows"]))]
    model = make_model(args.model, bags, data["dense"].shape[1], features, args.dim)
    dense = [p for name, p in model.named_parameters() if not name.startswith("bags.")]
    return model, torch.optim.Adam(dense, lr=1e-3, fused=True)


def dmp_model(args: argparse.Namespace, data: dict[str, np.ndarray]) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    features = [f"C{i}" for i in range(len(data["rows"]))]
    bags = EmbeddingBagCollection(table_configs(args, data), device=torch.device("cpu"))
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.02, "eps": 1e-8})
    model = make_model(args.model, bags, data["dense"].shape[1], features, args.dim)
    sharder = EmbeddingBagCollectionSharder()
    # Without compute_kernel TorchRec takes its dense kernel and forgets the fused optimizer.
    per_table = {f"t{i}": table_wise(rank=0, compute_kernel="fused") for i in range(len(features))}
    plan = construct_module_sharding_plan(bags, per_table, sharder, local_size=1, world_size=1, device_type="cpu")
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )
    dense = [p for _, p in in_backward_optimizer_filter(sharded.named_parameters())]
    return sharded, torch.optim.Adam(dense, lr=1e-3, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=["dense", "dense_adam", "fused", "dmp"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=CLASSES, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    with np.load(args.data) as file:
        data = dict(file)
    if args.contender.startswith("dense"):
        serve(repeated(dense_step(args, data, adam=args.contender == "dense_adam")))
    else:
        serve(repeated(loop_step(args, data, dmp=args.contender == "dmp")))


if __name__ == "__main__":
    main()
