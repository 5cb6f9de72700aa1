"""Keeps the import-time chatter of third parties off the user's screen. Our own warnings stay."""

import logging
import os
import warnings
from pathlib import Path

NOISY = (
    "torch",
    "torch.fx._symbolic_trace",  # torch sets the level of "torch" anew when it is imported
    "torchrec",
    "fbgemm_gpu",
    "torchmetrics",
    "tensordict",
    "lightning_utilities",
    "tensorboard",
    "pyarrow",
    "pyre_extensions",
    "google",
    "hydra",
    "omegaconf",
    "multiprocessing",
)


def quiet_third_parties() -> None:
    """Filter warnings and INFO logs of the libraries below us. Call before they are imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    names = "|".join(NOISY)
    warnings.filterwarnings("ignore", module=rf"({names})(\.|$)")
    warnings.filterwarnings("ignore", category=FutureWarning)  # about APIs of the pinned versions, not for users
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # we only read them
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_keep)  # TorchRec logs on the root logger


def _keep(record: logging.LogRecord) -> bool:
    """Whether a record logged on the root logger may be shown."""
    noisy = set(NOISY) & set(Path(record.pathname).parts)
    return not noisy or record.levelno >= logging.ERROR
