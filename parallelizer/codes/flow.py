"""The layout flow: how tensors lie on their way through the traced forward and backward."""

from __future__ import annotations

from parallelizer.codes.declare import Code

CODES: tuple[Code, ...] = ()
