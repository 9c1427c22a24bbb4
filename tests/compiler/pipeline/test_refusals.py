"""What is said against cuts, and of models that compute something else when they are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.language.pipeline.settings import Pipeline
from tests.compiler.pipeline import models
from tests.compiler.pipeline.models import PLAN, WIDTH, WORK, Average, Layered, Normed
from tests.findings import findings, marked, mesh_of


def found(build: Callable[[], nn.Module], plan: str = PLAN, **settings: Any) -> list[Diagnostic]:
    return list(findings(plan, build, mesh_of(pp=2), workload=WORK, pipeline=Pipeline(**settings)))


def said(build: Callable[[], nn.Module], **settings: Any) -> list[tuple[str, str, str]]:
    return [(d.code, d.severity, d.message) for d in found(build, **settings)]


def model_text(one: Diagnostic) -> str:
    """The characters of the model's code that a diagnostic points at."""
    span = one.span
    assert span is not None
    return Path(span.file).read_text().splitlines()[span.line - 1][span.column - 1 : span.end_column - 1]


def test_a_plain_model_is_cut_without_a_word() -> None:
    assert found(Layered) == []


# --- modules and parameters ----------------------------------------------------------------------------


class Shared(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.norm(layer(x))
        output: Tensor = self.head(x)
        return output


class ReadOutside(Layered):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = x @ self.embed.weight.mT
        return output


def test_a_module_that_two_stages_of_one_rank_call_is_refused() -> None:
    [one] = found(Shared, schedule="zbv")
    assert one.code == "stage-module-twice" and model_text(one) == "self.norm(layer(x))"
    assert one.message == "norm is called on stages 0 and 3, which are on one rank"
    assert [marked(PLAN, other.span) for other in one.related] == ["layers.*"]


def test_it_is_fine_on_several_ranks_and_where_all_calls_are_on_one_stage() -> None:
    assert found(Shared) == []
    assert found(SharedLate, balance=(2, 2)) == []


class SharedLate(Shared):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for at, layer in enumerate(self.layers):
            x = self.norm(layer(x)) if at > 1 else layer(x)
        output: Tensor = self.head(x)
        return output


def test_a_parameter_that_other_code_reads_is_refused_where_a_rule_splits_it_over_tp() -> None:
    assert found(ReadOutside) == []
    split = 'rules: {layers.*: stage, embed: {style: rowwise, input: replicate, output: replicate}, "": fsdp}'
    every = findings(split, ReadOutside, mesh_of(pp=2, tp=2), workload=WORK)
    assert any(d.code == "stage-module-twice" and "embed.weight" in d.message for d in every), every


@pytest.mark.parametrize("style", ["checkpoint", "compile"])
def test_a_region_that_is_cut_is_refused_at_its_style(style: str) -> None:
    text = f'rules: {{layers.*: stage, "": [fsdp, {style}]}}'
    [one] = found(Layered, text)
    assert (one.code, marked(text, one)) == ("cut-inside-region", style)
    assert one.message.startswith("the root is ")
    assert found(Layered, f'rules: {{layers.*: [stage, {style}], "": fsdp}}') == []


def test_a_stage_without_parameters_is_refused() -> None:
    def build() -> nn.Module:
        return Layered(nn.ReLU, 4)

    assert found(build, balance=(1, 3)) == []  # the embedding is on the first stage, the head on the last
    every = findings(PLAN, build, mesh_of(pp=4), workload=WORK)
    assert [(d.code, d.message) for d in every] == [
        ("stage-without-parameters", "stage 1 has no parameters"),
        ("stage-without-parameters", "stage 2 has no parameters"),
    ]


# --- values that do not cross ---------------------------------------------------------------------------


class Keeping(nn.Linear):
    """Leaves a tensor behind, as an attribute, or in a list or a sum that it is given."""

    kept: Tensor

    def forward(self, x: Tensor, every: list[Tensor] | None = None, total: Tensor | None = None) -> Tensor:
        self.kept = x.square().mean()
        if every is not None:
            every.append(self.kept * 2)
        if total is not None:
            total.add_(self.kept)
        return super().forward(x)


class ReadsAnAttribute(Layered):
    def __init__(self) -> None:
        super().__init__(lambda: Keeping(WIDTH, WIDTH), 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x) + sum(layer.kept for layer in self.layers)  # read
        return output


class ReadsAList(ReadsAnAttribute):
    def forward(self, input_ids: Tensor) -> Tensor:
        x, every = self.embed(input_ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x, every)
        output: Tensor = self.head(x) + sum(every)  # read
        return output


class ReadsWhatWasWritten(ReadsAnAttribute):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x, None, total)
        output: Tensor = self.head(x) + total
        return output


class ReadsWhatIsHere(ReadsAnAttribute):
    """Of a module on the stage that reads."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x) + self.layers[3].kept
        return output


class KeepingItsOutput(nn.Linear):
    """Returns what it leaves behind."""

    kept: Tensor

    def forward(self, x: Tensor, every: list[Tensor] | None = None) -> Tensor:
        self.kept = super().forward(x)
        if every is not None:
            every.append(self.kept)
        return self.kept


class ReadsAnOutput(Layered):
    read: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        super().__init__(lambda: KeepingItsOutput(WIDTH, WIDTH), 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x) + sum(self.layers[at].kept.mean() for at in self.read)  # read
        return output


class ReadsTheLastOutput(ReadsAnOutput):
    read = (2, 3)


class ReadsAListOfOutputs(ReadsAnOutput):
    def forward(self, input_ids: Tensor) -> Tensor:
        x, every = self.embed(input_ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x, every)
        output: Tensor = self.head(x) + sum(one.mean() for one in every[:2])  # read
        return output


class ReadsWhatIsReturned(ReadsAnOutput):
    """What modules return crosses, wherever it is read."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x, every = self.embed(input_ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x)
            every.append(x)
        output: Tensor = self.head(x) + sum(one.mean() for one in every)
        return output


@pytest.mark.parametrize("build", [ReadsAnOutput, ReadsAListOfOutputs])
def test_an_output_that_a_module_also_keeps_is_refused_where_another_stage_reads_what_is_kept(
    build: type[nn.Module],
) -> None:
    [one] = found(build)
    assert one.code == "value-left-behind" and one.span is not None
    assert one.message.startswith("layers.{0,1} keeps a tensor that it returns")
    assert Path(one.span.file).read_text().splitlines()[one.span.line - 1].endswith("# read")


@pytest.mark.parametrize("build", [ReadsTheLastOutput, ReadsWhatIsReturned])
def test_outputs_that_are_read_where_they_are_or_as_they_were_returned_are_fine(
    build: type[nn.Module],
) -> None:
    assert found(build) == []


@pytest.mark.parametrize("build", [ReadsAnAttribute, ReadsAList])
def test_a_tensor_that_a_module_does_not_return_is_refused_where_another_stage_reads_it(
    build: type[nn.Module],
) -> None:
    [one] = found(build)
    assert one.code == "value-left-behind" and one.span is not None
    assert one.message.startswith("layers.{0,1} makes a tensor that it does not return")
    assert Path(one.span.file).read_text().splitlines()[one.span.line - 1].endswith("# read")


def test_a_tensor_that_modules_of_several_stages_write_into_is_refused() -> None:
    every = found(ReadsWhatWasWritten)
    assert every and all(one.code == "value-left-behind" and "writes into" in one.message for one in every)


def test_what_is_read_on_its_own_stage_is_fine() -> None:
    assert found(ReadsWhatIsHere) == []


# --- random numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [models.DroppedForAll, models.NoiseForAll])
def test_random_numbers_that_two_stages_draw_for_one_value_get_a_warning(build: type[nn.Module]) -> None:
    [one] = found(build)
    assert (one.code, one.severity, marked(PLAN, one)) == ("random-on-several-stages", "warning", "layers.*")
    assert one.message.startswith("each of the stages 0, 1 draws its own random numbers (")


@pytest.mark.parametrize("build", [models.DroppedOnce, models.DropoutModule])
def test_those_that_one_stage_uses_do_not(build: type[nn.Module]) -> None:
    assert found(build) == []


def test_dropout_that_is_off_does_not() -> None:
    class Off(models.DroppedForAll):
        def before(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
            dropped = nn.functional.dropout(embedded, 0.1, training=False)
            return dropped, dropped

    assert found(Off) == []


# --- statistics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda: nn.BatchNorm1d(WIDTH), "BatchNorm1d"),
        (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), "BatchNorm1d"),
        (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), "BatchNorm1d"),
        (lambda: nn.SyncBatchNorm(WIDTH), "SyncBatchNorm"),
    ],
)
def test_a_batch_norm_is_refused(norm: models.Layer, kind: str) -> None:
    [one] = found(lambda: Layered(lambda: Normed(norm)))
    assert (one.code, one.severity) == ("microbatch-statistics", "error")
    assert (
        one.message
        == f"layers.{{0..3}}.norm ({kind}) would normalize each of the 4 microbatches by statistics of its own"
    )
    assert [r.span for r in one.related] == [Span("mesh", 1, 2, 3)]


def test_the_place_of_the_microbatches_is_shown() -> None:
    span = Span("preset.yaml", 3, 4, 5)
    [one] = found(
        lambda: Layered(lambda: Normed(lambda: nn.BatchNorm1d(WIDTH))),
        microbatches=2,
        spans={"microbatches": span},
    )
    assert [(r.span, r.label) for r in one.related] == [(span, "2 microbatches are set here")]


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(2, WIDTH),
        lambda: nn.InstanceNorm1d(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH).eval(),
    ],
)
def test_norms_of_each_row_alone_and_frozen_ones_are_fine(norm: models.Layer) -> None:
    assert found(lambda: Layered(lambda: Normed(norm))) == []


def test_one_microbatch_is_the_whole_batch() -> None:
    assert found(lambda: Layered(lambda: Normed(lambda: nn.BatchNorm1d(WIDTH))), microbatches=1) == []
    assert found(lambda: Layered(Average), microbatches=1) == []


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (Average, "layers.{0..3}.average"),
        (models.Replaced, "layers.{0..3}.average"),
        (
            lambda: Normed(lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True)),
            "layers.{0..3}.norm.{running_mean,running_var}",
        ),
    ],
)
def test_a_buffer_that_a_forward_updates_gets_a_warning(layer: models.Layer, name: str) -> None:
    [(code, severity, message)] = said(lambda: Layered(layer))
    assert (code, severity) == ("microbatch-statistics", "warning")
    assert message.startswith(f"the forward updates {name}") and message.endswith(
        ": in each step 4 times, once for each microbatch"
    )


def test_one_that_is_not_saved_does_not() -> None:
    assert said(lambda: Layered(lambda: Average(persistent=False))) == []


def test_one_of_a_module_that_is_cut_is_refused() -> None:
    assert said(models.AverageOutside) == [
        (
            "microbatch-statistics",
            "error",
            "the forward updates average in a module that is cut: each stage would update a copy of its own",
        )
    ]
