"""Published runs predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.published.compose import Composed, compose
from benchmarks.published.fused import fused_pipeline, pipeline_with_rows_in_place
from benchmarks.published.lines import line_of
from benchmarks.published.rows import Row
from benchmarks.published.traces import Traced, traced
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.simulate.record.operators import Moment
from parallelizer.simulate.time.constants import FITTED, RESERVED, Constants
from parallelizer.simulate.time.machine import Machine, machine_of
from parallelizer.simulate.time.predict import StepTime, predict_on
from parallelizer.simulate.time.predict_pipeline import predict_pipeline
from parallelizer.simulate.time.price import Habits

LINE_PARTS = 4
"""Parts of a batch that are replayed one by one."""


@dataclass(frozen=True)
class Prepared:
    """A row with everything that does not depend on constants."""

    row: Row
    composed: Composed
    traced: Traced
    lines: tuple[tuple[Moment, ...], ...]
    machine: Machine
    tokens: int


@dataclass(frozen=True)
class Prediction:
    """One row: tokens a second on each GPU, published and predicted; the published peak of memory in GiB, and
    the predicted one of what is in use, of which the allocator reserves `share`.
    """

    prepared: Prepared
    time: StepTime
    published: float
    predicted: float
    memory: float | None
    in_use: float
    share: float = RESERVED

    @property
    def predicted_memory(self) -> float:
        """Published peaks are of what the allocator has reserved, unless a row says otherwise."""
        return self.in_use * (1.0 if self.prepared.row.peak_is_in_use else self.share)

    @property
    def error(self) -> float:
        """By how much the predicted throughput is off, as a share of the published one, with its sign."""
        return self.predicted / self.published - 1


def prepare(row: Row, folder: Path | None = None) -> Prepared:
    """Trace a row's configuration. Raises PlanError."""
    composed = compose(row)
    found = traced(composed, folder)
    if found.pipeline is not None and composed.fused:
        found = dataclasses.replace(found, pipeline=fused_pipeline(found.pipeline))
    if found.pipeline is not None and composed.rows_in_place:
        found = dataclasses.replace(found, pipeline=pipeline_with_rows_in_place(found.pipeline))
    hardware = OmegaConf.to_container(
        OmegaConf.load(config_folder() / "hardware" / f"{composed.hardware}.yaml")
    )
    assert isinstance(hardware, dict)  # noqa: S101
    machine = machine_of({**hardware, **composed.hardware_values})
    assert machine is not None  # noqa: S101
    run = row.run
    data = row.mesh.get("dp_replicate", 1) * row.mesh.get("dp_shard", 1)
    # What data ranks do not share evenly is left out, as in the configuration.
    sequences = data * max(1, int(run.get("global_batch") or data * int(run.get("micro_batch") or 1)) // data)
    counts = [composed.parts] if composed.parts <= LINE_PARTS else [LINE_PARTS - 1, LINE_PARTS]
    lines = tuple(tuple(line_of(composed, found.line, count)) for count in counts)
    return Prepared(row, composed, found, lines, machine, sequences * int(run["seq_len"]))


def habits_of(composed: Composed) -> Habits:
    """What the run does beyond its configuration."""
    return Habits(
        composed.precision if composed.precision != "bfloat16" else None,
        is_linear=lambda module: module.startswith("layers."),
        flash_2=composed.flash_2,
        plain=composed.plain,
        payload=0.5 if composed.small_gathers else 1.0,
        tp_payload=0.5 if composed.small_tp_gathers else 1.0,
        cp_payload=composed.cp_payload,
        overlapped_tp=composed.overlapped_tp,
        rate=composed.rate,
    )


def step_seconds(prepared: Prepared, line: Sequence[Moment], constants: Constants) -> float:
    """The time of one line."""
    machine, mesh = prepared.machine, prepared.traced.mesh
    return predict_on(
        machine, line, mesh, prepared.tokens, constants=constants, habits=habits_of(prepared.composed)
    ).seconds


def predict_row(prepared: Prepared, constants: Constants = FITTED) -> Prediction:
    """The prediction of one row."""
    composed, mesh = prepared.composed, prepared.traced.mesh
    time = _time(prepared, constants)
    seconds = time.seconds
    if composed.parts > LINE_PARTS:  # what is beyond the lines takes what the last part takes
        seconds += (composed.parts - LINE_PARTS) * (
            seconds - step_seconds(prepared, prepared.lines[0], constants)
        )
    published = prepared.row.tokens_per_second
    assert published is not None  # noqa: S101
    predicted = prepared.tokens / mesh.world_size / seconds
    return Prediction(
        prepared,
        time,
        published,
        predicted,
        prepared.row.peak_memory,
        in_use(prepared) / 2**30,
    )


def in_use(prepared: Prepared) -> int:
    """The bytes in use at the peak."""
    traced, composed = prepared.traced, prepared.composed
    return composed.kept_outputs + max(traced.peak, traced.loss_peak + composed.loss_bytes)


def _time(prepared: Prepared, constants: Constants) -> StepTime:
    machine, mesh, habits = prepared.machine, prepared.traced.mesh, habits_of(prepared.composed)
    if prepared.traced.pipeline is not None:
        lines = prepared.traced.pipeline
        return predict_pipeline(machine, lines, mesh, prepared.tokens, constants=constants, habits=habits)
    return predict_on(machine, prepared.lines[-1], mesh, prepared.tokens, constants=constants, habits=habits)
