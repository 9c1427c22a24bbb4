"""`sharded-logits`: the loss cannot take logits that lie sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.compiler.wording import SHARDED_LOSS
from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.simulate.checks.followed_step import MIXED, Followed

THE_LOSS = "the loss"


def sharded_logits(followed: Followed) -> Iterator[Diagnostic]:
    """A loss that fails because it was given DTensors and put them together with plain tensors."""
    failure = followed.failure
    if failure is None or failure.phase != "loss":
        return
    if followed.flow.sharded_output and MIXED in failure.text:
        span, related = followed.blamed(failure)
        loss = (Related(failure.span, THE_LOSS),) if failure.span else ()
        operator = failure.text.partition(" ")[0]
        message = f"the loss does not support sharded logits: {operator} combines them with a plain tensor"
        yield Diagnostic("sharded-logits", message, span, SHARDED_LOSS, related=loss + related)
