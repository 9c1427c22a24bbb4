"""The stages of a pipeline in an exported file: how the model is cut, as constants, and torch's schedule over the stages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from parallelizer.compiler.observe.module_calls import Calls
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.pipeline.settings import stage_rank
from parallelizer.language.pipeline.stages import Stage, Stages, UnitOutput
from parallelizer.report.export.loops import Item, emit
from parallelizer.styles.application import Program
from parallelizer.styles.fsdp import left_whole
from parallelizer.styles.statements import WIDTH

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Torch's class of each schedule."""

ONE_STAGE = {"gpipe", "1f1b"}
"""Schedules whose class takes one stage, and not a list of them."""


def refuse_what_torch_cannot_run(program: Program, calls: Calls | None) -> None:
    """Raise PlanError for stages that an exported file could not run on `torch.distributed.pipelining`."""
    stages = program.stages
    if stages is None:
        return
    if reason := next(_reasons(program, stages, calls), None):
        raise PlanError(
            [
                Diagnostic(
                    "export-pipeline",
                    f"this pipeline cannot be exported: {reason}",
                    program.mesh.spans.get("pp"),
                    "export a preset with pp=1, or run this one with parallelizer",
                )
            ]
        )


def _reasons(program: Program, stages: Stages, calls: Calls | None) -> Iterator[str]:
    if stages.pipeline.order is not None:
        yield "torch reads an order from a file by a private class only"
    if program.mesh.sizes["cp"] > 1:
        yield "cp divides the sequence, and torch cuts a batch by its rows alone"
    for stage in stages.stages:
        for value in (*stage.receives, *stage.sends):
            if value.call:
                yield f"{value.unit} is called several times, and what its call {value.call + 1} returns crosses to another stage"
        if stage.elsewhere:
            yield f"{min(stage.elsewhere)[0]} runs on several stages"
    if stages.rewritten:
        yield f"the model writes in place to what {min(stages.rewritten).unit} returns"
    for unit in sorted({unit for stage in stages.stages[:-1] for unit in stage.units}):
        called = calls.by_module.get(unit) if calls is not None else None
        if called is None:
            yield f"{unit} is called in several ways, or could not be observed"
        elif called.outputs == -1:
            yield f"{unit} returns neither a tensor nor a tuple of tensors"
    crossing = {value.unit for stage in stages.stages for value in stage.sends}
    for application in program:
        if application.module in crossing and application.options.get("local") is False:
            yield f"what {application.module} returns stays a DTensor"
        if application.slot == "fsdp" and left_whole(application):
            yield f"the fsdp unit {application.module or 'of the root'} leaves parameters whole"


def constants(stages: Stages, calls: Calls | None) -> list[str]:
    """How the model is cut, and where each stage runs."""
    called = calls.by_module if calls is not None else {}
    units = sorted({unit for stage in stages.stages for unit in stage.units | stage.recomputed})
    tuples = [
        (u, one.outputs) for u in units if (one := called.get(u)) is not None and one.outputs is not None
    ]
    placed = stage_rank(stages.pipeline, stages.ranks)
    by_rank = [[s for s, rank in enumerate(placed) if rank == r] for r in range(stages.ranks)]
    lines = [
        "# Into how many parts the rows of a data rank are cut.",
        f"MICROBATCHES = {stages.pipeline.microbatches}",
        "",
        "# The modules that cuts divide: their own code runs on every stage.",
        f"DIVIDED = {_tuple(sorted(stages.divided))}",
        "",
        "# Modules that return a tuple, and its length.",
        f"TUPLES = {{{', '.join(f'{chr(34)}{u}{chr(34)}: {n}' for u, n in tuples)}}}",
        "",
        "# For each stage: the modules that run there, the parameters of divided modules that it reads, the tensors that it",
        "# receives and sends (by module, and place in its tuple), and the module behind which it ends.",
        "STAGES = (",
    ]
    for stage in stages.stages:
        lines += _stage(stage)
    lines += [
        ")",
        "",
        "# The stages of each rank of pp.",
        f"PLACED = ({', '.join(_numbers(each) for each in by_rank)},)",
        "",
    ]
    if stages.shared:
        lines += [
            "# Parameters of which several stages hold a copy: their names, and these stages.",
            "SHARED = (",
        ]
        lines += [f"    ({_tuple(names)}, {_numbers(stages.copies(names[0]))})," for names in stages.shared]
        lines += [")", ""]
    return lines


def _stage(stage: Stage) -> list[str]:
    parts = [
        _set(stage.units | stage.recomputed),
        _set(stage.parameters),
        _values(stage.receives),
        _values(stage.sends),
        f'"{stage.last[0]}"' if stage.last else "None",
    ]
    line = f"    ({', '.join(parts)}),"
    return [line] if len(line) <= WIDTH else ["    (", *(f"        {part}," for part in parts), "    ),"]


def _set(names: Collection[str]) -> str:
    """A set of paths; layers in a row as a range."""
    layers: dict[tuple[str, str], list[int]] = {}
    others = []
    for name in sorted(names):
        found = re.fullmatch(r"(.*?\.)?(\d+)((?:\.[^.\d][^.]*)*)", name)
        if found:
            layers.setdefault((found[1] or "", found[3]), []).append(int(found[2]))
        else:
            others.append(f'"{name}"')
    for (before, after), numbers in sorted(layers.items()):
        first, last = min(numbers), max(numbers)
        if len(numbers) > 2 and len(numbers) == last - first + 1:
            others.append(f'*(f"{before}{{i}}{after}" for i in range({first}, {last + 1}))')
        else:
            others += [f'"{before}{n}{after}"' for n in sorted(numbers)]
    return f"{{{', '.join(others)}}}" if others else "set()"


def _tuple(texts: Sequence[str]) -> str:
    listed = ", ".join(f'"{text}"' for text in texts)
    return f"({listed},)" if len(texts) == 1 else f"({listed})"


def _values(values: Sequence[UnitOutput]) -> str:
    listed = ", ".join(f'("{value.unit}", {value.leaf})' for value in values)
    return f"({listed},)" if len(values) == 1 else f"({listed})"


def _numbers(values: Sequence[int]) -> str:
    listed = ", ".join(map(str, values))
    return f"({listed},)" if len(values) == 1 else f"({listed})"


BUILD_STAGES = '''
def build_stages(model: nn.Module, mesh: DeviceMesh) -> list[PlainStage]:
    """This rank's stages of a model on the meta device; every rank calls it. Then give their parameters values.

    Names of parameters are those of the model, behind `model.`.
    """
    stages = []
    for index in PLACED[mesh.get_local_rank("pp")]:
        stage = PlainStage(parallelize(copy.deepcopy(model), mesh), DIVIDED, TUPLES, *STAGES[index])
        shard_stage(stage, mesh)
        stage.watch()
        stages.append(stage)
    return stages
'''

BUILD_SCHEDULE = '''
def build_schedule(
    stages: list[PlainStage], mesh: DeviceMesh, loss_fn: Callable[..., torch.Tensor], device: torch.device
) -> Schedule:
    """A step is `schedule.step(target=labels, **inputs)`, on every rank of pp with the same rows.

    Torch cuts each entry on its first dimension. `loss_fn(output, target)` is a microbatch's part of a sum: divide the sum
    of its tokens' losses by the tokens of the global batch.
    """
    numbers, group = PLACED[mesh.get_local_rank("pp")], mesh.get_group("pp")
    staged = [
        PipelineStage(stage, index, len(STAGES), device, group=group)
        for stage, index in zip(stages, numbers, strict=True)
    ]
    return Schedule(staged, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
'''


def functions(stages: Stages, units: Sequence[Item], fsdp: Sequence[str], model: nn.Module) -> list[str]:
    """`build_stages` and `build_schedule`; with FSDP `shard_stage` between them. `fsdp` are the lines that name its mesh, and
    `units` its calls: the one of the root is for the stage itself.
    """
    kind = stages.pipeline.schedule
    build_stages, shard = BUILD_STAGES, []
    if units:
        shard = ["", "def shard_stage(stage: PlainStage, mesh: DeviceMesh) -> None:"]
        shard += ['    """Shard a stage over the data ranks: the unit of the root is the stage."""', *fsdp]
        shard += ["    model = stage.model", *emit([u for u in units if u.path], model, inner_first=True)]
        for item in (u for u in units if not u.path):
            shard += [f"    # {item.rule}", *item.call.lines("    ", "stage")]
        shard += ["    sum_instead_of_average(stage)", ""]
    else:
        build_stages = build_stages.replace("        shard_stage(stage, mesh)\n", "")
    build_schedule = BUILD_SCHEDULE.replace("Schedule:", f"{SCHEDULES[kind]}:")
    first = "staged[0]" if kind in ONE_STAGE else "staged"
    build_schedule = build_schedule.replace("Schedule(staged,", f"{SCHEDULES[kind]}({first},")
    return [*build_stages.splitlines(), "", *shard, *build_schedule.splitlines(), ""]
