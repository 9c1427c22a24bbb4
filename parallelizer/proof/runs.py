"""The runs that a proof compares: unsharded ones in children of this process, and the sharded one on real ranks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelizer.child.children import in_children
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.compare import needed_constant
from parallelizer.proof.divergence import governing_rule
from parallelizer.proof.float8_tokens import LowPrecision, low_precision
from parallelizer.proof.modes import Float64, OtherOrder, PlainAttention
from parallelizer.proof.not_finite import HELP, NotFiniteError, not_finite
from parallelizer.proof.observe import Observation, joined, sharded, unsharded
from parallelizer.proof.recording import ModuleFailed
from parallelizer.proof.rounding import AMPLIFIED, LIMIT, nudge_size
from parallelizer.proof.scene import Scene
from parallelizer.proof.scenes import scenes_of
from parallelizer.proof.slices import line
from parallelizer.proof.staged import stage_over_the_cpu
from parallelizer.proof.subject import Subject
from parallelizer.runtime.launch import launcher as launch
from parallelizer.styles.application import Program

START_TIMEOUT = 120.0
COLLECTIVE_TIMEOUT = 60.0
"""Seconds: a plan that is wrong may well make its ranks wait for each other."""


@dataclass(frozen=True)
class References:
    """The unsharded run, the same in another order of summation, and the same with its first gradients nudged. Their values were
    multiplied by `loud` before the second step, and the first two of them ran `scenes`. `precision` says what they computed in
    float8; then `full` is the first run without it.
    """

    plain: Observation
    other_order: Observation
    nudged: Observation
    loud: float
    scenes: tuple[Scene, ...] = ()
    precision: LowPrecision | None = None
    full: Observation | None = None


@dataclass(frozen=True)
class Runs:
    """The unsharded runs, and every rank's observation of the sharded one."""

    references: References
    ranks: list[Observation]


def runs_of(
    subject: Subject, program: Program, seed: int, dtype: torch.dtype, references: References | None = None
) -> Runs:
    """Run a subject unsharded, unless its references are known, and sharded. Raises PlanError as `references_of`, and when a
    module's forward fails on a rank; LaunchError when a rank fails otherwise.

    Where a mesh deals the tokens out otherwise, other tokens share the scales of float8: then known references do not count.
    """
    precision = low_precision(program, subject.seq_len, subject.pipeline)
    if references is None or references.precision != precision:
        references = references_of(subject, seed, dtype, precision)
    subject = dataclasses.replace(subject, loud=references.loud, scenes=references.scenes)
    return Runs(references, _ranks(subject, program, seed, dtype))


def references_of(
    subject: Subject,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    precision: LowPrecision | None = None,
) -> References:
    """The unsharded runs of a subject, side by side. Where multiplied values overflow, or the model makes much of rounding, they
    are not multiplied. Raises PlanError when the runs give no numbers.
    """
    modes = (Float64(), PlainAttention()) if dtype == torch.float64 else (PlainAttention(),)
    in_full = [] if precision is None else [(unsharded, subject, seed, modes, dtype)]
    with _quiet():
        scenes = scenes_of(subject, seed) if precision is None and dtype == torch.float64 else ()
        played = dataclasses.replace(subject, scenes=scenes)
        plain, other_order, nudged, *full = in_children(
            [
                (unsharded, played, seed, modes, dtype, False, 0.0, True, precision),
                (unsharded, played, seed, (*modes, OtherOrder()), dtype, True, 0.0, False, precision),
                (unsharded, subject, seed, modes, dtype, False, nudge_size(dtype), False, precision),
                *in_full,
            ]
        )
    references = References(plain, other_order, nudged, subject.loud, scenes, precision, *full)
    finite = _is_finite(plain)
    amplifies = finite and LIMIT < needed_constant(plain, other_order, subject.tokens, dtype)[0] <= AMPLIFIED
    if finite and not (amplifies and subject.loud != 1):
        return references
    if subject.loud != 1:
        return references_of(dataclasses.replace(subject, loud=1.0), seed, dtype, precision)
    raise NotFiniteError([not_finite(subject, seed) or _not_finite(plain)])


def _is_finite(reference: Observation) -> bool:
    return all(map(math.isfinite, (*reference.losses, *reference.norms)))


def _not_finite(reference: Observation) -> Diagnostic:
    """A run that is not a number even on one device has nothing that ranks could equal."""
    step, loss, norm = next(
        (step, loss, norm)
        for step, (loss, norm) in enumerate(zip(reference.losses, reference.norms, strict=True))
        if not (math.isfinite(loss) and math.isfinite(norm))
    )
    what = f"loss is {loss:g}" if not math.isfinite(loss) else f"gradient norm is {norm:g}"
    return Diagnostic(
        "model-failed",
        f"the {what} in step {step} of the unsharded run: there is nothing to compare the ranks with",
        None,
        HELP,
    )


def _ranks(subject: Subject, program: Program, seed: int, dtype: torch.dtype) -> list[Observation]:
    """Every rank's observation."""
    return joined(from_ranks(functools.partial(_rank, subject, program, seed, dtype), subject), subject.mesh)


def from_ranks(work: Callable[[], Any], subject: Subject) -> list[Any]:
    """What `work` returns on each rank of the subject's mesh. It travels through files, since results through the launcher must
    be small. Raises LaunchError, and PlanError as a rank does.
    """
    world = subject.mesh.world_size
    with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        with _quiet():
            launch.start(
                functools.partial(_saved, work, subject.device, folder),
                ranks=world,
                device="cpu",
                start_timeout=START_TIMEOUT,
                collective_timeout=COLLECTIVE_TIMEOUT,
                sees_gpus=subject.device == "cuda",
            )
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]


def _saved(work: Callable[[], Any], device: str, folder: str) -> None:
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        stage_over_the_cpu()
    with _quiet():
        result = work()
    torch.save(result, Path(folder) / f"{rank}.pt")


def _rank(subject: Subject, program: Program, seed: int, dtype: torch.dtype) -> Observation:
    rank = dist.get_rank()
    try:
        seen = sharded(subject, program, seed, (Float64(),) if dtype == torch.float64 else (), dtype)
    except ModuleFailed as failed:
        raise PlanError([_failure(program, failed, rank)]) from failed
    if rank not in line(subject.mesh, 0, "pp"):
        # Whole parameters are the same everywhere, or their bits tell: those of rank 0 and its pipeline are compared.
        seen.start, seen.parameters, seen.states = {}, [], {}
    return seen


def _failure(program: Program, failed: ModuleFailed, rank: int) -> Diagnostic:
    """A module's forward that raised on a rank, at the rule that governs it."""
    rule = governing_rule(program, failed.module, None)
    what = f"the forward of {failed.module}" if failed.module else "the model's forward"
    return Diagnostic(
        "rank-failed",
        f"{what} fails on rank {rank}: {failed.reason}",
        rule.span if rule else None,
        "the unsharded run does not fail: what this rule, or the one before it, gives the module does not fit"
        if rule
        else "the unsharded run does not fail, and no rule of the plan stands at this module",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice on speed: small models on small meshes are no place for it."""
    log = logging.getLogger("torch.distributed.tensor")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
