"""The slowest thing that most commands do: importing torch."""

from __future__ import annotations

import gc


def import_torch() -> None:
    """Import torch and the parts of it that every command needs, with the garbage collector off: modules are no garbage, and
    looking for it among them takes a fifth of the time. It does not look at them afterwards either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        import torch.distributed.fsdp
        import torch.distributed.tensor.parallel  # noqa: F401
    finally:
        if was_on:
            gc.enable()
        gc.freeze()
