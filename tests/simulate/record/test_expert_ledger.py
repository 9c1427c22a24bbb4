"""The ledger of a real step of a mixture is the dry run's, when the routing that ran is given to it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from parallelizer.child.children import in_children
from parallelizer.configuration.setup import Setup
from parallelizer.language.routing import BALANCED, Routing
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.memory import usage
from parallelizer.simulate.record.trace import Recording, record
from parallelizer.styles.experts import dispatch
from tests.chosen import chosen
from tests.simulate.allocator import measured_peaks, predicted_peaks
from tests.simulate.real_ledger import real_steps
from tests.simulate.setups import EXPERTS_IN_FLOAT8, MIXTURES, setup_of, traced

pytest.importorskip("transformers", reason="the optional extra `hf`")
pytestmark = pytest.mark.ranks

MESHES = {
    2: (("dp_shard=2", "ep=2"), ("cp=2", "ep=2"), ("tp=2", "ep=2")),
    4: (("dp_shard=4", "ep=4"), ("dp_shard=4", "ep=2"), ("dp_replicate=2", "dp_shard=2", "ep=2"), ("dp_shard=2", "tp=2", "ep=4")),
}  # fmt: skip
RECOMPUTED = 'rules=["model.layers.*: checkpoint"]'
KEPT = 'rules=["model.layers.*: {style: checkpoint, mode: selective}"]'


def cases(ranks: int) -> list[Setup]:
    """Both models on all meshes of so many ranks, and one of them with checkpointed layers."""
    every = [(model, mesh, ()) for model in MIXTURES for mesh in MESHES[ranks]]
    every.append(("hf_qwen3_moe", MESHES[ranks][0], (RECOMPUTED,)))
    return [
        setup_of(
            f"model={model}",
            *MIXTURES[model],
            "train.seq_len=16",
            *(f"parallel.mesh.{axis}" for axis in mesh),
            *more,
        )
        for model, mesh, more in every
    ]


def recorded(setup: Setup, routing: Routing, ranks: Sequence[int] = ()) -> list[Recording]:
    """The steps of these ranks, or of all, as the dry run knows them."""
    setup = dataclasses.replace(setup, routing=routing)
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    ranks = ranks or range(setup.mesh.world_size)
    return in_children([(record, program, model, recipe, rank) for rank in ranks])


def dry(setup: Setup, routing: Routing, ranks: Sequence[int] = ()) -> list[tuple[Collective, ...]]:
    """Their ledgers."""
    return [one.ledger for one in recorded(setup, routing, ranks)]


@dataclasses.dataclass(frozen=True)
class StepOfRanks:
    """What ranks sent and which tokens experts had in a step, and the same step of every rank as the dry run knows it."""

    setup: Setup
    real: list[tuple[Collective, ...]]
    routing: Routing
    planned: list[Recording]


def both(setups: Sequence[Setup], folder: Path) -> list[StepOfRanks]:
    """A step of each setup; all of them in one start of ranks."""
    real = zip(setups, real_steps(setups, folder), strict=True)
    return [StepOfRanks(setup, *step, recorded(setup, step[1])) for setup, step in real]


@pytest.fixture(scope="module", params=MESHES)
def every_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[StepOfRanks]:
    return both(cases(request.param), tmp_path_factory.mktemp("steps"))


def check(steps: Sequence[StepOfRanks]) -> None:
    for one in steps:
        assert len({str(calls) for calls in one.routing.counted.values()}) > 1  # no two layers are alike
        for rank, (planned, ran) in enumerate(zip(one.planned, one.real, strict=True)):
            pairs = enumerate(zip_longest(planned.ledger, ran))
            assert [(at, *pair) for at, pair in pairs if pair[0] != pair[1]] == [], (
                str(one.setup.mesh),
                rank,
            )


def test_the_entries_of_a_step_are_those_that_were_sent(tmp_path: Path) -> None:
    check(both(cases(2)[:1], tmp_path))


def measured(one: StepOfRanks, ranks: Sequence[int]) -> list[dict[str, int]]:
    """The highest points of a step with these tokens, as the allocator hands out to ranks without peers: gloo frees on threads
    of its own, which torch's profiler does not see.
    """
    setup = dataclasses.replace(one.setup, routing=one.routing)
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    return in_children([(measured_peaks, program, model, recipe, rank) for rank in ranks])


@pytest.mark.slow
def test_the_memory_of_every_case_is_what_its_tokens_take(every_case: list[StepOfRanks]) -> None:
    peaks = set()
    for one in every_case:
        ranks = (0, one.setup.mesh.world_size - 1)
        for rank, found in zip(ranks, measured(one, ranks), strict=True):
            planned = one.planned[rank]
            predicted = predicted_peaks(usage(planned.before, planned.changes))
            assert predicted["peak"] == found["peak"], (str(one.setup.mesh), rank)
            peaks.add(predicted["peak"])
    assert len(peaks) > len(every_case)  # other tokens take other memory


@pytest.mark.slow
def test_the_entries_of_every_case_are_those_that_were_sent(every_case: list[StepOfRanks]) -> None:
    assert sum(len(cases(ranks)) for ranks in MESHES) == 16
    check(every_case)


@pytest.mark.slow
def test_the_entries_of_kept_results_are_those_that_were_sent(tmp_path: Path) -> None:
    check(both([_mixture(KEPT)], tmp_path))


@pytest.mark.parametrize(("rule", "times"), [((), 6), ((KEPT,), 6), ((RECOMPUTED,), 14)])
def test_a_selective_checkpoint_sends_no_row_twice(rule: tuple[str, ...], times: int) -> None:
    """Of two layers: the last one's rows, weights and results, and the first one's; a full checkpoint repeats four of each."""
    [ledger] = dry(_mixture(*rule), BALANCED, ranks=[0])
    assert sum(one.phase == "backward" and one.kind == "all_to_all" for one in ledger) == times


def gathered_between(ledger: Sequence[Collective]) -> list[Collective]:
    """What FSDP sends between the first and the last all-to-all of a module in a forward or a backward: ranks that reach these
    at other times than each other would wait for ever.
    """
    found, spans = [], dict[tuple[str, str], list[int]]()
    for at, one in enumerate(ledger):
        if one.kind == "all_to_all":
            spans.setdefault((one.phase, one.module), []).append(at)
    for places in spans.values():
        within = ledger[places[0] : places[-1]]
        found += [
            one
            for one in within
            if one.kind != "all_to_all" and {"dp_shard", "efsdp"} & {*one.axis.split("+")}
        ]
    return found


@pytest.mark.parametrize(
    "mesh",
    [("dp_shard=4", "ep=2"), pytest.param(("dp_shard=4", "tp=2", "ep=4"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_fsdp_gathers_experts_before_tokens_travel(
    mesh: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(
        "model=hf_qwen3_moe",
        *MIXTURES["hf_qwen3_moe"],
        "train.seq_len=16",
        *(f"parallel.mesh.{axis}" for axis in mesh),
    )
    [ledger] = dry(setup, BALANCED, ranks=[0])
    assert {one.axis for one in ledger if one.phase == "backward"} >= {"efsdp", "ep"}
    assert gathered_between(ledger) == []
    # As if the experts' own unit were gathered where they compute.
    right = dispatch.share_out

    def gathered_late(module: nn.Module, *args: Any, **options: Any) -> None:
        inner = module.forward

        def late(*given: Any, **named: Any) -> Any:
            module.reshard()  # type: ignore[operator]
            module.unshard()  # type: ignore[operator]
            return inner(*given, **named)

        late.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
        module.forward = late  # type: ignore[method-assign]
        right(module, *args, **options)

    monkeypatch.setattr(dispatch, "share_out", gathered_late)
    [planted] = dry(setup, BALANCED, ranks=[0])
    assert gathered_between(planted)


def _mixture(*more: str) -> Setup:
    model = "hf_qwen3_moe"
    mesh = (f"parallel.mesh.{axis}" for axis in MESHES[2][0])
    return setup_of(f"model={model}", *MIXTURES[model], "train.seq_len=16", *mesh, *more)


def test_another_routing_sends_other_bytes(tmp_path: Path) -> None:
    (setup,) = cases(2)[:1]
    [(_, routing)] = real_steps([setup], tmp_path)
    moved = {
        path: [[[*row[1:], row[0]] for row in table] for table in calls]
        for path, calls in routing.counted.items()
    }
    assert dry(setup, Routing(counted=moved)) != dry(setup, routing)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[2][::2])
def test_the_entries_of_gathered_tokens_are_those_that_were_sent(
    mesh: tuple[str, ...], tmp_path: Path
) -> None:
    rule = 'rules=["model.layers.*.mlp.experts: {style: experts, dispatch: all-gather}"]'
    axes = (f"parallel.mesh.{axis}" for axis in mesh)
    model = "hf_qwen3_moe"
    check(both([setup_of(f"model={model}", *MIXTURES[model], "train.seq_len=16", *axes, rule)], tmp_path))


def in_float8(recipe: str, *axes: str) -> Setup:
    model = "hf_qwen3_moe"
    sizes = (f"parallel.mesh.{axis}" for axis in axes)
    rule = EXPERTS_IN_FLOAT8.format(recipe)
    return setup_of(f"model={model}", *MIXTURES[model], "train.seq_len=16", *sizes, rule)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("tp=2",), ("dp_shard=2", "ep=2"), ("tp=2", "ep=2")])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise-gw-hp"])
def test_the_entries_of_experts_in_float8_are_those_that_were_sent(
    recipe: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    setup = in_float8(recipe, *axes)
    [(real, routing)] = real_steps([setup], tmp_path)
    assert dry(setup, routing) == real
    assert any(e.module.endswith("experts") and e.kind == "all_reduce" for e in real[0]) == (
        "ep=2" not in axes
    )


@pytest.mark.parametrize("recipe", chosen(["rowwise", "rowwise-gw-hp"], ["rowwise-gw-hp"]))
def test_ranks_of_tp_agree_on_the_largest_values_of_rows(recipe: str) -> None:
    """Forward for the way down, whose inputs are split; backward for the way up, whose outputs are."""
    pytest.importorskip("torchao", reason="float8 needs torchao")
    rows, experts, width = 8 * 16 * 2, 8, 64  # each token has two experts
    ledger = traced(in_float8(recipe, "tp=2")).ledger
    found = [(e.phase, e.payload_bytes, e.largest) for e in ledger if e.module.endswith("0.mlp.experts")]
    columns = width if recipe == "rowwise" else 1
    back = [("backward", 4 * (rows + experts * columns), True)]
    # One scale for an expert: the way down has its weights on both ranks too.
    more = [("backward", 4 * experts, True)] if recipe == "rowwise-gw-hp" else []
    assert found == [("forward", 4 * (rows + experts * width), True), *more, *back]
