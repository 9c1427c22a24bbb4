"""Whether the run that begins is proven: looked up before a rank starts, and proven first where that is quick."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from parallelizer.child import WorldError
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.certificate import certificate_of, find, missing, told, write
from parallelizer.proof.duration import why_not_within
from parallelizer.proof.prove import prove_small
from parallelizer.proof.tiny import shrink
from parallelizer.report.text.proof import failure
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.styles.application import Program
from parallelizer.training.settings import Settings

QUICK = 60.0
"""Seconds: `train.prove: auto` proves what should take less."""


def prove_first(setup: Setup, program: Program, settings: Settings, *, alone: bool) -> tuple[str, str | None]:
    """What is known about the proof of a run, in a line, and the fingerprint of its certificate if there is one.

    `train.prove` says what happens without a certificate: `auto` proves the tiny form first where that should take less
    than a minute, `always` refuses, `never` goes on. Only a command that starts its ranks itself (`alone`) proves: a rank
    that others have started must not fork. Raises PlanError where a proof fails, or with `always` is missing.
    """
    if setup.mesh.world_size == 1:
        return "one rank: nothing to prove", None
    folder = Path(settings.proofs)
    found = find(setup, setup.build_model(), folder)
    if found.certificate is not None:
        return told(found), found.fingerprint
    if settings.prove == "always":
        raise PlanError([missing(found)])
    if settings.prove == "never":
        return f"{told(found)} (train.prove=never)", None
    small, changes = shrink(setup)
    try:
        why = why_not_within(QUICK, small) if alone else "its ranks were started from outside"
    except PlanError as error:
        why = f"its tiny form is refused ({_line(error)})"
    if why is not None:
        return f"{told(found)}: {why}; `parallelizer verify` proves it, with the same overrides", None
    begin = time.monotonic()
    try:
        proof = prove_small(small, changes, program.diagnostics)
    except (LaunchError, WorldError, PlanError) as error:
        return f"{told(found)}: the tiny form does not run ({_line(error)}); see `parallelizer verify`", None
    if not proof.passed:
        raise PlanError([_refusal(failure(proof))])
    certificate = certificate_of(proof, setup, found.parts)
    write(certificate, folder)
    seconds = time.monotonic() - begin
    again = f" again, since {' and '.join(found.changed)} changed," if found.changed else ""
    figures = f"certificate {certificate.name}, worst error {certificate.worst:.2f} of its bound"
    return f"proven{again} in {seconds:.0f} s ({figures})", certificate.fingerprint


def _refusal(found: Diagnostic) -> Diagnostic:
    """The difference that a proof found, as the reason why the run is refused."""
    message = f"the run is refused, because the proof of its small form failed: {found.message}"
    help_text = f"{found.help}. `parallelizer verify` shows the proof; train.prove=never trains without it"
    return dataclasses.replace(found, message=message, help=help_text)


def _line(error: Exception) -> str:
    if isinstance(error, PlanError) and error.diagnostics:
        return error.diagnostics[0].message
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
