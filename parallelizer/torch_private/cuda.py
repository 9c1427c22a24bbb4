"""Whether this process may use CUDA. See `parallelizer.torch_private`."""

from __future__ import annotations

import torch


def forked_after_cuda() -> bool:
    """Whether this process was forked from one that had initialised CUDA. The name is private, and the documentation of
    torch.multiprocessing describes the state. Waits for a public question.
    """
    return torch.cuda._is_in_bad_fork()
