"""The predicted time of a setup's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.configuration.setup import Setup

if TYPE_CHECKING:
    from parallelizer.simulate.record.trace import Trace
    from parallelizer.simulate.time.predict import StepTime


def step_time(setup: Setup, trace: Trace | None) -> StepTime | None:
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
        return predict(trace.line, setup.mesh, setup.hardware, tokens)
    machine = machine_of(setup.hardware)
    if trace.pipeline is None or machine is None:
        return None
    return predict_pipeline(machine, trace.pipeline, setup.mesh, tokens)
