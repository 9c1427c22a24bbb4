"""Whether the run that begins is proven: looked up before a rank starts, and proven first where that is quick."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from parallelizer.child import WorldError
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.certificate import certificate_of, find, missing, told, write
from parallelizer.proof.prove import MAX_RANKS, prove
from parallelizer.proof.tiny import shrink
from parallelizer.report.text.proof import failure
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.simulate.record.flops import step_flops
from parallelizer.styles.application import Program
from parallelizer.training.settings import Settings

QUICK = 60.0
"""Seconds: `train.prove: auto` proves what should take less."""

RUNS = 20
"""Steps' worth of floating-point operations that a proof computes: three unsharded runs and the ranks, a few steps each."""

FLOPS = 2e9
"""Operations in float64 that a core is taken to do in a second, measured on the small products of a tiny model."""

START, RANK = 3.0, 2.0
"""Seconds until a proof's processes compute, and what each rank adds to them on a core."""


def prove_first(setup: Setup, program: Program, settings: Settings, *, alone: bool) -> tuple[str, str | None]:
    """What is known about the proof of a run, in a line, and the fingerprint of its certificate if there is one.

    `train.prove` says what happens without a certificate: `auto` proves the tiny form first where that should take less
    than a minute, `always` refuses, `never` goes on. Only a command that starts its ranks itself (`alone`) proves: a rank
    that others have started must not fork. Raises PlanError where a proof fails, or with `always` is missing.
    """
    if setup.mesh.world_size == 1:
        return "one rank: nothing to prove", None
    folder, model = Path(settings.proofs), setup.build_model()
    found = find(setup, model, folder)
    if found.certificate is not None:
        return told(found), found.fingerprint
    if settings.prove == "always":
        raise PlanError([missing(found)])
    if settings.prove == "never":
        return f"{told(found)} (train.prove=never)", None
    why = _why_not(setup, alone)
    if why is not None:
        return f"{told(found)}: {why}; `parallelizer verify` proves it, with the same overrides", None
    begin = time.monotonic()
    try:
        proof = prove(setup, program=program)
    except (LaunchError, WorldError, PlanError) as error:
        return f"{told(found)}: the tiny form does not run ({_line(error)}); see `parallelizer verify`", None
    if not proof.passed:
        raise PlanError([failure(proof)])
    certificate = certificate_of(proof, setup, model)
    write(certificate, folder)
    seconds = time.monotonic() - begin
    return (
        f"proven in {seconds:.0f} s (certificate {certificate.name}, worst error {certificate.worst:.2f} of its bound)",
        (certificate.fingerprint),
    )


def expected_seconds(small: Setup, program: Program) -> float | None:
    """Seconds that the proof of a tiny form should take on this machine, by the operations of its step; None where they
    cannot be counted.
    """
    flops = step_flops(program, small.build_model(), small.workload, small.loss())
    if flops is None:
        return None
    cores = min(os.cpu_count() or 1, small.mesh.world_size)
    return START + RANK * math.ceil(small.mesh.world_size / cores) + RUNS * flops / (FLOPS * cores)


def _why_not(setup: Setup, alone: bool) -> str | None:
    """Why `auto` does not prove a run now; None where it does."""
    if not alone:
        return "its ranks were started from outside"
    small, _ = shrink(setup)
    if small.mesh.world_size > MAX_RANKS:
        return f"its proof takes {small.mesh.world_size} ranks"
    try:
        seconds = expected_seconds(small, small.compile(small.build_model()))
    except PlanError as error:
        return f"its tiny form is refused ({_line(error)})"
    if seconds is None:
        return "how long its proof takes is not known"
    return f"its proof should take about {seconds / 60:.0f} min" if seconds >= QUICK else None


def _line(error: Exception) -> str:
    if isinstance(error, PlanError) and error.diagnostics:
        return error.diagnostics[0].message
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
