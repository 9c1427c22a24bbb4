"""The time of operators that the memory's bandwidth bounds."""

from __future__ import annotations

from parallelizer.simulate.record.operators import Operator
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.machine import Machine


def memory_seconds(operator: Operator, machine: Machine, constants: Constants) -> float:
    """The bytes read and written over the bandwidth, and what each kernel takes at least."""
    share = 1.0 if machine.measured else constants.memory
    return operator.moved / (machine.memory * share) + operator.kernels * machine.kernel_seconds
