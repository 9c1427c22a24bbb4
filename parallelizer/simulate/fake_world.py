"""A fake world: one process that takes itself for a rank among any number of ranks, on tensors without values.

A process that has used a fake process group, even once, must not fork ranks afterwards, because group names stay
behind. So everything on a fake world runs in a child (`parallelizer.child`) and comes back as plain data.
"""

from __future__ import annotations

import logging
import re
import traceback

import torch.distributed as dist

from parallelizer import torch_private

_NOISE = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._collective_utils")
"""Loggers that print the traceback of an error that is raised all the same, or what CPUs do in place of an all-to-all."""

_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
_HELP_VALUES = "it reads values, which fake tensors do not have: avoid `.item()`, `if tensor` and shapes that depend on data"
_HELP_KERNEL = "register an implementation that computes shapes only: torch.library.register_fake"
_HELP_OTHER = (
    "if the model runs on real tensors without the plan, it reads values or memory here, or the plan is wrong"
)

_ARTEFACTS = re.compile(
    r"fake|meta\b|storage|data pointer|numpy|subclass|symbolic|symint|not (implemented|supported)|device|cuda|gpu|triton",
    re.I,
)
"""What errors say that are about tensors without values or about this machine, and not about the model."""

_SIZES = re.compile(r"shape|size|dim|broadcast|must match|unpack")
_OF_PYTHON = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError
)  # fmt: skip


def enter_fake_world(world_size: int, rank: int) -> None:
    """Make this process rank `rank` of `world_size` ranks that do not exist, for good. Call it only in a child.

    Torch's own reports of failures are silenced from then on; the caller reports them.
    """
    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=torch_private.fake_store())


def remedy(error: BaseException) -> str:
    """What to do about an operator that does not run on fake tensors."""
    if type(error).__name__ in _VALUES:
        return _HELP_VALUES
    text = str(error)
    lacking = "no fake impl" in text or "'Meta' backend" in text
    return _HELP_KERNEL if lacking or type(error).__name__ == "UnsupportedOperatorException" else _HELP_OTHER


def raises_anywhere(error: BaseException) -> bool:
    """Whether what a model raised on fake tensors it raises on real ones too: mistakes of Python, and sizes that do not fit.

    Errors that may come from the lack of values, memory or kernels are not taken for the model's.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    text = " ".join([f"{type(error).__name__}: {error}", *(frame.line or "" for frame in raised)])
    if type(error).__module__ != "builtins" or _ARTEFACTS.search(text):
        return False
    if isinstance(error, NotImplementedError):
        return 'missing the required "forward"' in text
    return isinstance(error, _OF_PYTHON) or (type(error) is RuntimeError and bool(_SIZES.search(text)))
