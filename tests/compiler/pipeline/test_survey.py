"""What the survey sees of a forward: calls of units in order, what each needs, and what glue reads and changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from parallelizer.compiler.pipeline.survey import NotFollowed, Survey, divided_by, survey, units_of
from parallelizer.compiler.pipeline.unit_calls import UnitCall
from parallelizer.language.pipeline.stages import UnitOutput
from parallelizer.language.workload import Entry, Workload
from tests.compiler.pipeline.models import VOCABULARY, Choosing, Counting, Fickle, Plain, Tangled, Two
from tests.findings import on_meta
from tests.runtime.pipeline.models import WORKLOAD, Staged

WORK = Workload({"input_ids": Entry(("batch", "sequence"), "int64", (0, VOCABULARY))}, 4, 6)


def seen(build: Callable[[], nn.Module], matching: str = "blocks.") -> Survey:
    model = on_meta(build)
    paths = [p for p, _ in model.named_modules() if p.startswith(matching) and p.count(".") == 1]
    found = survey(model, paths, WORK)
    assert isinstance(found, Survey), found
    return found


def calls(found: Survey) -> Mapping[tuple[str, int], UnitCall]:
    return {(one.unit, one.index): one for one in found.calls}


def of(unit: str, call: int = 0) -> UnitOutput:
    return UnitOutput(unit, call, 0)


def test_a_chain_needs_what_the_unit_before_returned() -> None:
    found = seen(Plain)
    assert [one.unit for one in found.calls] == ["words", *(f"blocks.{n}" for n in range(4)), "head"]
    assert [one.place for one in found.calls] == [0, 1, 2, 3, 4, 4]
    assert calls(found)["blocks.2", 0].needs == {of("blocks.1")}
    assert found.output == {of("head")} and found.divided == {"", "blocks"}
    assert found.candidates == tuple(f"blocks.{n}" for n in range(4))
    assert not found.strays and not found.updated and not found.rewritten


def test_values_are_followed_through_glue_to_where_they_are_read() -> None:
    found = seen(Tangled)
    by_call = calls(found)
    assert by_call["blocks.3", 0].needs == {of("blocks.2"), of("blocks.0"), "scale"}
    assert by_call["blocks.2", 0].needs >= {of("blocks.1"), of("blocks.0"), of("positions")}
    assert by_call["head", 0].needs >= {of("blocks.3"), "words.weight", "norm.weight", "norm.bias"}


def test_a_module_without_parameters_that_reads_the_batch_alone_is_free() -> None:
    found = seen(lambda: _WithPositions())
    assert {one.unit for one in found.calls if one.free} == {"positions"}


class _WithPositions(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.positions = _OfIds()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        where, x = self.positions(input_ids), self.words(input_ids)
        for block in self.blocks:
            x = block(x, where)
        y: torch.Tensor = self.head(x)
        return y


class _OfIds(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.cumsum(1).unsqueeze(-1)


def test_modules_whose_parameters_glue_reads_are_divided() -> None:
    found = seen(Tangled)
    assert {name for _, name in found.strays} == {"norm.weight", "words.weight"}
    assert {"norm", "words"} <= found.divided
    assert not {"norm", "words"} & {one.unit for one in found.calls}
    assert "words.weight" in found.output


def test_what_glue_changes_in_place_is_noted() -> None:
    assert seen(Tangled).rewritten == {of("blocks.1")}


def test_an_encoder_is_needed_by_every_block_of_the_decoder() -> None:
    found = seen(Two, "")
    by_call = calls(found)
    assert all(of("encoder.1") in by_call[f"decoder.{n}", 0].needs for n in range(2))
    assert (by_call["words", 0].place, by_call["words", 1].place) == (0, 2)


def test_buffers_that_the_forward_changes_are_noted() -> None:
    assert seen(Counting, "").updated == ("words.calls",)


def test_rows_that_are_chosen_by_values_are_followed() -> None:
    found = seen(Choosing)
    assert calls(found)["blocks.3", 0].needs == {of("words"), *(of(f"blocks.{n}") for n in range(3))}
    assert found.varying == {of(f"blocks.{n}") for n in range(4)} and not seen(Tangled).varying


def test_a_course_that_depends_on_values_is_a_reason() -> None:
    model = on_meta(Fickle)
    found = survey(model, ["blocks.1"], WORK)
    assert isinstance(found, NotFollowed) and "meta" in found.reason
    assert found.span is not None and found.span.file.endswith("models.py")


def test_lists_are_no_units() -> None:
    modules = dict(on_meta(Plain).named_modules())
    divided = divided_by(modules, ["blocks.1"])
    assert units_of(modules, divided) == ["words", *(f"blocks.{n}" for n in range(4)), "head"]


def test_a_parameter_that_glue_reads_is_needed_by_the_unit_that_follows() -> None:
    found = survey(on_meta(Staged), [f"layers.{i}" for i in range(4)], WORKLOAD)
    assert not isinstance(found, NotFollowed)
    needs = {one.unit: one.needs for one in found.calls}
    assert needs["after"] == {"scale", of("norm")}
    assert needs["layers.1"] == {of("layers.0")}
