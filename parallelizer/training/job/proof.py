"""Whether the run that begins is proven: looked up before a rank starts, and proven first where that is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import nn

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.certificate import find, missing, told
from parallelizer.proof.not_equal import not_equal
from parallelizer.proof.quick import prove_quickly
from parallelizer.styles.application import Program
from parallelizer.training.settings import Settings


def prove_first(
    setup: Setup, model: nn.Module, program: Program, settings: Settings, *, alone: bool
) -> tuple[str, str | None]:
    """What is known about the proof of a run, in a line, and the fingerprint of its certificate if there is one.

    `train.prove` says what happens without a certificate: `auto` proves the tiny form first where that should take less
    than a minute, `always` refuses, `never` goes on. Only a command that starts its ranks itself (`alone`) proves: a rank
    that others have started must not fork. A certificate that cannot be written does not keep a proven run from starting.
    Raises PlanError where a proof fails, or with `always` is missing.
    """
    if setup.mesh.world_size == 1:
        return "one rank: nothing to prove", None
    folder = Path(settings.proofs)
    found = find(setup, model, folder)
    if found.certificate is not None:
        return told(found), found.fingerprint
    if settings.prove == "always":
        raise PlanError([missing(found)])
    if settings.prove == "never":
        return f"{told(found)} (train.prove=never)", None
    if not alone:
        why = "its ranks were started from outside; `parallelizer verify` proves it, with the same overrides"
        return f"{told(found)}: {why}", None
    proven = prove_quickly(setup, found, program.diagnostics, folder)
    if proven.failed is not None:
        wrong = not_equal(proven.failed)
        message = f"the run is refused, because the proof of its small form failed: {wrong.message}"
        help_text = (
            f"{wrong.help}. `parallelizer verify` shows the proof; train.prove=never trains without it"
        )
        raise PlanError([dataclasses.replace(wrong, message=message, help=help_text)])
    return proven.line, proven.certificate
