"""The proof of a run that begins, where that is quick: its tiny form is proven, and the certificate is written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from parallelizer.child.children import WorldError
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.certificate import Found, certificate_of, told, write
from parallelizer.proof.duration import why_not_within
from parallelizer.proof.halves import unequal_halves
from parallelizer.proof.not_equal import MixedRowsError, not_equal
from parallelizer.proof.not_finite import NotFiniteError
from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import prove_tiny
from parallelizer.proof.tiny import TinyForm, tiny_form
from parallelizer.runtime.launch.failures import LaunchError

QUICK = 60.0
"""Seconds: what should take less is proven."""


@dataclass(frozen=True)
class Proven:
    """What has come of it, in a `line`, and whether the proof `passed`: then with the fingerprint of its certificate, if one was
    written. `made` says whether ranks were to run. `difference` is what a proof that did not pass has found, or what the
    small form shows without ranks where no proof was made.
    """

    line: str
    passed: bool = False
    made: bool = True
    certificate: str | None = None
    difference: Diagnostic | None = None


def prove_quickly(
    setup: Setup,
    found: Found,
    known: tuple[Diagnostic, ...],
    folder: Path | None,
    seconds: float = QUICK,
    force: bool = False,
) -> Proven:
    """Prove the tiny form of a setup where that should take less than so many seconds, and write the certificate into `folder`,
    if there is one. `found` is what is known of the setup's proof, `known` what compiling the setup has found. `force` proves
    a plan that checks refuse.
    """
    tiny: TinyForm | None = None
    try:
        tiny = tiny_form(setup)
        why = why_not_within(seconds, tiny.subject, force=force)
    except PlanError as error:
        why = f"its tiny form is refused ({_line(error)})"
    if tiny is None or why is not None:
        line = f"{told(found)}: {why}; `parallelizer verify` proves it, with the same overrides"
        return Proven(line, made=False, difference=None if tiny is None else unequal_halves(tiny.subject))
    begin = time.monotonic()
    try:
        proof = prove_tiny(tiny, known, force=force)
    except (MixedRowsError, NotFiniteError) as error:
        if isinstance(error, NotFiniteError) and error.diagnostics[0].span is None:
            return _does_not_run(found, error)
        return Proven("NOT proven", difference=error.diagnostics[0])
    except (LaunchError, WorldError, PlanError) as error:
        found_wrong = error.diagnostics if isinstance(error, PlanError) else ()
        failed = next((one for one in found_wrong if one.code == "rank-failed"), None)
        if failed is not None and not setup.model.get("tiny"):  # the small form has the model as it is
            return Proven("NOT proven", difference=failed)
        return _does_not_run(found, error)
    took = time.monotonic() - begin
    if not proof.passed:
        return Proven("NOT proven", difference=not_equal(proof))
    again = f" again, since {' and '.join(found.changed)} changed," if found.changed else ""
    proven = f"proven{again} in {took:.0f} s"
    certificate = certificate_of(proof, setup, found.parts)
    worst = f"worst error {certificate.worst:.2f} of its bound{_uncovered(proof)}"
    if folder is None:
        return Proven(f"{proven} ({worst})", passed=True)
    try:
        write(certificate, folder)
    except PlanError as error:
        return Proven(f"{proven} ({worst}); {_line(error)}", passed=True)
    line = f"{proven} (certificate {certificate.name}, {worst})"
    return Proven(line, passed=True, certificate=certificate.fingerprint)


def _uncovered(proof: Proof) -> str:
    """What a proof that passed does not cover, in words."""
    left = sum(" left out, " in change for change in proof.changes)
    parts = [f"{left} layers or rules are left out"] if left else []
    if proof.one_sided:
        some = "1 decision" if len(proof.one_sided) == 1 else f"{len(proof.one_sided)} decisions"
        parts.append(f"{some} by values took one side")
    return f"; not covered, as `parallelizer verify` lists: {', '.join(parts)}" if parts else ""


def unproven_difference(setup: Setup) -> Diagnostic | None:
    """What the small form of a setup shows without ranks: rows of a batch that compute something else by themselves, or a loss
    that is no number. None where it cannot be built.
    """
    try:
        tiny = tiny_form(setup)
    except PlanError:
        return None
    return unequal_halves(tiny.subject)


def _does_not_run(found: Found, error: Exception) -> Proven:
    return Proven(f"{told(found)}: the tiny form does not run ({_line(error)}); see `parallelizer verify`")


def _line(error: Exception) -> str:
    if isinstance(error, PlanError) and error.diagnostics:
        return error.diagnostics[0].message
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
