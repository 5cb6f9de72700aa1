"""What reaches the user's screen: our own warnings, and none of the chatter of the libraries below us."""

import logging
import os
import threading
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
    threading.excepthook = _refused_in_a_thread


def _refused_in_a_thread(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread meets a full disk: its writer raises that again where we see it, so say nothing here."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


def _keep(record: logging.LogRecord) -> bool:
    """Whether a record logged on the root logger may be shown."""
    noisy = set(NOISY) & set(Path(record.pathname).parts)
    return not noisy or record.levelno >= logging.ERROR


def show_our_own() -> None:
    """Our own log lines go to stderr as the command's errors do."""
    ours = logging.getLogger("hetrain")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hetrain: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
