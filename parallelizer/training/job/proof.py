"""Whether the run that begins is proven: looked up before a rank starts, and proven first where that is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.certificate import missing, told
from parallelizer.proof.quick import prove_quickly
from parallelizer.proof.unsure import settled
from parallelizer.proof.validate import NOTHING, Looked
from parallelizer.training.job.job import Job


def prove_first(job: Job, looked: Looked, *, alone: bool) -> tuple[str, str | None, tuple[Diagnostic, ...]]:
    """What is known about the proof of a run, in a line, the fingerprint of its certificate if there is one, and the findings,
    of which a proof may have settled some.

    `train.prove` says what happens without a certificate: `auto` proves the tiny form first where that should take less
    than a minute, `always` refuses, `never` goes on. Only a command that starts its ranks itself (`alone`) proves: a rank
    that others have started must not fork. A certificate that cannot be written does not keep a proven run from starting.
    Raises PlanError where a proof fails, with `always` is missing, or would have to settle an error and does not.
    """
    settings, known = job.settings, looked.known
    if job.setup.mesh.world_size == 1:
        return NOTHING, None, looked.found
    if known.certificate is not None:
        return told(known), known.fingerprint, looked.found
    if settings.prove == "always":
        raise PlanError([missing(known)])
    if settings.prove == "never" or not alone:
        if looked.unsure:
            raise PlanError(looked.found)
        why = "another launcher started its ranks; `parallelizer verify` proves it, with the same overrides"
        reason = " (train.prove=never)" if settings.prove == "never" else f": {why}"
        return f"{told(known)}{reason}", None, looked.found
    folder = Path(settings.proofs)
    proven = prove_quickly(job.setup, known, job.program.diagnostics, folder, force=looked.unsure)
    if looked.unsure and not proven.passed:
        raise PlanError(looked.found)
    wrong = proven.difference
    if wrong is not None:
        message = f"the run is refused, because the proof of its small form failed: {wrong.message}"
        help_text = (
            f"{wrong.help}. `parallelizer verify` shows the proof; train.prove=never trains without it"
        )
        raise PlanError([dataclasses.replace(wrong, message=message, help=help_text)])
    return proven.line, proven.certificate, settled(looked.found) if proven.passed else looked.found
