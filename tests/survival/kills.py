"""Kills: every rank, at steps and in every part of a save, in runs that must end as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelizer.runtime.checkpoint import folder as names
from tests.survival.runs import Run, hash_of, recoveries, redone, tensors_of, trained_on
from tests.survival.victim import Death

EVERY, STEPS = 4, 26


@dataclass(frozen=True)
class Plan:
    """A run, on so many ranks, and who dies in it. Each death at another step: three in a row at one are the last."""

    name: str
    overrides: tuple[str, ...]
    deaths: tuple[Death, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a run beside the uninterrupted one; `wrong` says in words what differs."""

    plan: Plan
    died: int
    recoveries: tuple[float, ...]
    redone: int
    wrong: tuple[str, ...]
    seconds: float


FSDP_TP = ("parallel=fsdp2_tp2",)
HSDP = ("parallel=hsdp2x2",)
CP_TP = ("parallel=cp2_tp2",)
TP = ("parallel=tp2",)
PP_FSDP = ("parallel=pp2_fsdp2", "model.n_layers=2")

PLANS = (
    Plan("fsdp2_tp2: at the beginning of steps", FSDP_TP, tuple(
        Death(rank, step, "step") for rank, step in zip((0, 1, 2, 3, 0, 3, 1, 2), (1, 3, 6, 8, 11, 14, 20, 25), strict=True)
    )),
    Plan("fsdp2_tp2: inside steps", FSDP_TP, tuple(
        Death(rank, step, "inside", 0.004 * (1 + rank + step % 5))
        for rank, step in zip((3, 2, 1, 0, 2, 1, 3, 0), (2, 4, 7, 9, 13, 16, 21, 26), strict=True)
    )),
    Plan("fsdp2_tp2: while it saves", FSDP_TP, (
        Death(0, 4, "copy"), Death(2, 4, "write"), Death(3, 8, "copy"), Death(1, 8, "verify"), Death(3, 12, "write"),
        Death(0, 12, "verify"), Death(1, 16, "write"), Death(2, 20, "copy"), Death(0, 24, "write"), Death(3, 26, "verify"),
    )),
    Plan("hsdp2x2: what rank 0 alone does in a save", HSDP, (
        Death(0, 4, "manifest"), Death(0, 8, "rename"), Death(0, 12, "named"), Death(0, 16, "remove"),
        Death(0, 20, "manifest"), Death(0, 24, "remove"), Death(0, 26, "rename"),
    )),
    Plan("cp2_tp2: anywhere", CP_TP, (
        Death(2, 2, "step"), Death(3, 4, "copy"), Death(1, 6, "inside", 0.01), Death(0, 8, "named"), Death(1, 8, "load"),
        Death(0, 10, "inside", 0.02), Death(1, 12, "write"), Death(3, 13, "step"), Death(2, 16, "verify"),
        Death(3, 12, "load"), Death(0, 24, "rename"),
    )),
    Plan("tp2: anywhere", TP, (
        Death(1, 1, "inside", 0.005), Death(0, 4, "load"), Death(1, 4, "verify"), Death(1, 8, "write"),
        Death(0, 10, "step"), Death(1, 12, "copy"), Death(0, 16, "manifest"), Death(1, 22, "inside", 0.012),
        Death(0, 26, "named"),
    )),
    Plan("pp2_fsdp2: anywhere", PP_FSDP, (
        Death(2, 1, "step"), Death(3, 4, "copy"), Death(1, 6, "inside", 0.02), Death(0, 8, "named"), Death(2, 8, "load"),
        Death(3, 12, "write"), Death(1, 15, "inside", 0.03), Death(2, 16, "verify"), Death(0, 24, "rename"),
    )),
)  # fmt: skip

SHORT = Plan("fsdp2_tp2: one of each", FSDP_TP, (
    Death(2, 2, "inside", 0.01), Death(1, 4, "write"), Death(3, 4, "load"), Death(0, 8, "rename"),
))  # fmt: skip
"""What the default run holds."""


def options(plan: Plan, steps: int = STEPS) -> tuple[str, ...]:
    return (*plan.overrides, f"train.steps={steps}", f"train.checkpoint_every={EVERY}", "train.keep_last=2")


def reference(plan: Plan, folder: Path, steps: int = STEPS) -> Run:
    """The uninterrupted run."""
    run = Run(folder, options(plan, steps))
    run.finish()
    return run


def killed(plan: Plan, whole: Run, folder: Path, steps: int = STEPS) -> Outcome:
    """The run with its deaths, looked at from every side."""
    begun = time.monotonic()
    run = Run(folder, options(plan, steps), plan.deaths)
    run.finish()
    return Outcome(
        plan,
        len(run.deaths()),
        tuple(recoveries(run)),
        redone(run)[0],
        tuple(differences(run, whole, len(plan.deaths))),
        time.monotonic() - begun,
    )


def differences(run: Run, whole: Run, deaths: int) -> Iterable[str]:
    """All in which a run that was killed is not as the uninterrupted one."""
    if len(run.deaths()) != deaths:
        left = [d for n, d in enumerate(run.plot) if not (run.folder / f"death.{n}").exists()]
        yield f"{deaths - len(run.deaths())} of {deaths} deaths did not happen: {left}"
    if redone(run)[1]:
        yield "it went back behind its newest checkpoint"
    if run.last().name != whole.last().name:
        yield f"it ended with {run.last().name}, and not {whole.last().name}"
    elif hash_of(tensors_of(run.last(), "")) != hash_of(tensors_of(whole.last(), "")):
        yield "other parameters, moments or random states in the end"
    ours, theirs = run.metrics(), whole.metrics()
    if [m["step"] for m in ours] != [m["step"] for m in theirs]:
        yield "other steps in metrics.jsonl"
    if [m["loss"] for m in ours] != [m["loss"] for m in theirs]:
        yield "another loss"
    if ours[-1].get("validation_loss") != theirs[-1].get("validation_loss"):
        yield "another validation loss"
    try:
        if trained_on(run.taken()) != trained_on(whole.taken()):
            yield "other samples"
    except ValueError as error:
        yield str(error)
    time.sleep(0.2)
    if run.processes():
        yield f"processes {run.processes()} are left"
    if names.leftovers(run.checkpoints):
        yield f"{[p.name for p in names.leftovers(run.checkpoints)]} are left"


def sweep(plans: Sequence[Plan] = PLANS, steps: int = STEPS) -> list[Outcome]:
    """Every plan beside its uninterrupted run."""
    found, wholes = [], dict[tuple[str, ...], Run]()
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    try:
        for number, plan in enumerate(plans):
            if plan.overrides not in wholes:
                wholes[plan.overrides] = reference(plan, folder / f"whole.{number}", steps)
            found.append(killed(plan, wholes[plan.overrides], folder / f"killed.{number}", steps))
            print(json.dumps({"plan": plan.name, "died": found[-1].died, "wrong": found[-1].wrong,
                              "seconds": round(found[-1].seconds, 1)}), flush=True)  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found
