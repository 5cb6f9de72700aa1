"""Largest difference of per-step losses: `bsp`, `het` and plain torch on one rank, `bsp` and an empty cache on two.

    python benchmarks/equality.py --data data/criteo60k

runs WDL through `hetrain train` with a log line per step, and plain torch (nn.EmbeddingBag, textbook update, the same
initial rows and seed) over the same batches. The last batches of an epoch are uneven, on two ranks between ranks too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.config import RowOptimizerConfig
from hetrain.data.reader import Reader
from hetrain.models import WDL
from hetrain.optim import row_optimizer
from hetrain.store.initial import initial_rows

DIM, SEED, BATCH, DENSE_RATE, BOUND = 16, 1, 384, 0.02, 0.01
RATES = {"sgd": 2.0, "rowwise_adagrad": 0.02}
ONE_RANK = {"bsp": ["consistency=bsp"]} | {
    f"het s={s}, cache {share}": [
        "consistency=het",
        f"consistency.staleness={s}",
        f"consistency.cache.capacity={share}",
    ]
    for s, share in ((0, 0.1), (10, 0.1), (100, 0.1), ("inf", 1.0), (0, 0))
}
TWO_RANKS = {"bsp": ["consistency=bsp"], "het, empty cache": ["consistency=het", "consistency.cache.capacity=0"]}


def losses(data: Path, runs: Path, optimizer: str, nproc: int, choice: list[str], name: str) -> Tensor:
    """Mean loss of every step of a run [steps] float64."""
    overrides = [
        *("data=criteo", f"data.path={data}", "model=wdl", f"model.embedding_dim={DIM}", f"seed={SEED}", *choice),
        *(f"optimizer.rows.name={optimizer}", f"optimizer.rows.lr={RATES[optimizer]}"),
        *("optimizer.dense.name=sgd", f"optimizer.dense.lr={DENSE_RATE}", f"store.init_bound={BOUND}"),
        *(
            f"train.batch_size={BATCH}",
            "telemetry.log_every=1",
            "telemetry.tensorboard=false",
            "checkpoint.resume=never",
        ),
        *(f"launch.nproc={nproc}", "launch.threads=1", f"runs={runs}", f"name={name}"),
    ]
    subprocess.run([sys.executable, "-m", "hetrain", "train", *overrides], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([line["loss"] for line in lines if line["kind"] == "train"], dtype=torch.float64)


class PlainBags(nn.Module):
    """nn.EmbeddingBag per column."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.names = [c.name for c in reader.schema.sparse]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                initial_rows(SEED, i, torch.arange(c.rows), DIM, BOUND),
                freeze=False,
                mode="sum",
                include_last_offset=True,
            )
            for i, c in enumerate(reader.schema.sparse)
        )

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        columns = sparse.to_dict()
        pooled = [bag(columns[n].values(), columns[n].offsets()) for n, bag in zip(self.names, self.bags, strict=True)]
        return KeyedTensor(self.names, [DIM] * len(pooled), torch.cat(pooled, 1))


def plain_losses(data: Path, optimizer: str) -> Iterator[float]:
    """Mean loss of every step, from dense gradients over whole tables."""
    torch.set_num_threads(1)
    reader = Reader(data, "train", BATCH, 0, 1, shuffle=True, seed=SEED)
    bags = PlainBags(reader)
    torch.manual_seed(SEED)
    model = WDL(bags, len(reader.schema.dense), bags.names, DIM, hidden=[256, 256, 256])
    rows = row_optimizer(RowOptimizerConfig(optimizer, RATES[optimizer]))
    states = [torch.zeros(bag.weight.shape[0], rows.state_width(DIM)) for bag in bags.bags]
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("bags.")], lr=DENSE_RATE)
    for batch in reader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
        model.zero_grad()
        loss.backward()
        dense.step()
        with torch.no_grad():
            for bag, state in zip(bags.bags, states, strict=True):
                rows.step_(bag.weight, state, bag.weight.grad, rows.lr)
        yield loss.item()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/equality"))
    args = parser.parse_args()
    print("| rows | ranks | against | run | steps | largest difference of a loss |\n|---|---|---|---|---|---|")
    for optimizer in RATES:
        plain = torch.tensor(list(plain_losses(args.data, optimizer)), dtype=torch.float64)
        for nproc, modes in ((1, ONE_RANK), (2, TWO_RANKS)):
            found = {
                mode: losses(args.data, args.runs, optimizer, nproc, choice, f"{optimizer}-{nproc}-{i}")
                for i, (mode, choice) in enumerate(modes.items())
            }
            base, against = (plain, "plain torch") if nproc == 1 else (found.pop("bsp"), "bsp")
            for mode, values in found.items():
                difference = (values - base).abs().max().item()
                print(f"| {optimizer} | {nproc} | {against} | {mode} | {len(values)} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()
