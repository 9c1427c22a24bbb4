"""The proof of one plan on one mesh."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.child.children import in_children
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.plan import BATCH_AXES, Mesh, Option, StyleDefaults
from parallelizer.proof.compare import Difference, ProofVerdict, judge
from parallelizer.proof.divergence import Divergence, governing_rule
from parallelizer.proof.dropout import place_dropout
from parallelizer.proof.locate import locate
from parallelizer.proof.mixed_rows import mixed_at
from parallelizer.proof.modes import Float64, OtherOrder, PlainAttention
from parallelizer.proof.observe import Observation, sharded, unsharded
from parallelizer.proof.recording import ModuleFailed
from parallelizer.proof.rounding import nudge_size
from parallelizer.proof.staged import stage_over_the_cpu
from parallelizer.proof.subject import Subject
from parallelizer.proof.tiny import SMALL, shrink, subject_of, unmatched
from parallelizer.runtime.launch import launcher as launch
from parallelizer.styles.application import Program

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""float64 and float32 give a verdict; bfloat16, in which fsdp computes then, is compared with float32 and
only reported.
"""

MAX_RANKS = 64
"""Processes that one machine is given, as `launch.max_cpu_ranks` says for the recipe."""

START_TIMEOUT = 120.0
COLLECTIVE_TIMEOUT = 60.0
"""Seconds: a plan that is wrong may well make its ranks wait for each other."""


@dataclass(frozen=True)
class Proof:
    """What a proof found. `changes` says how the subject was made small, `diagnostics` are what was found before,
    `divergence` says where a failing run first differs. `broken_axes` are the axes on which a failing subject is not proven by
    itself either, with every other axis at 1; empty when each of them is, and None when the mesh has one axis. `mixed_rows` is
    where the model or the loss mixes rows of the batch, if a subject fails on data axes alone. `lowered` says
    whether anything computed in `dtype`, and `one_sided` which decisions by values took one side every time.
    """

    plan: str
    mesh: Mesh
    dtype: str
    verdict: ProofVerdict
    losses: tuple[float, float]
    divergence: Divergence | None = None
    broken_axes: tuple[str, ...] | None = None
    mixed_rows: Span | None = None
    unequal: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    one_sided: tuple[str, ...] = ()
    lowered: bool = True
    changes: tuple[str, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = field(default=())

    @property
    def is_verdict(self) -> bool:
        """Whether this is a proof, and no report of drift."""
        return self.dtype != "bfloat16"

    @property
    def proven(self) -> bool | None:
        """Whether the runs are equal; None where that is not asked."""
        return self.verdict.passed if self.is_verdict else None

    @property
    def passed(self) -> bool:
        """False only for what was not proven: information cannot fail."""
        return self.proven is not False

    def __str__(self) -> str:
        """What was compared, the worst three parameters, where a run first differs, and the verdict."""
        rows = [("loss", f"{self.losses[0]:.12g} unsharded, {self.losses[1]:.12g} sharded")]
        rows += [
            (d.name, f"{d.what} of step {d.step}: error {d.error:.2g}, bound {d.bound:.2g}")
            for d in self.worst()
        ]
        if self.divergence is not None:
            rows.append(("first difference", self.divergence.description))
        width = max(len(name) for name, _ in rows)
        verdict = {None: "information, not a verdict", True: "proven", False: "NOT proven"}[self.proven]
        lines = [f"{self.plan} on {self.mesh}, in {self.dtype}: {verdict}"]
        return "\n".join([*lines, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def worst(self, count: int = 3) -> list[Difference]:
        """The parameters nearest to their bounds, or furthest over them, each once; without a verdict, those
        with the largest errors.
        """
        kinds = ("gradient", "parameter", "initial value", "optimizer state")
        once: dict[str, Difference] = {}
        of_parameters = [d for d in self.verdict.differences if d.what in kinds]
        for difference in sorted(of_parameters, key=lambda d: -(d.share if self.is_verdict else d.error)):
            once.setdefault(difference.name.partition(":")[0], difference)
        return list(once.values())[:count]


def prove(
    setup: Setup,
    *,
    model: nn.Module | None = None,
    program: Program | None = None,
    full_mesh: bool = False,
    seed: int = 0,
    force: bool = False,
    dtype: str = "float64",
    accumulate: int | None = None,
    seq_len: int | None = None,
    device: str = "cpu",
) -> Proof:
    """Run the tiny form of a configuration unsharded and on real ranks, and compare everything. `model` is the
    real one, where it is built already, and `program` what it was compiled to. The ranks compute on `device`: with cuda they
    share this machine's GPUs, and gloo carries what they exchange.

    Raises PlanError when the compiler refuses the plan, for the real sizes or for the tiny ones, unless
    `force`, and when a module's forward fails on a rank; LaunchError when a rank fails otherwise.
    """
    small, changes = shrink(setup, full_mesh=full_mesh, accumulate=accumulate, seq_len=seq_len)
    check_ranks(small.mesh)
    real = program or setup.compile(model or setup.build_model(), force=force)
    subject = dataclasses.replace(subject_of(small), device=device)
    return prove_small(small, subject, changes, real.diagnostics, seed=seed, force=force, dtype=dtype)


def prove_small(
    small: Setup,
    subject: Subject,
    changes: tuple[str, ...],
    found: tuple[Diagnostic, ...],
    *,
    seed: int = 0,
    force: bool = False,
    dtype: str = "float64",
) -> Proof:
    """As `prove`, for a tiny form that was made by `changes`, and its `subject`; `found` are the findings for the real sizes."""
    changes += unmatched(small)
    try:
        proof = prove_subject(subject, seed=seed, force=force, dtype=dtype)
        proof = blame_axes(proof, subject, seed=seed, force=force, dtype=dtype)
        proof = blame_rows(proof, subject, seed)
    except PlanError as error:
        raise PlanError(place_dropout(small, one) for one in error.diagnostics) from None
    return dataclasses.replace(proof, changes=changes, diagnostics=found)


def prove_subject(
    subject: Subject,
    *,
    seed: int = 0,
    force: bool = False,
    dtype: str = "float64",
    references: Sequence[Observation] | None = None,
) -> Proof:
    """As `prove`, for a subject as it is. This process forks, so it must have no process group.

    `references` are those of the same model, batches, seed and dtype, if they are known: they have no
    plan.

    Raises PlanError also when the unsharded run itself gives no numbers, or a module's forward fails on a
    rank.
    """
    master = _master(dtype)
    subject = _in_precision(subject, dtype)
    program = _in_one_precision(subject.compile(subject.build(), force=force), dtype)
    with _quiet():
        reference, other, nudged = references or references_of(subject, seed, dtype)
        if subject.loud != 1 and not _is_finite(reference):
            subject = dataclasses.replace(subject, loud=1.0)
            reference, other, nudged = references_of(subject, seed, dtype)
        _check_finite(reference)
        ranks = _ranks(subject, program, seed, master)
    verdict = judge(reference, other, nudged, ranks, subject.mesh, subject.tokens, master, subject.loud)
    proof = Proof(
        subject.plan.file,
        subject.mesh,
        dtype,
        verdict,
        (reference.losses[0], ranks[0].losses[0]),
        diagnostics=program.diagnostics,
        lowered=dtype != "bfloat16" or any(use.slot == "fsdp" for use in program),
        one_sided=reference.one_sided,
        frozen=frozenset(n for n, g in reference.gradients[0].items() if g is None),
    )
    if proof.passed:
        return proof
    return dataclasses.replace(
        proof, divergence=locate(program, reference, ranks, verdict), unequal=verdict.unequal
    )


def blame_axes(
    proof: Proof, subject: Subject, *, seed: int = 0, force: bool = False, dtype: str = "float64"
) -> Proof:
    """A failed proof of several axes with its `broken_axes`, and with the first difference on the innermost of them alone.

    With all axes together, a reduction that is missing over tp changes every gradient that fsdp reduces later, so that the first
    difference may lie at the fsdp unit. A proof that passed, and one of a single axis, is returned as it is.
    """
    axes = [axis for axis, size in subject.mesh.sizes.items() if size > 1]
    if proof.passed or len(axes) < 2:
        return proof
    references = references_of(subject, seed, dtype)
    broken: dict[str, Proof] = {}
    for axis in axes:
        mesh = Mesh({axis: subject.mesh.sizes[axis]}, subject.mesh.spans)
        alone = dataclasses.replace(subject, mesh=mesh)
        try:
            one = prove_subject(alone, seed=seed, force=force, dtype=dtype, references=references)
        except (PlanError, launch.LaunchError):  # the plan may need its other axes
            continue
        if not one.passed:
            broken[axis] = one
    if not broken:
        return dataclasses.replace(proof, broken_axes=())
    first = broken[[axis for axis in axes if axis in broken][-1]]
    return dataclasses.replace(
        proof, broken_axes=tuple(broken), divergence=first.divergence, unequal=first.unequal
    )


def blame_rows(proof: Proof, subject: Subject, seed: int = 0) -> Proof:
    """A proof that failed on data axes alone, with the line where the model or the loss mixes rows, if it does."""
    axes = proof.broken_axes or tuple(axis for axis, size in subject.mesh.sizes.items() if size > 1)
    if proof.passed or not set(axes) <= set(BATCH_AXES):
        return proof
    return dataclasses.replace(proof, mixed_rows=mixed_at(subject, seed))


def check_ranks(mesh: Mesh) -> None:
    """One machine runs all ranks of a proof. Raises PlanError when they are too many for that."""
    if mesh.world_size > MAX_RANKS:
        message = f"{mesh.world_size:,} ranks are more than the {MAX_RANKS} that a proof may start"
        advice = (
            f"leave out --full-mesh: every axis above {SMALL} becomes {SMALL}, which proves the same plan"
        )
        raise PlanError([Diagnostic("too-many-ranks", message, None, advice)])


def _in_precision(subject: Subject, dtype: str) -> Subject:
    """The subject with fsdp computing in `dtype`: no proof in float64 can have mixed precision."""
    fsdp = subject.defaults.get("fsdp", StyleDefaults())
    if fsdp.off:
        return subject
    options = {k: v for k, v in fsdp.options.items() if k not in ("param_dtype", "reduce_dtype")}
    if dtype == "bfloat16":
        where = subject.plan.rules[0].span if subject.plan.rules else None
        options |= {"param_dtype": Option("bfloat16", where), "reduce_dtype": Option("float32", where)}  # type: ignore[arg-type]
    return dataclasses.replace(subject, defaults={**subject.defaults, "fsdp": StyleDefaults(options)})


def _in_one_precision(program: Program, dtype: str) -> Program:
    """The program without the mixed precision that a rule itself asks for; in bfloat16 it stays."""
    if dtype == "bfloat16":
        return program
    applications = tuple(
        dataclasses.replace(
            a, options={k: v for k, v in a.options.items() if k not in ("param_dtype", "reduce_dtype")}
        )
        if a.slot == "fsdp"
        else a
        for a in program
    )
    return dataclasses.replace(program, applications=applications)


def _master(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "bfloat16" else DTYPES[dtype]


def references_of(subject: Subject, seed: int = 0, dtype: str = "float64") -> list[Observation]:
    """The unsharded run, the same in another order of summation, and the same with its first gradients
    nudged, side by side.
    """
    return _references(subject, seed, _master(dtype))


def _references(subject: Subject, seed: int, dtype: torch.dtype) -> list[Observation]:
    modes = (Float64(), PlainAttention()) if dtype == torch.float64 else (PlainAttention(),)
    return in_children(
        [
            (unsharded, subject, seed, modes, dtype, False, 0.0, True),
            (unsharded, subject, seed, (*modes, OtherOrder()), dtype, True),
            (unsharded, subject, seed, modes, dtype, False, nudge_size(dtype)),
        ]
    )


def _is_finite(reference: Observation) -> bool:
    return all(map(math.isfinite, (*reference.losses, *reference.norms)))


def _check_finite(reference: Observation) -> None:
    """A run that is not a number even on one device has nothing that ranks could equal."""
    for step, loss in enumerate(reference.losses):
        if math.isfinite(loss) and math.isfinite(reference.norms[step]):
            continue
        what = (
            f"loss is {loss:g}" if not math.isfinite(loss) else f"gradient norm is {reference.norms[step]:g}"
        )
        message = f"the {what} in step {step} of the unsharded run, so that there is nothing to compare with"
        advice = "every batch needs tokens that count in the loss, and the model finite initial values"
        raise PlanError([Diagnostic("model-failed", message, None, advice)])


def _ranks(subject: Subject, program: Program, seed: int, dtype: torch.dtype) -> list[Observation]:
    """Every rank's observation. They travel through files: results through the launcher must be small."""
    world = subject.mesh.world_size
    with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        worker = functools.partial(_rank, subject, program, seed, dtype, folder)
        launch.start(
            worker,
            ranks=world,
            device="cpu",
            start_timeout=START_TIMEOUT,
            collective_timeout=COLLECTIVE_TIMEOUT,
            sees_gpus=subject.device == "cuda",
        )
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]


def _rank(subject: Subject, program: Program, seed: int, dtype: torch.dtype, folder: str) -> None:
    rank = dist.get_rank()
    if subject.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        stage_over_the_cpu()
    try:
        with _quiet():
            seen = sharded(subject, program, seed, (Float64(),) if dtype == torch.float64 else (), dtype)
    except ModuleFailed as failed:
        raise PlanError([_failure(program, failed, rank)]) from failed
    if rank:
        # Whole parameters are the same everywhere, or their bits tell: rank 0's are compared.
        seen.start, seen.parameters, seen.states = {}, [], {}
    torch.save(seen, Path(folder) / f"{rank}.pt")


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


__all__ = ["COLLECTIVE_TIMEOUT", "DTYPES", "Proof", "prove", "prove_subject", "references_of"]
