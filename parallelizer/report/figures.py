"""What a plan comes to, as plain figures that can be written down and compared: for the lock file and for
`--diff`.

Figures lie in sections; in a section each subject has fields. A subject is a title and a path, one of them
perhaps empty: of a parameter only the name, of a collective its phase, axis and kind, and the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.language.fold import fold_paths
from parallelizer.language.workload import Workload
from parallelizer.report.rows.collectives import collective_rows
from parallelizer.report.rows.parameters import shape
from parallelizer.report.rows.paths import ROOT
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.trace import Trace
from parallelizer.styles.application import Program

Fields = Mapping[str, str]


@dataclass(frozen=True)
class FigureSubject:
    """What figures are about. `path` is None where there is no path, and empty for the root module."""

    title: str
    path: str | None = None

    def __str__(self) -> str:
        return " ".join(
            part for part in (self.title, None if self.path is None else self.path or ROOT) if part
        )


Section = Mapping[FigureSubject, Fields]
Figures = Mapping[str, Section]
"""Sections by name: plan, parameters, collectives, collectives by module, memory, and rank classes where ranks
differ."""


def figures(program: Program, model: nn.Module, trace: Trace, workload: Workload) -> Figures:
    """Everything that a lock holds: shards, collectives and memory of one rank, with what they depend on."""
    return {
        "plan": _plan(program, model, trace, workload),
        "parameters": _parameters(program, model, trace.rank),
        "collectives": _totals(trace.ledger),
        "collectives by module": _by_module(trace.ledger),
        "memory": _memory(trace),
        **({"rank classes": _classes(trace)} if len(trace.classes) > 1 else {}),
    }


def _plan(program: Program, model: nn.Module, trace: Trace, workload: Workload) -> Section:
    sizes = {axis: str(size) for axis, size in program.mesh.every.items() if size > 1}
    return {
        FigureSubject("plan"): {"name": program.plan.name},
        FigureSubject("model"): {
            "class": type(model).__name__,
            "parameters": str(sum(p.numel() for p in model.parameters())),
        },
        FigureSubject("mesh"): {**sizes, "ranks": str(program.mesh.world_size)},
        FigureSubject("step"): {
            "sequences": str(workload.batch_size),
            "tokens": str(workload.seq_len),
            "parts": str(workload.accumulate),
        },
        FigureSubject("rank"): {"number": str(trace.rank)},
    }


def _parameters(program: Program, model: nn.Module, rank: int) -> Section:
    return {
        FigureSubject("", shard.name): {
            "dtype": shard.dtype,
            "global": shape(shard.global_shape),
            "local": shape(shard.local_shape),
            **(
                {"over": " ".join(f"{a}={p}" for a, p in shard.placements.items())}
                if shard.placements
                else {}
            ),
            "bytes": str(shard.bytes),
        }
        for shard in parameter_shards(program, model, rank)
    }


def _totals(ledger: Iterable[Collective]) -> Section:
    return {
        FigureSubject(f"{row.phase} {row.axis} {row.kind}"): {
            "calls": str(row.count),
            "payload": str(row.payload_bytes),
            "sent": str(row.wire_bytes),
        }
        for row in collective_rows(ledger)
    }


def _by_module(ledger: Iterable[Collective]) -> Section:
    found: dict[FigureSubject, list[Collective]] = {}
    for entry in ledger:
        found.setdefault(FigureSubject(f"{entry.phase} {entry.axis} {entry.kind}", entry.module), []).append(
            entry
        )
    return {
        subject: {
            "calls": str(len(entries)),
            "payload": str(sum(e.payload_bytes for e in entries)),
            "dtype": "+".join(sorted({e.dtype for e in entries})),
        }
        for subject, entries in found.items()
    }


def _memory(trace: Trace) -> Section:
    memory = trace.memory
    held = {FigureSubject(kind): {"bytes": str(size)} for kind, size in memory.at_peak.items() if size}
    where = {"phase": memory.phase or "none", "module": memory.module or ROOT}
    return {**held, FigureSubject("peak"): {"bytes": str(memory.peak), **where}}


def _classes(trace: Trace) -> Section:
    return {
        FigureSubject(f"like rank {c.rank}"): {
            "ranks": str(c.ranks),
            "parameters": str(c.parameters_bytes),
            "peak": "untraced" if c.peak is None else str(c.peak),
        }
        for c in trace.classes
    }


@dataclass(frozen=True)
class Change:
    """The same change of several subjects, their paths folded. `before` and `after` hold the fields that
    differ, None where the subject is not there."""

    section: str
    subjects: tuple[str, ...]
    number: int
    before: Fields | None
    after: Fields | None


def changes(before: Figures, after: Figures) -> list[Change]:
    """What is different, in the order of the sections; equal changes of several paths together."""
    found: list[Change] = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, {}), after.get(name, {})
        groups: dict[tuple[object, ...], list[FigureSubject]] = {}
        for subject in dict.fromkeys([*old, *new]):
            a, b = _difference(old.get(subject), new.get(subject))
            if a != b:
                groups.setdefault((_frozen(a), _frozen(b)), []).append(subject)
        for subjects in groups.values():
            a, b = _difference(old.get(subjects[0]), new.get(subjects[0]))
            found.append(Change(name, tuple(folded(subjects)), len(subjects), a, b))
    return found


def _difference(old: Fields | None, new: Fields | None) -> tuple[Fields | None, Fields | None]:
    """Both without the fields in which they agree."""
    if old is None or new is None:
        return old, new
    return (
        {k: v for k, v in old.items() if new.get(k) != v},
        {k: v for k, v in new.items() if old.get(k) != v},
    )


def _frozen(fields: Fields | None) -> object:
    return None if fields is None else tuple(fields.items())


def folded(subjects: Iterable[FigureSubject]) -> list[str]:
    """Subjects as text, the paths under one title folded into few globs."""
    by_title: dict[str, list[str]] = {}
    lines: list[str] = []
    for subject in subjects:
        if subject.path:
            by_title.setdefault(subject.title, []).append(subject.path)
        else:
            lines.append(str(subject))
    return lines + [
        f"{title} {glob}".lstrip() for title, paths in by_title.items() for glob in fold_paths(paths)
    ]
