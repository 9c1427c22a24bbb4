"""`redundant-redistribution`: a tensor is made whole and split again, or split and made whole, with nothing in between."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

from parallelizer.compiler.observe.module_calls import Journey, Passage
from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.checks.traced_step import Traced, modules_text, sent_text, written
from parallelizer.simulate.record.ledger import Collective
from parallelizer.styles.conversions import Conversion, conversions


def redundant_redistribution(traced: Traced) -> Iterator[Diagnostic]:
    """Two conversions that undo each other, without a read of the tensor in between."""

    def alike(pair: tuple[Conversion, Conversion]) -> Hashable:
        first, second = pair
        return first.application.rule.span, second.application.rule.span, first.kind, second.kind

    for pairs in grouped(undone(traced), alike):
        first, second = pairs[0]
        calls = [e for one, two in pairs for e in _cost(traced, one, two)]
        done = {"gather": "gathered", "reduce": "summed whole", "split": "split"}[first.kind]
        again = "split again" if second.kind == "split" else "gathered again"
        help_text = "write the same placement in both rules"
        if first.kind == "reduce":
            help_text = (
                f"write `output: {second.after}` in the first rule: a reduce-scatter sends half as much"
            )
        yield Diagnostic(
            "redundant-redistribution",
            f"{_border(first)} of {modules_text(c.application for c, _ in pairs)} is {done} over {first.axis} and {again} as "
            f"{_border(second)} of {modules_text(c.application for _, c in pairs)}, with nothing in between: {sent_text(calls)}",
            written(first),
            help_text,
            "warning",
            (Related(written(second), again),),
        )


def undone(traced: Traced) -> Iterator[tuple[Conversion, Conversion]]:
    """Pairs of conversions of one tensor of which the second undoes the first."""
    if traced.calls is None:
        return
    by_module: dict[str, list[Conversion]] = {}
    for application in traced.program.of_slot("params", "io"):
        by_module.setdefault(application.module, []).extend(conversions(application))
    for journey in traced.calls.journeys:
        steps = [(p, c) for p in journey.passages for c in _at(p, by_module.get(p.module, ()))]
        told = False
        for (_, first), (passage, second) in itertools.pairwise(steps):
            opposite = first.kind in ("gather", "reduce") and second.kind == "split"
            opposite |= (first.kind, second.kind) == ("split", "gather")
            # The second of a pair is not also the first of the next one.
            told = opposite and not told and first.axis == second.axis and not _read_before(journey, passage)
            if told:
                yield first, second


def _border(conversion: Conversion) -> str:
    name = "" if conversion.name == "input" else conversion.name
    return "the output" if conversion.leaves else f"the input {name}".rstrip()


def _at(passage: Passage, found: Sequence[Conversion]) -> Iterator[Conversion]:
    """The conversions at one passage, in order: inputs from the outermost style in, outputs from the
    innermost out."""
    here = [c for c in found if c.leaves == passage.leaves and c.kind]
    for conversion in here if passage.leaves else reversed(here):
        if (
            conversion.name == passage.name
            or (conversion.name or "0") == (passage.name or "0")
            or not conversion.name
        ):
            yield conversion


def _read_before(journey: Journey, passage: Passage) -> bool:
    """Whether anybody may read the tensor as it is between two conversions, of which the second is at
    `passage`."""

    def inside(module: str) -> bool:
        return module == passage.module or module.startswith(f"{passage.module}.") or passage.module == ""

    if passage.leaves:
        return any(inside(module) for module in journey.read_in)
    after = journey.passages[journey.passages.index(passage) :]
    return any(not inside(module) for module in journey.read_in) or any(p.leaves for p in after)


def _cost(traced: Traced, first: Conversion, second: Conversion) -> list[Collective]:
    """The collectives of two conversions that undo each other: one gathers in forward, the other its gradient
    in backward."""
    gathers = (first, second) if first.kind != "split" else (second, first)
    forward = traced.entries("forward", first.axis, gathers[0].application.module, "all_gather", "all_reduce")
    backward = traced.entries("backward", first.axis, gathers[1].application.module, "all_gather")
    return forward + backward
