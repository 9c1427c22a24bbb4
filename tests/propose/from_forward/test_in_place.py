"""The line at which a plan fails because a forward changes something in place, and the edit."""

from __future__ import annotations

from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, Related, Span
from parallelizer.propose.from_forward.in_place import changed_in_place

TORCH = "Output 0 of _ToTorchTensor is a view and is being modified inplace. This view was created inside a custom Function"


def said(line: str, folder: Path) -> str | None:
    source = folder / f"{abs(hash(line))}.py"
    source.write_text(f"{line}\n")
    failed = Related(Span(str(source), 1, 1, len(line)), "it fails here")
    return changed_in_place(Diagnostic("does-not-run", TORCH, None, related=(failed,)))


def test_the_edit_is_the_same_without_the_change_in_place(tmp_path: Path) -> None:
    reason = said("    out += self.look(z) if z else 1", tmp_path) or ""
    assert reason.startswith("what it returns is changed in place, at ")
    assert (
        "`out += self.look(z) if z else 1`, which could be `out = out + (self.look(z) if z else 1)`" in reason
    )


def test_a_call_is_shown_as_it_is(tmp_path: Path) -> None:
    assert (said("out.add_(z)", tmp_path) or "").endswith(":1: `out.add_(z)`")


def test_other_failures_keep_their_words() -> None:
    assert changed_in_place(Diagnostic("does-not-run", "shape is invalid", None)) is None
    assert changed_in_place(Diagnostic("does-not-run", TORCH, None)) == "what it returns is changed in place"
