"""The preset of a candidate: composed as any other, it is the candidate."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.compiler.observe.equal_layers import Run
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import REPLICATE
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.preset import differing, preset_text
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.setups import setup_of
from parallelizer.propose.search.space import CandidateCount, candidates
from parallelizer.propose.search.task import SearchTask, read_task
from tests.chosen import chosen
from tests.propose.search.tasks import LLAMA

RUN = Run("layers", 0, 4)
BLOCKS = "layers.*"
CANDIDATES = (
    Candidate(dp_shard=4, rows=2, accumulate=2),
    Candidate(dp_replicate=2, dp_shard=2, reshard_after_forward=False, checkpoint="selective"),
    Candidate(dp_shard=2, tp=2, checkpoint="full", share=0.5, stream="whole"),
    Candidate(cp=2, tp=2, method="ring"),
    Candidate(dp_shard=4, ep=2),
    Candidate(pp=2, tp=2, rows=2, microbatches=4, schedule="zbv", stages_per_rank=2, layers=(1, 1, 1, 1)),
)


def _same(one: Setup, other: Setup) -> None:
    assert one.mesh == other.mesh
    assert one.workload == other.workload
    assert one.pipeline == other.pipeline
    assert one.plan.layouts == other.plan.layouts
    assert [
        (r.key, [(u.style, {n: o.value for n, o in u.options.items()}) for u in r.uses])
        for r in one.plan.rules
    ] == [
        (r.key, [(u.style, {n: o.value for n, o in u.options.items()}) for u in r.uses])
        for r in other.plan.rules
    ]
    values = [
        {style: {name: o.value for name, o in d.options.items()} for style, d in setup.defaults.items()}
        for setup in (one, other)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.words())
def test_a_composed_preset_is_the_candidate_that_was_priced(candidate: Candidate) -> None:
    task = read_task([*LLAMA, "gpus=4"])
    text = preset_text(candidate, task.given, task.base.plan, BLOCKS, RUN, ["a reason: with a colon"])
    _same(task.setup_of(text, candidate), setup_of(task.base, candidate, BLOCKS, RUN))


def test_keys_of_a_preset_on_the_command_line_are_in_every_preset() -> None:
    given = ["parallel.styles.fsdp.reduce_dtype=bfloat16", 'parallel.rules=["norm: none"]']
    task = read_task([*LLAMA, "gpus=4", *given])
    candidate = Candidate(dp_shard=4, reshard_after_forward=False, checkpoint="full")
    text = preset_text(candidate, task.given, task.base.plan, BLOCKS, RUN)
    setup = task.setup_of(text, candidate)
    assert setup.defaults["fsdp"].options["reduce_dtype"].value == "bfloat16"
    assert setup.defaults["fsdp"].options["reshard_after_forward"].value is False
    assert [rule.key for rule in setup.plan.rules[-2:]] == ["norm", "layers.*"]
    _same(setup, setup_of(task.base, candidate, BLOCKS, RUN))


def test_a_balance_on_the_command_line_stays_and_a_word_is_refused() -> None:
    task = read_task([*LLAMA, "gpus=2", "parallel.pipeline.balance=[1,3]"])
    search = Search(task.base, lambda _: None)
    found = list(candidates(search.facts(task), task.within, CandidateCount()))
    assert found and {one.layers for one in found} == {(1, 3)}
    text = search.preset(task, found[0])
    assert task.setup_of(text, found[0]).pipeline.balance == (1, 3)  # type: ignore[union-attr]
    with pytest.raises(PlanError) as raised:
        read_task([*LLAMA, "gpus=2", "parallel.pipeline.balance=time"])
    assert raised.value.diagnostics[0].code == "search-preset"


def test_a_whole_stream_replaces_the_layout_of_the_plan() -> None:
    task = read_task([*LLAMA, "gpus=4"])
    candidate = Candidate(tp=4, stream="whole")
    setup = task.setup_of(preset_text(candidate, task.given, task.base.plan, BLOCKS, RUN), candidate)
    assert setup.plan.layouts["stream"] == REPLICATE


def test_a_glob_that_begins_with_a_star_is_quoted() -> None:
    task = read_task(["model=encoder_decoder_tiny", "hardware=h100", "gpus=2"])
    candidate = Candidate(dp_shard=2, checkpoint="full")
    glob = "*coder.blocks.*"
    setup = task.setup_of(preset_text(candidate, task.given, task.base.plan, glob, None), candidate)
    assert setup.plan.rules[-1].key == glob
    _same(setup, setup_of(task.base, candidate, glob, None))


def test_differing_keeps_what_is_new_or_another_value() -> None:
    base = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
    assert differing({"a": 1, "b": {"c": 2, "d": 4}, "e": [1], "f": None}, base) == {"b": {"d": 4}, "f": None}


FLOAT8 = "layers.*.feed_forward.w[123]"


def _plan(folder: Path) -> str:
    """A plan with linears in float8."""
    file = folder / "mine.yaml"
    file.write_text(
        f"version: 1\nextends: llama\nrules: {{'{FLOAT8}': {{style: float8, recipe: rowwise}}}}\n"
    )
    return f"plan={file}"


@pytest.mark.parametrize(
    "precision", chosen(["", "none", "tensorwise", "rowwise-gw-hp"], ["none", "tensorwise"])
)
def test_a_preset_gives_the_linears_in_float8_the_precision_of_its_candidate(
    precision: str, tmp_path: Path
) -> None:
    task = read_task([*LLAMA, "gpus=4", _plan(tmp_path)])
    candidate = Candidate(dp_shard=2, tp=2, checkpoint="full", precision=precision)
    text = preset_text(candidate, task.given, task.base.plan, BLOCKS, RUN)
    setup = task.setup_of(text, candidate)
    _same(setup, setup_of(task.base, candidate, BLOCKS, RUN))
    model = setup.build_model()
    recipes = {a.module: a.options["recipe"] for a in setup.compile(model).of_slot("precision")}
    wanted = {"": "rowwise", "none": None}.get(precision, precision)
    linears = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ("w1", "w2", "w3")]
    assert recipes == ({} if wanted is None else dict.fromkeys(linears, wanted))


def test_precision_is_searched_for_where_a_rule_of_the_plan_has_float8(tmp_path: Path) -> None:
    def task(*given: str) -> SearchTask:
        return read_task([*LLAMA, "gpus=4", *given], within=["precision=none,rowwise", "mesh.tp=1"])

    def found(one: SearchTask) -> set[str]:
        facts = Search(one.base, lambda _: None).facts(one)
        return {c.precision for c in candidates(facts, one.within, CandidateCount())}

    assert found(task(_plan(tmp_path))) == {"none", "rowwise"}
    for given, message in [((), "no rule of the plan"), ((f'rules=["{FLOAT8}: float8"]',), "wins over it")]:
        with pytest.raises(PlanError) as caught:
            task(*given)
        [error] = caught.value.diagnostics
        assert error.code == "search-within" and message in error.message
