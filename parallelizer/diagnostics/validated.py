"""The findings that `validate` returns, and what it did not look for."""

from __future__ import annotations

from collections.abc import Iterable

from parallelizer.diagnostics.diagnostic import Diagnostic, counts, has_errors
from parallelizer.diagnostics.render import render


class Validated(tuple[Diagnostic, ...]):
    """The findings of `validate`, as a tuple. `unchecked` says which checks did not run and what they need; it is empty if
    all ran. `str` gives what `print` shows: every finding with its place, and in a last line the result.
    """

    unchecked: str

    def __new__(cls, found: Iterable[Diagnostic] = (), unchecked: str = "") -> Validated:
        """The findings in their order."""
        made = super().__new__(cls, tuple(found))
        made.unchecked = unchecked
        return made

    def __str__(self) -> str:
        verdict = (
            f"not valid: {counts(self)}"
            if has_errors(self)
            else "no mistake found"
            if self.unchecked
            else "valid"
        )
        return "\n\n".join(
            [*map(render, self), f"{verdict}, but {self.unchecked}" if self.unchecked else verdict]
        )

    def __repr__(self) -> str:
        more = f", unchecked={self.unchecked!r}" if self.unchecked else ""
        return f"Validated({super().__repr__()}{more})"
