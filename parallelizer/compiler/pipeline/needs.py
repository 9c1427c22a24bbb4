"""What each stage needs: outputs of modules, random numbers, and parameters that the code between the modules reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from parallelizer.compiler.pipeline.survey import Survey
from parallelizer.compiler.pipeline.unit_calls import Need, UnitCall
from parallelizer.language.pipeline.stages import UnitOutput


def needs_of_stages(found: Survey, of_place: Sequence[int]) -> list[set[Need]]:
    """The needs of each stage, with those of modules that every stage can run. `of_place` has the stage of each place."""
    by_value = {(one.unit, one.index): one for one in found.calls}
    needs: list[set[Need]] = [set() for _ in range(of_place[-1] + 1)]
    for one in found.calls:
        if not one.free:
            needs[of_place[one.place]] |= _with_free_units(one.needs, by_value)
    needs[-1] |= _with_free_units(found.output, by_value)
    return needs


def _with_free_units(needs: Iterable[Need], by_value: Mapping[tuple[str, int], UnitCall]) -> set[Need]:
    """The needs of a call, with those of the free units whose output it needs."""
    every: set[Need] = set()
    waiting = list(needs)
    while waiting:
        one = waiting.pop()
        if one in every:
            continue
        every.add(one)
        if isinstance(one, UnitOutput) and by_value[one.unit, one.call].free:
            waiting += by_value[one.unit, one.call].needs
    return every
