"""The time of attention in one kernel."""

from __future__ import annotations

from parallelizer.simulate.record.operators import Operator
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.machine import Machine


def attention_seconds(
    operator: Operator, machine: Machine, constants: Constants, *, library: bool = False
) -> float | None:
    """By the rate that was measured for the length and the head size; None without measurements.

    The table has the forward of causal attention. Backward has five products where forward has two, at a rate of its own
    (`Constants.attention_backward`). `library`: the kernels of cuDNN or FlashAttention 3 instead of torch's choice.
    """
    if operator.sizes is None:
        return None
    _, _, _, queries, keys, size = operator.sizes
    length = (queries * keys) ** 0.5 * (1.0 if operator.causal else 2.0)
    tflops = machine.table.attention_tflops(length, size)
    if tflops is None:
        return None
    rate = tflops * 1e12 * machine.scale
    if machine.fa2 and not library:
        rate *= constants.attention
    if operator.backward:
        rate *= constants.attention_backward
    return operator.flops / rate + machine.kernel_seconds
