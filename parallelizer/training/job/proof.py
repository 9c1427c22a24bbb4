"""Whether the run that begins is proven: looked up before a rank starts, and proven first where that is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.certificate import missing, told
from parallelizer.proof.quick import prove_quickly, unproven_difference
from parallelizer.proof.unsure import doubted, settled
from parallelizer.proof.validate import NOTHING, Looked
from parallelizer.training.job.job import Job

FAILED = "the proof of its small form failed"
HALVES = "the loss of its small form is no number, or is another for halves of a batch"
"""Why a run is refused, with a proof and without."""


def prove_first(job: Job, looked: Looked, *, alone: bool) -> tuple[str, str | None, tuple[Diagnostic, ...]]:
    """What is known about the proof of a run, in a line, the fingerprint of its certificate if there is one, and the findings,
    of which a proof may have settled some.

    `train.prove` says what happens without a certificate: `auto` proves the tiny form first where that should take less
    than a minute, `always` refuses, `never` goes on. Only a command that starts its ranks itself (`alone`) proves: a rank
    that others have started must not fork. A certificate that cannot be written does not keep a proven run from starting.
    Raises PlanError where a proof fails, with `always` is missing, or would have to settle an error and does not. Where none is
    made, such an error is a warning.
    """
    settings, known = job.settings, looked.known
    if job.setup.mesh.world_size == 1:
        return NOTHING, None, looked.found
    if known.certificate is not None:
        return told(known), known.fingerprint, looked.found
    if settings.prove == "always":
        raise PlanError([missing(known)])
    if settings.prove == "never" or not alone:
        if settings.prove != "never" and (wrong := unproven_difference(job.setup)) is not None:
            raise _refused(wrong, HALVES)
        why = "another launcher started its ranks; `parallelizer verify` proves it, with the same overrides"
        reason = " (train.prove=never)" if settings.prove == "never" else f": {why}"
        return f"{told(known)}{reason}", None, doubted(looked.found)
    folder = Path(settings.proofs)
    proven = prove_quickly(job.setup, known, job.program.diagnostics, folder, force=looked.unsure)
    if looked.unsure and proven.made and not proven.passed:
        raise PlanError(looked.found)
    if proven.difference is not None:
        raise _refused(proven.difference, FAILED if proven.made else HALVES)
    return proven.line, proven.certificate, settled(looked.found) if proven.passed else doubted(looked.found)


def _refused(wrong: Diagnostic, why: str) -> PlanError:
    message = f"the run is refused, because {why}: {wrong.message}"
    help_text = f"{wrong.help}. `parallelizer verify` shows the proof; train.prove=never trains without it"
    return PlanError([dataclasses.replace(wrong, message=message, help=help_text)])
