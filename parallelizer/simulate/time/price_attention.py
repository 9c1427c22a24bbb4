"""The time of attention in one kernel."""

from __future__ import annotations

from parallelizer.simulate.record.operators import Operator
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.machine import Machine


def attention_seconds(
    operator: Operator, machine: Machine, constants: Constants, *, flash_2: bool = False
) -> float | None:
    """By the rate that was measured for the length and the head size; None without measurements.

    The table has the forward of causal attention. Backward has five products where forward has two, at a rate of its own
    (`Constants.attention_backward`). The table's kernels are those that torch chooses since 2.11: cuDNN's on Hopper and
    Blackwell. `flash_2`: FlashAttention 2 instead, as before.
    """
    if operator.sizes is None:
        return None
    _, _, _, queries, keys, size = operator.sizes
    length = (queries * keys) ** 0.5 * (1.0 if operator.causal else 2.0)
    tflops, share = machine.table.attention_tflops(length, size), machine.attention_rate(operator.dtype)
    if tflops is None or share is None:
        return None
    rate = tflops * 1e12 * share * machine.scale * machine.sustained(constants)
    if flash_2:
        rate *= machine.flash_2
    if operator.backward:
        rate *= constants.attention_backward
    return operator.flops / rate + machine.kernel_seconds
