"""A choice of what a forward allows, as the text of a plan file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.from_forward.rules import Choice, lines, other_layouts
from parallelizer.propose.globs import globs_for
from parallelizer.propose.plan_text import Form, PlanLine, Section, plan_text, quoted_in_a_map

WIDTH = 110
"""The columns of a line."""

FORM = Form(WIDTH, gap=" ", comment="   # ", widest_styles=40)


def write_plan(facts: Facts, choice: Choice, title: str, said: Sequence[str] = ()) -> str:
    """The plan; `said` are sentences on what was left alone, as comments above the rules."""
    header = [title]
    for sentence in said:
        header += textwrap.wrap(sentence, WIDTH - len("# "), subsequent_indent="  ")
    layouts = []
    if choice.units:
        comment = "the residual stream over tp"
        others = other_layouts(facts, choice)
        if choice.is_sharded:
            here = f"`replicate` here and for {', '.join(others)}" if others else "`replicate`"
            comment += f"; {here} switches sequence parallelism off"
            if choice.random:  # ranks drop the same of what is whole again
                comment += ", without `local-random`"
        layouts.append(f"stream: {choice.stream}   # {comment}")
        layouts += [f"{name}: {layout}   # the same, of what has no batch" for name, layout in others.items()]
    buffers = {"batch": choice.batch, "model": dict(_buffers(facts, choice))}
    return plan_text(
        FORM,
        header,
        [Section(tuple(_rules(facts, choice)))],
        layouts=layouts,
        buffers={kind: entries for kind, entries in buffers.items() if entries},
        about_buffers="what carries the sequence, and along which dimension",
    )


def _rules(facts: Facts, choice: Choice) -> Iterator[PlanLine]:
    """The rules by their globs; of several globs the first has the comment."""
    for line in lines(facts, choice):
        for at, glob in enumerate(globs_for(line.modules, facts.modules)):
            yield PlanLine(glob, line.styles, line.comment if at == 0 else "")


def _buffers(facts: Facts, choice: Choice) -> Iterator[tuple[str, str]]:
    by_dim: dict[int, list[str]] = {}
    for name, dim in choice.buffers.items():
        by_dim.setdefault(dim, []).append(name)
    for dim, names in by_dim.items():
        for glob in globs_for(names, facts.buffers):
            yield quoted_in_a_map(glob), str(dim)
