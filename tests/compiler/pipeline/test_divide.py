"""Where cuts fall, what each stage has and what crosses, and each refusal at its line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.pipeline.stages import Stages, UnitOutput
from parallelizer.language.workload import Entry, Workload
from tests.compiler.pipeline.models import VOCABULARY, Choosing, Counting, Fickle, Plain, Tangled, Two
from tests.findings import compiled, findings, marked, mesh_of

WORK = Workload({"input_ids": Entry(("batch", "sequence"), "int64", (0, VOCABULARY))}, 8, 6)
BLOCKS = 'rules: {"blocks.*": stage, "": fsdp}'
CODERS = 'rules: {"*coder.*": stage, "": fsdp}'


def divided(
    build: Callable[[], nn.Module],
    text: str = BLOCKS,
    schedule: str = "1f1b",
    pp: int = 2,
    **settings: object,
) -> Stages:
    pipeline = Pipeline(schedule, 2 * pp, **settings)  # type: ignore[arg-type]
    program = compiled(text, build, mesh_of(pp=pp), workload=WORK, pipeline=pipeline)
    assert program.stages is not None
    return program.stages


def refused(
    build: Callable[[], nn.Module], text: str = BLOCKS, schedule: str = "1f1b", **sizes: int
) -> Diagnostic:
    """The only error."""
    mesh = mesh_of(**{"pp": 2, **sizes})
    found = findings(text, build, mesh, workload=WORK, pipeline=Pipeline(schedule, 2 * mesh.sizes["pp"]))
    (error,) = (one for one in found if one.severity == "error")
    return error


def of(unit: str, call: int = 0) -> UnitOutput:
    return UnitOutput(unit, call, 0)


def test_layers_are_cut_evenly_and_the_ends_hold_what_is_around_them() -> None:
    cut = divided(Plain)
    assert cut.first == ("blocks.0", "blocks.2")
    assert [sorted(stage.units) for stage in cut.stages] == [
        ["blocks.0", "blocks.1", "words"],
        ["blocks.2", "blocks.3", "head"],
    ]
    first, last = cut.stages
    assert first.sends == last.receives == (of("blocks.1"),) and first.last == ("blocks.1", 0)
    assert not first.receives and not last.sends and last.last is None


@pytest.mark.parametrize(
    ("balance", "first"), [("layers", 2), ("parameters", 2), ("time", 2), ("memory", 2), ((1, 3), 1)]
)
def test_cuts_fall_where_the_balance_says(balance: object, first: int) -> None:
    assert divided(Plain, balance=balance).first[1] == f"blocks.{first}"


def test_a_heavy_head_moves_the_cut_to_later_layers() -> None:
    class HeavyHead(Plain):
        def __init__(self) -> None:
            super().__init__(4)
            self.head = nn.Linear(8, 64 * VOCABULARY)

    assert divided(HeavyHead, balance="parameters").first[1] == "blocks.3"
    assert divided(HeavyHead, balance="layers").first[1] == "blocks.2"


def sizes_of(cut: Stages) -> list[int]:
    return [sum(unit.startswith("blocks.") for unit in stage.units) for stage in cut.stages]


def test_the_balance_of_layers_counts_both_ends() -> None:
    """The embedding and the head as a layer each."""
    assert sizes_of(divided(lambda: Plain(10), pp=4, balance="layers")) == [2, 3, 3, 2]


def test_the_balance_of_memory_counts_the_microbatches_that_a_stage_holds() -> None:
    """1f1b holds four on the first stage and one on the last. Under gpipe all hold as many."""
    long = dataclasses.replace(WORK, batch_size=64, seq_len=64)

    def sizes(schedule: str, text: str = BLOCKS) -> list[int]:
        pipeline = Pipeline(schedule, 8, balance="memory")
        program = compiled(text, lambda: Plain(16), mesh_of(pp=4), workload=long, pipeline=pipeline)
        return sizes_of(program.require_stages())

    first, second, third, _ = sizes("1f1b")
    assert first <= second < third and first < sizes("gpipe")[0]
    # A checkpointed block keeps next to nothing, and has as many parameters as the others.
    _, second, third, _ = sizes("1f1b", 'rules: {"blocks.*": [stage, checkpoint], "": fsdp}')
    assert second == third


def test_a_value_that_is_needed_later_is_relayed() -> None:
    cut = divided(Tangled, pp=4)
    crossing = [stage.sends for stage in cut.stages]
    assert set(crossing[0]) == {of("blocks.0"), of("positions")}
    assert set(crossing[1]) == {of("blocks.0"), of("blocks.1"), of("positions")}
    assert set(crossing[2]) == {of("blocks.0"), of("blocks.2")}
    assert cut.rewritten == {of("blocks.1")}


def test_parameters_that_glue_reads_are_held_where_it_reads_them() -> None:
    cut = divided(Tangled, pp=4)
    assert [("scale" in stage.parameters) for stage in cut.stages] == [False, True, False, True]
    assert ("scale",) in cut.shared and ("words.weight",) in cut.shared
    assert "norm.weight" in cut.stages[3].parameters and "norm.weight" not in cut.stages[0].parameters


def test_a_module_that_several_stages_call_is_on_each_and_shared() -> None:
    cut = divided(Two, CODERS, pp=4)
    holding = [at for at, stage in enumerate(cut.stages) if "words" in stage.units]
    assert holding == [0, 1] and ("words.weight",) in cut.shared
    assert cut.stages[0].elsewhere == {("words", 1)} and cut.stages[1].elsewhere == {("words", 0)}
    assert of("words", 1) in cut.stages[1].sends
    # What the encoder returns goes on to the last block of the decoder.
    assert of("encoder.1") in cut.stages[2].sends


def test_without_a_rule_of_stage_there_are_no_stages() -> None:
    found = refused(Plain, 'rules: {"": fsdp}')
    assert found.code == "no-stages" and found.span is not None and found.span.file == "mesh"


def test_too_few_modules_to_cut_before() -> None:
    found = refused(Plain, pp=8)
    assert found.code == "too-few-stages" and marked(BLOCKS, found)


def test_a_course_that_depends_on_values() -> None:
    found = refused(Fickle)
    assert found.code == "no-stages" and "does not run on the meta device" in found.message


def test_a_shape_that_depends_on_values_crosses_no_cut() -> None:
    found = refused(Choosing)
    assert found.code == "no-stages" and "whose shape depends on values" in found.message
    assert found.span is not None and found.span.file.endswith("tests/compiler/pipeline/models.py")
    assert [marked(BLOCKS, other.span) for other in found.related]


def test_a_module_that_two_stages_of_one_rank_call() -> None:
    text = 'rules: {"{encoder.0,decoder.*}": stage, "": fsdp}'
    assert compiled(text, Two, mesh_of(pp=2), workload=WORK, pipeline=Pipeline("1f1b", 4)).stages is not None
    found = refused(_Ends, schedule="zbv")
    assert found.code == "stage-module-twice" and "which are on one rank" in found.message
    assert "words is called on stages 0 and 3" in found.message


class _Ends(Plain):
    """Its embedding is called at both ends."""

    def forward(self, input_ids):  # type: ignore[no-untyped-def]
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.words(input_ids + 1))


def test_a_module_of_several_stages_that_changes_its_buffer() -> None:
    found = refused(Counting, CODERS, schedule="interleaved-1f1b")
    assert found.code == "stage-module-twice" and "updates its buffer words.calls" in found.message


def test_a_sharded_parameter_that_glue_reads_on_two_stages_of_one_rank() -> None:
    found = findings(BLOCKS, Tangled, mesh_of(pp=2, dp_shard=2), workload=WORK, pipeline=Pipeline("zbv", 4))
    errors = [one for one in found if one.severity == "error"]
    assert {one.code for one in errors} == {"stage-module-twice"}
    assert any("reads words.weight on stages 0 and 3" in one.message for one in errors)


def test_a_region_around_cuts() -> None:
    text = 'rules: {"blocks.*": stage, "": checkpoint}'
    found = refused(Plain, text)
    assert found.code == "cut-inside-region" and marked(text, found) == "checkpoint"


def test_a_stage_without_parameters() -> None:
    class Hollow(Plain):
        def __init__(self) -> None:
            super().__init__(4)
            self.blocks[1] = nn.Identity()

    text = "rules: {'blocks.*': stage}"
    found = findings(
        text, Hollow, mesh_of(pp=4), workload=WORK, pipeline=Pipeline("1f1b", 8, balance="layers")
    )
    assert "stage-without-parameters" in {one.code for one in found}
