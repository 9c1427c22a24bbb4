"""The time of a product of matrices."""

from __future__ import annotations

from parallelizer.simulate.record.operator_sizes import GROUPED
from parallelizer.simulate.record.operators import Operator
from parallelizer.simulate.time.constants import CAST_BYTES, Constants
from parallelizer.simulate.time.machine import Machine

EIGHT_BITS = ("float8", "float8_rowwise", "float4")


def gemm_seconds(
    operator: Operator, machine: Machine, constants: Constants, dtype: str | None = None
) -> float | None:
    """The measured time of the nearest sizes, at the rate that a training reaches; None for a dtype without a rate.

    `dtype` stands for the operator's own. A batch of products costs as one with the batch's rows: batches are small, and the
    kernels fill the device alike. On processors, a group of rows is multiplied behind the other, each by its own matrix.
    """
    found = machine.grid(dtype or operator.dtype)
    if found is None or operator.sizes is None:
        return None
    grid, scale = found
    batch, m, n, k = operator.sizes
    in_turn = operator.name in GROUPED and not machine.streams
    measured = (batch * grid.seconds(m, n, k) if in_turn else grid.seconds(batch * m, n, k)) / scale
    return measured / machine.sustained(constants) + machine.kernel_seconds


def cast_seconds(operator: Operator, machine: Machine, constants: Constants, dtype: str) -> float:
    """What quantising takes, bound by the memory.

    Of the three products of a linear layer each has one factor that is quantised for it: the input, the gradient of the output,
    and the input again. Weights are small beside them. With a scale for each row, no product can use what was quantised for
    another, since each sums over another dim: both factors are quantised.
    """
    batch, m, n, k = operator.sizes or (0, 0, 0, 0)
    elements = batch * (m * k + k * n) if dtype == "float8_rowwise" else batch * m * k
    return CAST_BYTES * elements / (machine.memory * constants.memory)
