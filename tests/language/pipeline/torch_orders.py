"""The orders of PyTorch's own pipeline schedules, which the tests compare with.

PyTorch makes them from stages without modules, ranks or tensors.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from parallelizer.language.pipeline.actions import Order, parse_actions

SCHEDULE_CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


class BareStage:
    """What a schedule of PyTorch asks of a stage when it makes its order."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = None
        self.is_first, self.is_last = index == 0, index == stages - 1


def torch_schedule(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Any:
    """PyTorch's schedule object. Raises PyTorch's errors for numbers that it refuses."""
    made = SCHEDULE_CLASSES[name]
    stages = [BareStage(index * ranks, stages_per_rank * ranks, ranks) for index in range(stages_per_rank)]
    single = issubclass(made, torch_schedules.PipelineScheduleSingle)
    return made(stages[0] if single else stages, microbatches, loss_fn=lambda *_: None)


def torch_order(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """PyTorch's order, without waits; of overlapped pairs, one after the other."""
    schedule = torch_schedule(name, ranks, stages_per_rank, microbatches)
    rows = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    cells = [["" if action is None else str(action) for action in rows[rank]] for rank in sorted(rows)]
    return tuple(tuple(a for cell in row for a in parse_actions(cell)) for row in cells)
