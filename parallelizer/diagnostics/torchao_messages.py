"""What torchao logs when it is imported, and users can do nothing about.

Transformers imports torchao wherever it is installed. Torchao then names the kernels that it has for other versions of
Python and other devices, and torch an enumeration of torchao's that it need not have registered.
"""

from __future__ import annotations

import functools
import logging

LOGGERS = {
    "torchao": "Failed to load",
    "torchao.kernel.intmm": "Detected no triton",
    "torch.utils._pytree": "is an Enum subclass",
}
"""Words of the messages, by logger."""


def drop_torchao_messages() -> None:
    """From now on these messages are not shown. Others of the same loggers are."""
    for name, words in LOGGERS.items():
        logging.getLogger(name).addFilter(functools.partial(_is_other, words))


def _is_other(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()
