"""The proof: the sharded run equals the unsharded one, in float64, gradient by gradient.

`prove` runs the model's tiny form twice, unsharded in one process and under the plan on real ranks, and
compares losses, gradients, updates, optimizer states and evaluation logits. Where they differ it says in
which module first, and how.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelizer.verify.prove import Proof


class _Verify(ModuleType):
    """This package, which is `parallelizer.verify(setup)` too: once a part of it was imported, the package's name hides
    the function's.
    """

    def __call__(self, setup: Any, **options: Any) -> Proof:
        from parallelizer.asking import verify

        return verify(setup, **options)


sys.modules[__name__].__class__ = _Verify
