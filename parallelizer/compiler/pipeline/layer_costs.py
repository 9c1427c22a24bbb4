"""What the layers of a model cost, in parameters, memory or time, for stages of equal cost."""

from __future__ import annotations

from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.pipeline.survey import Survey
from parallelizer.compiler.pipeline.unit_calls import UnitCall


def layer_costs(state: Compilation, balance: str, found: Survey) -> tuple[list[float], float, float]:
    """The cost of each candidate, of what runs before the first, and of what runs after the last.

    `balance` is a word of `BALANCES`. A layer is a candidate with everything up to the next one.
    """
    if balance == "layers":
        return [1.0] * len(found.candidates), 0.0, 0.0
    each = [0.0] * len(found.candidates)
    head = tail = 0.0
    behind = False
    for one in found.calls:
        cost = _cost(state, balance, one)
        if one.place == 0:
            head += cost
        elif behind:
            tail += cost
        else:
            each[one.place - 1] += cost
            behind = one.place == len(each) and one.unit == found.candidates[-1]
    return each, head, tail


def _cost(state: Compilation, balance: str, one: UnitCall) -> float:
    """The cost of one call. For memory, a parameter counts 16 bytes: its float32 value, its gradient and two moments of
    Adam. For time, only forwards count: a backward takes twice as long, so the ratios are the same.
    """
    unit = state.modules[one.unit]
    parameters = 0 if one.index else sum(p.numel() for p in unit.parameters())
    if balance == "memory":
        rows = state.workload.batch_size if state.workload is not None else 2
        return 16.0 * parameters + one.bytes * rows / 2
    return float(one.flops) if balance == "time" else float(parameters)
