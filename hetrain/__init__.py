"""hetrain: trains recommendation models whose embedding tables outgrow a machine."""

import logging

__version__ = "0.1.0"

# Warnings that come whatever one does: of how torch names its own functions, and of every replicated table.
_NO_NEWS = ("is_fx_tracing will return true", "Sharding spec not found")


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_NEWS)


for _name in ("torch.fx._symbolic_trace", None):  # None: TorchRec logs on the root logger
    logging.getLogger(_name).addFilter(_is_news)
