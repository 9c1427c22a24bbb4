"""The proof of one plan on one mesh."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

from parallelizer.compiler.observe.running_module import within
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import BATCH_AXES, Mesh, Option, StyleDefaults
from parallelizer.proof.compare import NotRepeatedError, judge
from parallelizer.proof.departure import departure
from parallelizer.proof.dropout import place_dropout
from parallelizer.proof.float8_distance import Distance, distances
from parallelizer.proof.locate import locate
from parallelizer.proof.mixed_rows import mixed_at
from parallelizer.proof.not_equal import MixedRowsError, mixed_rows
from parallelizer.proof.not_finite import NotFiniteError
from parallelizer.proof.proof import Proof
from parallelizer.proof.runs import References, Runs, runs_of
from parallelizer.proof.subject import Subject
from parallelizer.proof.tiny import SMALL, TinyForm, small_mesh, tiny_form
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.styles.application import Program
from parallelizer.styles.float8.recipes import recipe_of

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""float64 and float32 give a verdict; bfloat16, in which fsdp computes then, is compared with float32 and
only reported.
"""

MAX_RANKS = 64
"""Processes that one machine is given, as `launch.max_cpu_ranks` says for the recipe."""


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
    check_ranks(setup.mesh if full_mesh else small_mesh(setup.mesh, setup.pipeline))
    tiny = tiny_form(setup, full_mesh=full_mesh, accumulate=accumulate, seq_len=seq_len, device=device)
    real = program or setup.compile(model or setup.build_model(), force=force)
    return prove_tiny(tiny, real.diagnostics, seed=seed, force=force, dtype=dtype)


def prove_tiny(
    tiny: TinyForm,
    found: tuple[Diagnostic, ...],
    *,
    seed: int = 0,
    force: bool = False,
    dtype: str = "float64",
) -> Proof:
    """As `prove`, for a tiny form that is made already; `found` are the findings for the real sizes."""
    try:
        proof = prove_subject(tiny.subject, seed=seed, force=force, dtype=dtype)
    except (MixedRowsError, NotFiniteError):
        raise
    except PlanError as error:
        raise PlanError(place_dropout(tiny.setup, one) for one in error.diagnostics) from None
    return dataclasses.replace(proof, changes=tiny.changes, diagnostics=found)


def prove_subject(
    subject: Subject,
    *,
    seed: int = 0,
    force: bool = False,
    dtype: str = "float64",
    references: References | None = None,
) -> Proof:
    """As `prove`, for a subject as it is. This process forks, so it must have no process group. `references` are the
    unsharded runs of the same model and batches, if they are known.

    Raises PlanError also when the unsharded run itself gives no numbers, or a module's forward fails on a
    rank; MixedRowsError when its results depend on the order of a batch that data ranks divide.
    """
    program = _compiled(subject, dtype, force)
    runs = runs_of(subject, program, seed, master_of(dtype), references)
    axes = [axis for axis, size in subject.mesh.sizes.items() if size > 1]
    try:
        proof = _compared(subject, program, runs, dtype)
    except NotRepeatedError:
        span = mixed_at(subject, seed) if {*BATCH_AXES, "pp"} & set(axes) else None
        if span is None:
            raise
        raise mixed_rows(subject.mesh, span) from None
    if proof.passed:
        return proof
    failing = subject
    if len(axes) > 1:
        broken = _broken_axes(subject, runs.references, axes, seed, dtype, force)
        proof = dataclasses.replace(proof, broken_axes=tuple(broken))
        axes = list(broken) or axes
        if broken:
            # With all axes together, a reduction that is missing over tp changes every gradient that fsdp reduces later, so that
            # the first difference may lie at the fsdp unit: the innermost axis alone shows the place.
            alone = broken[axes[-1]]
            proof = dataclasses.replace(proof, divergence=alone.divergence, unequal=alone.unequal)
            failing = dataclasses.replace(subject, mesh=alone.mesh)
    in_forward = proof.divergence is not None and proof.divergence.phase == "forward"
    if set(axes) <= {*BATCH_AXES, "pp"}:  # a data rank has some of the rows, and so has a microbatch
        # Where a forward differs first, the loss behind it is not to blame.
        proof = dataclasses.replace(proof, mixed_rows=mixed_at(subject, seed, with_loss=not in_forward))
    has_line = proof.mixed_rows is not None or (
        proof.divergence is not None and proof.divergence.line is not None
    )
    if in_forward and not has_line and dtype == "float64":
        line = departure(failing, _compiled(failing, dtype, force), seed)
        proof = dataclasses.replace(proof, departure=line)
    return proof


def prove_with(
    subject: Subject, references: References, *, seed: int = 0, force: bool = False, dtype: str = "float64"
) -> Proof:
    """As `prove_subject`, with the references of the same model, batches, seed and dtype: they have no plan. A proof that fails
    is not made again on each axis alone.
    """
    program = _compiled(subject, dtype, force)
    return _compared(subject, program, runs_of(subject, program, seed, master_of(dtype), references), dtype)


def _compared(subject: Subject, program: Program, runs: Runs, dtype: str) -> Proof:
    reference, ranks = runs.references.plain, runs.ranks
    verdict = judge(
        reference,
        runs.references.other_order,
        runs.references.nudged,
        ranks,
        subject.mesh,
        subject.tokens,
        _rounding(program, dtype),
        runs.references.loud,
    )
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
        float8=_distances(runs.references),
    )
    if proof.passed:
        return proof
    return dataclasses.replace(
        proof, divergence=locate(program, reference, ranks, verdict), unequal=verdict.unequal
    )


def _rounding(program: Program, dtype: str) -> torch.dtype:
    """The dtype that both runs round to. A scale of a whole tensor is a float32, and is no power of two. Modes do not see which
    code compiled code comes from: they lift it there to float64.
    """
    compiled = [a.module for a in program.of_slot("compile")]
    lifted = any(
        recipe_of(a) == "tensorwise" and any(within(a.module, path) for path in compiled)
        for a in program.of_slot("precision")
    )
    return torch.float32 if lifted else master_of(dtype)


def _distances(references: References) -> tuple[Distance, ...]:
    if references.precision is None or references.full is None:
        return ()
    return tuple(distances(references.plain, references.full, references.precision))


def _broken_axes(
    subject: Subject, references: References, axes: list[str], seed: int, dtype: str, force: bool
) -> dict[str, Proof]:
    """The proofs that fail with one of the axes alone."""
    broken: dict[str, Proof] = {}
    for axis in axes:
        sizes = {axis: subject.mesh.sizes[axis]}
        mesh = Mesh(sizes, subject.mesh.spans, ep=math.gcd(subject.mesh.ep, Mesh(sizes).replica))
        try:
            alone = prove_with(
                dataclasses.replace(subject, mesh=mesh), references, seed=seed, force=force, dtype=dtype
            )
        except (PlanError, LaunchError):  # the plan may need its other axes
            continue
        if not alone.passed:
            broken[axis] = alone
    return broken


def _compiled(subject: Subject, dtype: str, force: bool) -> Program:
    """The subject's program, which computes in `dtype`."""
    subject = _in_precision(subject, dtype)
    return _in_one_precision(subject.compile(subject.build(), force=force), dtype)


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


def master_of(dtype: str) -> torch.dtype:
    """The dtype of the parameters in a proof in `dtype`."""
    return torch.float32 if dtype == "bfloat16" else DTYPES[dtype]
