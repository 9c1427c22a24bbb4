"""The predicted time of a setup's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.configuration.setup import Setup

if TYPE_CHECKING:
    from parallelizer.simulate.record.trace import Trace
    from parallelizer.simulate.time.predict import StepTime


def step_time(setup: Setup, trace: Trace | None) -> StepTime | None:
    """The time of a traced step on the setup's hardware; None without a trace, where nothing is known of the hardware, and for a
    pipeline, which is not priced.
    """
    from parallelizer.simulate.time.predict import predict

    if trace is None or setup.mesh.sizes["pp"] > 1:
        return None
    workload = setup.workload
    return predict(trace.line, setup.mesh, setup.hardware, workload.batch_size * workload.seq_len)
