"""The predicted time of a setup's step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallelizer.configuration.setup import Setup

if TYPE_CHECKING:
    from parallelizer.simulate.record.trace import Trace
    from parallelizer.simulate.time.predict import StepTime
    from parallelizer.simulate.time.price import Habits


def step_time(setup: Setup, trace: Trace | None, habits: Habits | None = None) -> StepTime | None:
    """The time of a traced step on the setup's hardware; None without a trace, where nothing is known of the hardware, and for a
    pipeline of which not every stage was traced, or one that stands for it.
    """
    from parallelizer.simulate.time.machine import machine_of
    from parallelizer.simulate.time.predict import predict
    from parallelizer.simulate.time.predict_pipeline import predict_pipeline

    if trace is None:
        return None
    tokens = setup.workload.batch_size * setup.workload.seq_len
    if setup.mesh.sizes["pp"] == 1:
        return predict(trace.line, setup.mesh, setup.hardware, tokens, habits=habits)
    machine = machine_of(setup.hardware)
    if trace.pipeline is None or machine is None:
        return None
    return predict_pipeline(machine, trace.pipeline, setup.mesh, tokens, habits=habits)


def measured_step_time(setup: Setup, trace: Trace, seconds: float) -> StepTime | None:
    """The time of a traced step if its rank, alone, computes for `seconds`: every operator keeps its share of them, and
    collectives keep their prices. None where `step_time` is None, and where the setup's hardware is another kind of device.
    """
    from parallelizer.simulate.time.machine import machine_of
    from parallelizer.simulate.time.price import Habits

    machine = machine_of(setup.hardware)
    if machine is None or bool(machine.cores) != (setup.device == "cpu"):
        return None
    habits = Habits(alone=True)
    alone = step_time(setup, trace, habits)
    priced = sum(alone.compute.values()) + alone.waits.get("host", 0.0) if alone is not None else 0.0
    return step_time(setup, trace, replace(habits, alone=False, pace=seconds / priced)) if priced else None
