"""`local-attention`: attention that context parallelism was not given to sees its own rank's part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.followed_step import Followed


def local_attention(followed: Followed) -> Iterator[Diagnostic]:
    """Attention outside of `context-parallel` modules whose keys differ from rank to rank."""
    if followed.flow.attentions:
        where = followed.folded(followed.flow.attentions)
        yield Diagnostic(
            "local-attention",
            f"attention in {where} sees only its own rank's part of the sequence, because cp splits the sequence",
            followed.context_span(),
            f"add `context-parallel` to {where}",
        )
