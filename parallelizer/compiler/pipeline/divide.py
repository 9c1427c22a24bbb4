"""The pass that cuts a model into stages: where the cuts are, what runs on each stage, and which tensors cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.observe.equal_layers import longest_run
from parallelizer.compiler.pipeline.layer_costs import layer_costs
from parallelizer.compiler.pipeline.needs import needs_of_stages
from parallelizer.compiler.pipeline.refusals import refusals, refusals_of_stages
from parallelizer.compiler.pipeline.survey import NotFollowed, Survey, survey
from parallelizer.compiler.pipeline.unit_calls import UnitCall
from parallelizer.diagnostics.diagnostic import Span, has_errors
from parallelizer.language.pipeline.balance import balanced_by_stage, sizes_mistake
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.pipeline.stages import Stage, Stages, UnitOutput
from parallelizer.styles.tied_parameters import parameter_names, tied_names


def divide(state: Compilation) -> None:
    """Cut the model into stages, if the mesh has several ranks on `pp`."""
    ranks = state.mesh.sizes["pp"]
    if ranks == 1 or has_errors(state.diagnostics):
        return
    pipeline = (state.pipeline or Pipeline()).settled(ranks)
    found = _surveyed(state)
    if found is None:
        return
    wanted = ranks * (pipeline.stages_per_rank or 1)
    if len(found.candidates) < wanted:
        state.find(
            "too-few-stages",
            f"the rules of `stage` match {len(found.candidates)} modules, too few for {wanted} stages "
            f"(pp={ranks}, {pipeline.stages_per_rank} on each rank)",
            _place(state),
            f"use a model with {wanted} such modules, let `stage` match {wanted} modules or more, or set a smaller pp"
            + ("" if pipeline.stages_per_rank == 1 else ", or another schedule, with one stage on each rank"),
        )
        return
    sizes = _layers_of_stages(state, pipeline, found, wanted)
    if sizes is None:
        return
    of_place = _stage_by_place(sizes)
    place = _place(state)
    reasons = list(refusals(state, pipeline, found, of_place, place))
    if not has_errors(reasons):
        stages = _stages(state, pipeline, found, sizes, of_place)
        reasons += refusals_of_stages(state, found, stages, place)
    state.diagnostics += reasons
    if not has_errors(reasons):
        state.stages = stages


def _surveyed(state: Compilation) -> Survey | None:
    """What was seen of the model's forward; None behind a finding."""
    matched = [path for path, slots in state.winners.items() if ("stage", None) in slots]
    place = state.mesh.spans.get("pp")
    if not matched:
        run = longest_run((), state.model, least=2)
        layers = f"{run.container}.*".lstrip(".") if run else "layers.*"
        state.find(
            "no-stages",
            f"the mesh has pp={state.mesh.sizes['pp']}, but no rule says where the model may be cut into stages",
            place,
            f"add a rule with `stage` to the plan, such as `{layers}: stage`: the model may be cut before each module that it "
            "matches",
        )
        return None
    if state.workload is None:
        state.find(
            "no-stages",
            "a forward must be followed to find the tensors that cross between stages, but there is no workload",
            place,
            "pass `workload=parallelizer.Workload(entries, batch_size, seq_len)`, which describes a batch",
        )
        return None
    found = survey(state.model, matched, state.workload)
    if isinstance(found, NotFollowed):
        state.find(
            "no-stages",
            "the model's forward does not run on the meta device, so the tensors that cross between stages are unknown: "
            f"{found.reason}",
            found.span or _place(state),
            "change the forward so that it does not read values of tensors, or set pp to 1",
        )
        return None
    return found


def _place(state: Compilation) -> Span | None:
    """The place of the first rule with `stage`."""
    return next(
        (slots["stage", None][0].span for slots in state.winners.values() if ("stage", None) in slots), None
    )


def _layers_of_stages(
    state: Compilation, pipeline: Pipeline, found: Survey, wanted: int
) -> tuple[int, ...] | None:
    """How many of the candidates each stage has; None behind a finding."""
    if isinstance(pipeline.balance, str):
        costs = layer_costs(state, pipeline, pipeline.balance, found, wanted)
        return balanced_by_stage([one.each for one in costs], costs[0].head, costs[-1].tail)
    mistake = sizes_mistake(pipeline.balance, len(found.candidates), wanted)
    if mistake is None:
        return pipeline.balance
    place = pipeline.spans.get("balance") or _place(state)
    state.find(
        "pipeline-balance", mistake, place, f"write {wanted} numbers that add up to {len(found.candidates)}"
    )
    return None


def _stage_by_place(sizes: Sequence[int]) -> tuple[int, ...]:
    """The stage of each place: place 0 lies before the first candidate, place n behind the n-th has begun."""
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    return (0, *stages)


def _stages(
    state: Compilation, pipeline: Pipeline, found: Survey, sizes: Sequence[int], of_place: Sequence[int]
) -> Stages:
    free = {one.unit for one in found.calls if one.free}
    by_value = {(one.unit, one.index): one for one in found.calls}
    needs = needs_of_stages(found, of_place)
    born = {
        value: of_place[by_value[value.unit, value.call].place]
        for each in needs
        for value in each
        if isinstance(value, UnitOutput) and not by_value[value.unit, value.call].free
    }
    crossing = [
        tuple(
            sorted(v for v, at in born.items() if at <= cut and any(v in each for each in needs[cut + 1 :]))
        )
        for cut in range(len(sizes) - 1)
    ]
    own = [
        [one for one in found.calls if not one.free and of_place[one.place] == stage]
        for stage in range(len(sizes))
    ]
    stages = tuple(
        Stage(
            units=frozenset(one.unit for one in own[stage]),
            recomputed=frozenset(n.unit for n in each if isinstance(n, UnitOutput) and n.unit in free),
            parameters=frozenset(n for n in each if isinstance(n, str)),
            receives=crossing[stage - 1] if stage else (),
            sends=crossing[stage] if stage < len(crossing) else (),
            last=(own[stage][-1].unit, own[stage][-1].index) if stage < len(crossing) else None,
            elsewhere=_elsewhere(found, own[stage], of_place, stage),
        )
        for stage, each in enumerate(needs)
    )
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    cut = Stages(pipeline, stages, tuple(found.candidates[start] for start in starts), found.divided)
    return replace(
        cut,
        shared=shared_parameters(state, cut),
        parameters=sum(p.numel() for p in state.parameters.values()),
        rewritten=found.rewritten,
    )


def _elsewhere(
    found: Survey, own: Sequence[UnitCall], of_place: Sequence[int], stage: int
) -> frozenset[tuple[str, int]]:
    """The calls of a stage's units that other stages run."""
    units = {one.unit for one in own}
    return frozenset(
        (one.unit, one.index) for one in found.calls if one.unit in units and of_place[one.place] != stage
    )


def shared_parameters(state: Compilation, cut: Stages) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that several stages hold: tied ones, and those that the glue of several stages reads."""
    groups = []
    of_name = {name: set(cut.holding(name)) for name in parameter_names(state.model)}
    tied = {name: group for group in tied_names(state.model) for name in group}
    for name, on in of_name.items():
        group = tied.get(name, (name,))
        everywhere = set[int]().union(*(of_name[n] for n in group)) | on
        if group[0] == name and len(everywhere) > 1:
            groups.append(group)
    return tuple(groups)
