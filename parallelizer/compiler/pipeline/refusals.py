"""Reasons why a model cannot be cut at the chosen places, and warnings about cuts that change what it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from torch import nn

from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.pipeline.left_behind import How, LeftBehind
from parallelizer.compiler.pipeline.needs import needs_of_stages
from parallelizer.compiler.pipeline.survey import Survey
from parallelizer.compiler.pipeline.unit_calls import Draw
from parallelizer.diagnostics.diagnostic import Diagnostic, Related, Span
from parallelizer.language.fold import fold_paths
from parallelizer.language.pipeline.settings import Pipeline, stage_rank
from parallelizer.language.pipeline.stages import Stages
from parallelizer.language.plan import BATCH_AXES

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules that normalize by the mean and the variance of all rows that they are given."""


def refusals(
    state: Compilation, pipeline: Pipeline, found: Survey, of_place: Sequence[int], place: Span | None
) -> Iterator[Diagnostic]:
    """The findings about cuts. `of_place` has the stage of each place of the survey; `place` is the first rule of `stage`."""
    yield from _called_twice(state, pipeline, found, of_place, place)
    yield from _left_behind(found, of_place, place)
    yield from _read_outside(state, found, place)
    yield from _inside_regions(state, found)
    yield from _without_parameters(state, found, of_place, place)
    yield from _drawn_anew(found, of_place, place)
    if (pipeline.microbatches or 1) > 1:
        norms = _batch_norms(state)
        yield from _normalized_apart(state, norms, pipeline)
        yield from _updated_again(state, norms, found, pipeline)


def refusals_of_stages(
    state: Compilation, found: Survey, stages: Stages, place: Span | None
) -> Iterator[Diagnostic]:
    """The findings about what the stages hold and send."""
    yield from _held_twice(state, stages, place)
    yield from _varying(found, stages, place)


def _called_twice(
    state: Compilation, pipeline: Pipeline, found: Survey, of_place: Sequence[int], place: Span | None
) -> Iterator[Diagnostic]:
    """Modules with parameters that two stages of one rank call, which has one copy of each, and modules that several stages
    call and that write to a buffer, of which each stage would have its own.
    """
    placed = stage_rank(pipeline, state.mesh.sizes["pp"])
    on: dict[str, list[int]] = {}
    lines: dict[tuple[str, int], Span | None] = {}
    for one in found.calls:
        stage = of_place[one.place]
        if not one.free and stage not in on.setdefault(one.unit, []):
            on[one.unit].append(stage)
            lines[one.unit, stage] = one.span
    for unit, stages in on.items():
        parameters = any(True for _ in state.modules[unit].parameters())
        alike = _on_one_rank(stages, placed) if parameters else None
        updated = next((n for n in found.updated if n.startswith(f"{unit}.")), None)
        first, second = alike or (stages[0], stages[-1])
        if alike is not None:
            message = f"{unit} is called on stages {first} and {second}, which are on one rank"
        elif updated is not None and len(stages) > 1:
            second = stages[1]
            message = f"{unit} is called on stages {first} and {second}, and its forward updates its buffer {updated}"
        else:
            continue
        span = lines[unit, second]
        yield Diagnostic(
            "stage-module-twice",
            message,
            span or place,
            "let `stage` match other modules, or set `balance` to a list of numbers of layers or another schedule, so that "
            "its calls are on one stage or on several ranks",
            related=_cut_here(span, place),
        )


def _cut_here(span: Span | None, place: Span | None) -> tuple[Related, ...]:
    """Where the plan cuts, for a finding that points at the model's code."""
    return (Related(place, "the model is cut here"),) if span is not None and place is not None else ()


def _on_one_rank(stages: Sequence[int], placed: Sequence[int]) -> tuple[int, int] | None:
    """The first two of the stages that are on the same rank. `placed` has the rank of each stage."""
    return next(((s, t) for s, t in combinations(stages, 2) if placed[s] == placed[t]), None)


def _held_twice(state: Compilation, cut: Stages, place: Span | None) -> Iterator[Diagnostic]:
    """Parameters that a rule shards and that the code of divided modules reads on two stages of one rank: it has one copy of
    each, and both stages would shard it.
    """
    placed = stage_rank(cut.pipeline, cut.ranks)
    fsdp = state.mesh.size(*BATCH_AXES) > 1 and any(
        ("fsdp", None) in slots for slots in state.winners.values()
    )
    for name in (name for group in cut.shared for name in group):
        path = name.rpartition(".")[0]
        split = state.mesh.sizes["tp"] > 1 and ("params", None) in state.winners.get(path, {})
        alike = _on_one_rank(cut.holding(name), placed)
        if path in cut.divided and alike and (fsdp or split):
            yield Diagnostic(
                "stage-module-twice",
                f"the forward of {path or 'the root'} reads {name} on stages {alike[0]} and {alike[1]}, which are on one rank, "
                "and a rule shards it",
                place,
                "set `balance` to a list of numbers of layers or another schedule, so that it is read on one stage or on "
                "several ranks",
            )


_LEFT: Mapping[How, str] = {
    "made": "makes a tensor that it does not return",
    "kept": "keeps a tensor that it returns, as an attribute or in a list",
    "wrote": "writes into a tensor that it was given",
}


def _left_behind(found: Survey, of_place: Sequence[int], place: Span | None) -> Iterator[Diagnostic]:
    """Tensors that a stage would lack, because a unit of another stage hands them on otherwise than by what it returns."""
    by_line: dict[tuple[Span | None, How], list[LeftBehind]] = {}
    for one in found.left_behind:
        if of_place[one.place] != of_place[one.read_place]:
            by_line.setdefault((one.span, one.how), []).append(one)
    for (span, how), every in by_line.items():
        units, first = _listed(dict.fromkeys(one.unit for one in every)), every[0]
        reader = first.reader or "the code between the modules"
        yield Diagnostic(
            "value-left-behind",
            f"{units} {_LEFT[how]}, and {reader} reads it on another stage ({of_place[first.read_place]}, not "
            f"{of_place[first.place]}), where it does not exist",
            span or place,
            f"read what {units} returned in the code that called it: that is sent to the stages that need it"
            if how == "kept"
            else f"let {units} return the tensor: what a module returns is sent to the stages that need it",
            related=_cut_here(span, place),
        )


def _varying(found: Survey, cut: Stages, place: Span | None) -> Iterator[Diagnostic]:
    """A tensor that is sent and whose shape depends on values: a stage learns the shapes of what it receives once."""
    sent = sorted({output for stage in cut.stages for output in stage.sends} & found.varying)
    if sent:
        calls = {(one.unit, one.index): one.span for one in found.calls}
        span = calls.get((sent[0].unit, sent[0].call))
        yield Diagnostic(
            "no-stages",
            f"a cut would send the output of {sent[0]}, whose shape depends on values of tensors and so differs between "
            "microbatches",
            span or place,
            f"let `stage` match modules that contain both {sent[0].unit} and the code that selects its rows, or set pp to 1",
            related=_cut_here(span, place),
        )


def _read_outside(state: Compilation, found: Survey, place: Span | None) -> Iterator[Diagnostic]:
    """Parameters that code of a divided module reads, and that a rule splits over tp for a module that is called."""
    if state.mesh.sizes["tp"] == 1:
        return
    for unit, name in found.strays:
        slots = {slot for path in (unit, name.rpartition(".")[0]) for slot, _ in state.winners.get(path, {})}
        if slots & {"params", "io"}:
            yield Diagnostic(
                "stage-module-twice",
                f"the parameter {name}, which a rule splits over tp, is also read outside {unit}, in the forward of a module "
                "that is cut",
                place,
                f"call {unit} there, or move the code into a module of its own",
            )


def _inside_regions(state: Compilation, found: Survey) -> Iterator[Diagnostic]:
    for path in sorted(found.divided):
        for slot, what in (("checkpoint", "checkpointed"), ("compile", "compiled")):
            used = state.winners.get(path, {}).get((slot, None))
            if used is not None:
                yield Diagnostic(
                    "cut-inside-region",
                    f"{path or 'the root'} is {what} as one region, but it is cut into stages",
                    used[1].span,
                    f"use `{used[1].style}` on modules that are not cut, such as {found.candidates[0]}",
                )


def _without_parameters(
    state: Compilation, found: Survey, of_place: Sequence[int], place: Span | None
) -> Iterator[Diagnostic]:
    having = {
        of_place[one.place] for one in found.calls if any(True for _ in state.modules[one.unit].parameters())
    }
    for stage in range(of_place[-1] + 1):
        if stage not in having:
            yield Diagnostic(
                "stage-without-parameters",
                f"stage {stage} has no parameters",
                place,
                "let `stage` match modules with parameters",
            )


def _drawn_anew(found: Survey, of_place: Sequence[int], place: Span | None) -> Iterator[Diagnostic]:
    """Random numbers that code between the modules draws, and that modules of several stages use."""
    by_stages: dict[tuple[int, ...], list[Draw]] = {}
    needs = needs_of_stages(found, of_place)
    for draw in {n for each in needs for n in each if isinstance(n, Draw)}:
        stages = tuple(at for at, each in enumerate(needs) if draw in each)
        by_stages.setdefault(stages, []).append(draw)
    for stages, draws in sorted(by_stages.items()):
        if len(stages) > 1:
            operators = ", ".join(dict.fromkeys(d.operator for d in sorted(draws, key=lambda d: d.number)))
            yield Diagnostic(
                "random-on-several-stages",
                f"each of the stages {', '.join(map(str, stages))} draws its own random numbers ({operators}) for a value "
                "that all of them use",
                place,
                "draw them in a module that takes the value, such as nn.Dropout: what it returns is sent to later stages",
                "warning",
            )


def _batch_norms(state: Compilation) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in state.modules.items()
        if isinstance(module, BATCH_NORMS) and (module.training or not module.track_running_stats)
    }


def _normalized_apart(
    state: Compilation, norms: dict[str, nn.Module], pipeline: Pipeline
) -> Iterator[Diagnostic]:
    if norms:
        kinds = ", ".join(sorted({type(norm).__name__ for norm in norms.values()}))
        yield Diagnostic(
            "microbatch-statistics",
            f"{_listed(norms)} ({kinds}) would normalize each of the {pipeline.microbatches} microbatches by statistics "
            "of its own",
            None,
            "use a norm without statistics over rows, such as GroupNorm or LayerNorm, or freeze the module with .eval()",
            related=_set_here(state, pipeline),
        )


def _updated_again(
    state: Compilation, norms: dict[str, nn.Module], found: Survey, pipeline: Pipeline
) -> Iterator[Diagnostic]:
    """Other buffers that a forward writes to: each microbatch does so, and each stage where the module is cut."""
    names = [name for name in found.updated if name.rpartition(".")[0] not in norms]
    cut = [name for name in names if name.rpartition(".")[0] in found.divided]
    if cut:
        yield Diagnostic(
            "microbatch-statistics",
            f"the forward updates {_listed(cut)} in a module that is cut: each stage would update a copy of its own",
            None,
            "keep the buffer, and the code that updates it, in a module of its own, which is on one stage",
            related=_set_here(state, pipeline),
        )
    inside = [name for name in names if name not in cut]
    if inside:
        yield Diagnostic(
            "microbatch-statistics",
            f"the forward updates {_listed(inside)}: in each step {pipeline.microbatches} times, once for each microbatch",
            None,
            "let the training loop update it after the step, or check that the model does not depend on the rows of one "
            "forward",
            "warning",
            related=_set_here(state, pipeline),
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(fold_paths(list(names))[:3]) or "the root"


def _set_here(state: Compilation, pipeline: Pipeline) -> tuple[Related, ...]:
    """The place where the microbatches are set, or else the axis."""
    span = pipeline.spans.get("microbatches")
    if span is not None and state.pipeline is not None and state.pipeline.microbatches is not None:
        return (Related(span, f"{pipeline.microbatches} microbatches are set here"),)
    span = state.mesh.spans.get("pp")
    return (Related(span, f"pp={state.mesh.sizes['pp']} is set here"),) if span is not None else ()
