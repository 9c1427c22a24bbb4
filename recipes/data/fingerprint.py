"""One SHA-256 of all that batches depend on."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def fingerprint(*parts: str | int | float | Tensor) -> str:
    """The SHA-256, in hexadecimal, of the parts in their order; of tensors the dtype, the shape and the bytes count.

    Each part is written with its kind and its length before it, so that no two lists of parts are the same bytes.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            content = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            kind = f"{part.dtype} {list(part.shape)}"
        else:
            content, kind = repr(part).encode(), type(part).__name__
        digest.update(f"{kind} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
