"""deepctr-torch's own fit(), in an environment of its own (see README.md). Nothing of hetrain is imported."""

import argparse
from pathlib import Path

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DCN, WDL, DeepFM
from quiet import Stopwatch, Window
from worker import WARM_STEPS, serve

HIDDEN = (256, 256, 256)


def make_model(name: str, rows: np.ndarray, dense: int, dim: int) -> torch.nn.Module:
    """The same shape as ours: hidden 256-256-256, three cross layers of the same kind."""
    columns = [SparseFeat(f"C{i}", int(r), embedding_dim=dim) for i, r in enumerate(rows)]
    columns += [DenseFeat(f"I{i}", 1) for i in range(dense)]
    if name.startswith("dcn"):
        kind = "vector" if name == "dcn_v1" else "matrix"
        model = DCN(columns, columns, cross_num=3, cross_parameterization=kind, dnn_hidden_units=HIDDEN, device="cpu")
    else:
        model = {"wdl": WDL, "deepfm": DeepFM}[name](columns, columns, dnn_hidden_units=HIDDEN, device="cpu")
    # Its default "adam" and no metric: with metrics it computes AUC of every batch and is slower still.
    model.compile("adam", "binary_crossentropy", metrics=[])
    return model


class Fit:
    """Windows of fit(), timed between optimizer steps, so that its set-up and first steps are not counted."""

    def __init__(self, model: torch.nn.Module, x: dict[str, np.ndarray], y: np.ndarray, batch_size: int) -> None:
        full = len(y) // batch_size * batch_size
        self.x, self.y = {name: column[:full] for name, column in x.items()}, y[:full]
        self.model, self.batch_size = model, batch_size
        self.epoch_s: float | None = None

    def window(self, seconds: float) -> Window:
        if self.epoch_s is None:
            self.epoch_s = self.run(1).seconds
        return self.run(max(1, round(seconds / self.epoch_s)))

    def run(self, epochs: int) -> Window:
        steps = epochs * len(self.y) // self.batch_size
        taken, watches, windows = 0, [], []

        def after_step(*_: object) -> None:
            nonlocal taken
            taken += 1
            if taken == WARM_STEPS:
                watches.append(Stopwatch())
            elif taken == steps:
                windows.append(watches[0].stop((steps - WARM_STEPS) * self.batch_size))

        hook = self.model.optim.register_step_post_hook(after_step)
        self.model.fit(self.x, self.y, batch_size=self.batch_size, epochs=epochs, verbose=0)
        hook.remove()
        return windows[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with np.load(args.data) as file:
        data = dict(file)
    x = {f"C{i}": data["ids"][:, i].astype(np.float32) for i in range(data["ids"].shape[1])}
    x |= {f"I{i}": data["dense"][:, i] for i in range(data["dense"].shape[1])}
    model = make_model(args.model, data["rows"], data["dense"].shape[1], args.dim)
    serve(Fit(model, x, data["labels"], args.batch_size).window)


if __name__ == "__main__":
    main()
