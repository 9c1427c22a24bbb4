"""Followed steps: correct plans are clean, and what trains on wrong gradients in silence is named at its rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import Diagnostic
from tests.chosen import kind_marks
from tests.simulate.setups import GPT, followed_findings, llama, setup_of

CONFIGS = Path(__file__).parents[3] / "configs"
SPLIT = ("tp", "cp")
PRESETS = sorted(p.stem for p in (CONFIGS / "parallel").glob("*.yaml") if any(a in p.stem for a in SPLIT))


def slowly(cases: Sequence[Any], *quick: Any) -> list[Any]:
    """The cases, all but some of which only the whole run has."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def found(*overrides: str, small: bool = True) -> tuple[Diagnostic, ...]:
    """What following a step of this configuration finds."""
    setup = llama(*overrides) if small else setup_of(*overrides)
    model = setup.build_model()
    return followed_findings(setup, setup.compile(model), model)


def rule(text: str) -> str:
    return f'rules=["{text}"]'


def marked(diagnostic: Diagnostic, overrides: tuple[str, ...] = ()) -> str:
    """The text that a diagnostic points at, in the plan or on the command line."""
    span = diagnostic.span
    assert span is not None
    lines = Path(span.file).read_text().splitlines() if span.file.endswith(".yaml") else list(overrides)
    return lines[span.line - 1][span.column - 1 : span.end_column - 1]


@pytest.mark.parametrize("preset", slowly(PRESETS, "tp2", "cp2_tp2"))
@pytest.mark.parametrize("plan", ["llama", "llama_tp"])
def test_every_shipped_plan_is_clean_on_every_preset(preset: str, plan: str) -> None:
    model = ("model=llama3_8b", "model.n_layers=2") if "8" in preset else ("model=llama_debug",)
    assert found(*model, f"parallel={preset}", f"plan={plan}", "train.batch_size=2048", small=False) == ()


@pytest.mark.parametrize("size", [2, 4])
def test_biases_fused_projections_and_tied_weights_are_clean(size: int) -> None:
    assert found(*GPT, f"parallel=tp{size}", small=False) == ()


@pytest.mark.parametrize(
    "written",
    slowly(
        [
            "layers.*: checkpoint",
            "layers.*.attention: none",
            "layers.*.feed_forward: none",
            "norm: replicate",
            "layers.*.attention_norm: {style: sequence, local: true}",
            "output: {style: colwise, input: replicate, output: replicate}",
            "tok_embeddings: {style: colwise, input: replicate, output: stream}",  # columns to rows: no gather
        ],
        "layers.*.attention: none",
        "tok_embeddings: {style: colwise, input: replicate, output: stream}",
    ),
)
def test_other_ways_to_write_the_same_are_clean(written: str) -> None:
    assert found("parallel=tp2", rule(written)) == ()


def test_a_mesh_of_data_axes_is_not_followed() -> None:
    assert found("parallel=fsdp2", rule("layers.*: none")) == ()


WRONG = [
    ("llama", "norm: {style: replicate, grad: replicate}", "varying-gradient", "grad"),
    ("llama", "norm: {style: sequence, layout: replicate}", "varying-gradient", "layout"),
    ("llama_tp", "norm: replicate", "replicated-sum", "norm"),
    ("llama_tp", "layers.*.ffn_norm: {style: replicate, grad: partial}", "replicated-sum", "grad"),
    ("llama", "layers.*.attention.wo: colwise", "layout-mismatch", "layers.*.attention.wo"),
    ("llama", "output: {style: colwise, input: stream}", "varying-loss", "output"),
    (
        "llama",
        "layers.*.attention.wo: {style: rowwise, input: shard(1), output: stream}",
        "layout-mismatch",
        "input",
    ),
    ("llama", "layers.*.attention.wq: {style: colwise, packed: [1, 1]}", "fused-features", "packed"),
    ("llama_tp", "layers.*.feed_forward.w[13]: {style: colwise, packed: [1, 1]}", "fused-features", "packed"),
    (
        "llama",
        "layers.*.feed_forward: {style: prepare-input, input: {x: stream -> replicate}, local: true, grad: partial}",
        "replicated-sum",
        "grad",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "text", "code", "at"),
    [
        pytest.param(*case, marks=m)
        for case, m in zip(WRONG, kind_marks(c for _, _, c, _ in WRONG), strict=True)
    ],
)
def test_a_wrong_layout_is_refused_where_it_is_written(plan: str, text: str, code: str, at: str) -> None:
    written = rule(text)
    (diagnostic,) = found("parallel=tp2", f"plan={plan}", written)
    assert (diagnostic.code, diagnostic.severity) == (code, "error")
    assert marked(diagnostic, (written,)) == at
    assert diagnostic.help


def test_what_arrives_whole_is_not_taken_for_a_part() -> None:
    (diagnostic,) = found("parallel=tp2", rule("tok_embeddings: none"))
    assert diagnostic.code == "layout-mismatch"
    assert diagnostic.message.startswith("the input of layers.0.attention_norm is whole on every rank of tp")
    assert marked(diagnostic) == "layout"


def test_shapes_that_do_not_meet_name_both_sides() -> None:
    (diagnostic,) = found("parallel=tp2", rule("layers.*.attention.wo: rowwise"))
    assert diagnostic.code == "does-not-run"
    assert "forward of layers.0 fails at aten.add" in diagnostic.message
    assert "[8, 16, 64] from tok_embeddings (a part over tp)" in diagnostic.message
    assert "[8, 32, 64] from layers.0.attention.wo (the same on every rank over tp)" in diagnostic.message


class Undecided(nn.Module):
    """Runs on values only."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x if x.sum().item() > 0 else -x)


def test_a_model_that_cannot_be_followed_at_all_is_a_warning(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nrules:\n  head: {style: colwise, output: replicate}\n")
    target = f"model._target_={__name__}.Undecided"
    (diagnostic,) = found("parallel=tp2", target, f"plan={plan}")
    assert (diagnostic.code, diagnostic.severity) == ("trace-failed", "warning")
    assert "aten" in diagnostic.message
    assert capfd.readouterr().err == ""


def test_nothing_stays_behind_in_this_process() -> None:
    found("parallel=tp2")
    assert not torch.distributed.is_initialized()
