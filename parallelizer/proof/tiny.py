"""The tiny form of a configuration: fewer layers, smaller widths, small axes, and a batch that shows what an
even one hides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.configuration.setup import Setup
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import BATCH_AXES, Mesh
from parallelizer.language.routing import BALANCED
from parallelizer.language.workload import Workload
from parallelizer.proof.subject import Subject
from parallelizer.proof.tiny_layers import merged, with_every_kind, with_stages

SMALL = 2
"""What axes above it are shrunk to."""

STAGED = 4
"""What `pp` is shrunk to on a mesh of up to `MOST` ranks: ranks between the first and the last hand tensors on."""

MOST = 8
"""The ranks of a small mesh at most, if it has more than `SMALL` ranks of `pp`."""

LENGTH = 24
"""Tokens of a sequence at most where no axis is above 2. A larger mesh, which `--full-mesh` keeps, may need more to divide
them.
"""


def small_mesh(mesh: Mesh, pipeline: Pipeline | None = None) -> Mesh:
    """The mesh with no axis above `SMALL`, but for `pp`: it is at most `STAGED` if no more than `MOST` ranks come of it, and
    stays as it is where a file has the order of each of its ranks.
    """
    sizes = {axis: min(size, SMALL) for axis, size in mesh.sizes.items()}
    staged = {**sizes, "pp": min(mesh.sizes["pp"], STAGED)}
    if math.prod(staged.values()) <= MOST:
        sizes = staged
    if pipeline is not None and pipeline.order is not None:
        sizes["pp"] = mesh.sizes["pp"]
    return Mesh(sizes, mesh.spans, ep=math.gcd(mesh.ep, Mesh(sizes).replica))


@dataclass(frozen=True)
class SmallSizes:
    """The mesh, the pipeline and the tokens of a sequence that a tiny form has."""

    mesh: Mesh
    pipeline: Pipeline | None
    length: int


def small_sizes(setup: Setup, *, full_mesh: bool = False, seq_len: int | None = None) -> SmallSizes:
    """The sizes of the tiny form of a setup, as `shrink` takes them."""
    mesh = setup.mesh if full_mesh else small_mesh(setup.mesh, setup.pipeline)
    length = _small_length(setup, mesh) if seq_len is None else _rounded_up(seq_len, mesh)
    return SmallSizes(mesh, _small_pipeline(setup, mesh), length)


def shrink(
    setup: Setup, *, full_mesh: bool = False, accumulate: int | None = None, seq_len: int | None = None
) -> tuple[Setup, tuple[str, ...]]:
    """A configuration made small, and what was changed, in words.

    The model takes its `tiny` arguments, axes become at most 2 (unless `full_mesh`), every data rank has two
    rows in each part, and the sequence is short. A rule may match nothing, since there are fewer layers. `seq_len` is rounded up
    to what the mesh divides.
    """
    sizes = small_sizes(setup, full_mesh=full_mesh, seq_len=seq_len)
    mesh, pipeline = sizes.mesh, sizes.pipeline
    changes = [f"{a} {n} -> {mesh.size_of(a)}" for a, n in setup.mesh.every.items() if mesh.size_of(a) != n]
    tiny: Mapping[str, Any] = setup.model.get("tiny") or {}
    given = setup.pipeline
    if pipeline is not None and given is not None and pipeline.balance != given.balance:
        changes.append(f"pipeline.balance {list(given.balance)} -> {pipeline.balance}")
    tiny, lost = with_every_kind(setup, tiny)
    if pipeline is not None:
        tiny = with_stages(setup, tiny, mesh.sizes["pp"] * (pipeline.stages_per_rank or 1))
    small, changed = merged(setup.model, tiny)
    changes += changed
    parts = accumulate or setup.workload.accumulate
    rows = 2 if pipeline is None else (pipeline.microbatches or 1)
    workload = dataclasses.replace(
        setup.workload,
        batch_size=rows * mesh.size(*BATCH_AXES) * parts,
        seq_len=sizes.length,
        accumulate=parts,
    )
    shown = ("batch_size", "seq_len") if workload.has_sequence() else ("batch_size",)
    changes += _changes("train.", setup.workload, workload, shown)
    if not tiny and setup.model:
        changes.append("the model keeps its size, since `tiny` of its configuration is empty or absent")
    changes += lost
    rules = tuple(dataclasses.replace(rule, optional=True) for rule in setup.plan.rules)
    plan = dataclasses.replace(setup.plan, rules=rules)
    made = dataclasses.replace(
        setup, plan=plan, mesh=mesh, model=small, workload=workload, pipeline=pipeline, routing=BALANCED
    )
    return made, tuple(changes)


def _small_pipeline(setup: Setup, mesh: Mesh) -> Pipeline | None:
    """The settings of the pipeline on a small mesh: as few microbatches as the schedule can have, each of one row. A list of
    layers of each stage stays if the model and `pp` stay as they are; otherwise the parameters are balanced instead. None without
    stages.
    """
    ranks = mesh.sizes["pp"]
    if ranks == 1:
        return None
    given = setup.pipeline or Pipeline()
    if given.order is not None:
        return given.settled(ranks)
    kept = isinstance(given.balance, str) or (ranks == setup.mesh.sizes["pp"] and not setup.model.get("tiny"))
    balance = given.balance if kept else Pipeline.balance
    return dataclasses.replace(given, microbatches=None, balance=balance).settled(ranks)


@dataclass(frozen=True)
class TinyForm:
    """The tiny form of a setup: as a setup, as the `subject` of a proof, and what was changed, in words."""

    setup: Setup
    subject: Subject
    changes: tuple[str, ...]


def tiny_form(
    setup: Setup,
    *,
    full_mesh: bool = False,
    accumulate: int | None = None,
    seq_len: int | None = None,
    device: str = "cpu",
) -> TinyForm:
    """What `shrink` makes of a configuration, for ranks that compute on `device`. Raises PlanError where it cannot be built."""
    small, changes = shrink(setup, full_mesh=full_mesh, accumulate=accumulate, seq_len=seq_len)
    subject = dataclasses.replace(subject_of(small), device=device)
    return TinyForm(small, subject, (*changes, *_unmatched(small)))


def _small_length(setup: Setup, mesh: Mesh) -> int:
    """A short length that is no power of two and divides as the run's does: a length that the run pads is padded, and where a
    rank's parts have an even number of tokens they have it here too. A run that is short itself has its own.
    """
    length = setup.workload.seq_len
    if length <= LENGTH:
        return length
    short = _rounded_up(LENGTH // 2, mesh)
    if length % _parts(setup.mesh):
        return short - 1
    return 2 * short if length % (2 * _parts(setup.mesh)) == 0 and short // _parts(mesh) % 2 else short


def _rounded_up(length: int, mesh: Mesh) -> int:
    """To what the mesh divides."""
    step = math.lcm(2 * mesh.sizes["cp"], mesh.sizes["cp"] * mesh.sizes["tp"])
    return step * math.ceil(length / step)


def _parts(mesh: Mesh) -> int:
    """The parts of a sequence that the ranks of a mesh deal with."""
    cp, tp = mesh.sizes["cp"], mesh.sizes["tp"]
    return math.lcm(2 * cp if cp > 1 else 1, cp * tp)


def _changes(prefix: str, before: object, after: object, names: Sequence[str]) -> list[str]:
    return [
        f"{prefix}{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in names
        if getattr(before, name) != getattr(after, name)
    ]


def _unmatched(small: Setup) -> tuple[str, ...]:
    """The rules that match no module of a tiny form, in words: its proof does not cover them."""
    model = small.build_model()
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]
    unused = [rule.key for rule in small.plan.rules if not rule.glob.select(names)]
    return tuple(f"the rule `{key}` left out, it matches no module of the small model" for key in unused)


def subject_of(setup: Setup) -> Subject:
    """A configuration as it stands, as the subject of a proof."""
    work = setup.workload
    return Subject(
        plan=setup.plan,
        mesh=setup.mesh,
        build=functools.partial(_build, setup),
        whole=setup.whole_model,
        loss=setup.loss(),
        optimizer=setup.build_optimizer,
        batch=functools.partial(proof_batch, work),
        rows=work.batch_size,
        seq_len=work.seq_len,
        accumulate=work.accumulate,
        clip=setup.clip,
        defaults=setup.defaults,
        workload=work,
        redistribute=setup.redistribute,
        pipeline=setup.pipeline,
    )


def _build(setup: Setup) -> nn.Module:
    return setup.build_model()


def proof_batch(workload: Workload, seed: int) -> dict[str, torch.Tensor]:
    """A global batch whose rows all differ, with unequal numbers of valid tokens in every row where an entry
    can be masked, or of valid rows.
    """
    batch = workload.example(workload.batch_size, workload.seq_len, "cpu", seed)
    for name, entry in workload.entries.items():
        if entry.ignore is None:
            continue
        if entry.sequence_dim() is None:  # labels of whole rows
            batch[name][1::3] = entry.ignore
            continue
        for row in range(workload.batch_size):
            masked = (row * 3 + 1) % max(2, workload.seq_len - 2)
            start = (row * 5) % workload.seq_len
            where = torch.arange(start, start + masked) % workload.seq_len
            batch[name][row, where] = entry.ignore
    return batch
