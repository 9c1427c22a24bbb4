"""Followed steps that take a part for the whole: of the sequence under context parallelism, of fused features.

Most of it is refused already when the plan is compiled, by what the model calls; here such a plan is forced through.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from parallelizer.checks.layout_flow import check_layout_flow
from parallelizer.diagnostics import Diagnostic
from tests.checks.test_layout_flow import rule
from tests.simulate.gpt import Gpt
from tests.simulate.setups import CONFIGS, GPT, LLAMA, setup_of

PLAN = Path(__file__).parents[2] / "configs" / "plans" / "llama.yaml"
CONTEXT = "  blocks.*.attention: context-parallel\nbuffers:\n  batch: {input_ids: 1, labels: 1"


def found(*overrides: str, small: bool = True) -> tuple[Diagnostic, ...]:
    """What following a step finds, whatever the compiler has to say."""
    setup = setup_of(*LLAMA, *overrides) if small else setup_of(*overrides)
    model = setup.build_model()
    return check_layout_flow(setup, setup.compile(model, force=True), model)


class Numbered(Gpt):
    """As Gpt, with positions that are given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class Sliced(Gpt):
    """As Gpt, with the first rows of its table of positions."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def gpt(tmp_path: Path, more: str, model: type = Gpt) -> tuple[str, ...]:
    plan = tmp_path / "plan.yaml"
    plan.write_text((CONFIGS / "plans" / "gpt.yaml").read_text() + more)
    return (*GPT, f"plan={plan}", f"model._target_={model.__module__}.{model.__qualname__}")


@pytest.mark.parametrize("preset", ["cp2", "cp2_tp2"])
def test_attention_without_context_parallelism_is_named(preset: str) -> None:
    (diagnostic,) = found(f"parallel={preset}", rule("layers.1.attention.inner: none"))
    assert (diagnostic.code, diagnostic.severity) == ("local-attention", "error")
    assert "attention in layers.1.attention.inner sees" in diagnostic.message
    assert (
        diagnostic.span is not None
        and "context-parallel" in PLAN.read_text().splitlines()[diagnostic.span.line - 1]
    )


def test_a_table_of_positions_that_is_not_listed_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("".join(line for line in PLAN.open() if "rope" not in line))
    (diagnostic,) = found("parallel=cp2", f"plan={plan}")
    assert diagnostic.code == "missing-buffers"
    assert diagnostic.help is not None and "add `rope.cos: 0, rope.sin: 0`" in diagnostic.help


def test_a_table_that_is_a_parameter_is_named(tmp_path: Path) -> None:
    (diagnostic,) = found(*gpt(tmp_path, CONTEXT + "}\n", Sliced), "parallel=cp2", small=False)
    assert "the first rows of positions.weight" in diagnostic.message


def test_positions_counted_by_every_rank_are_named(tmp_path: Path) -> None:
    (diagnostic,) = found(*gpt(tmp_path, CONTEXT + "}\n"), "parallel=cp2", small=False)
    assert (diagnostic.code, diagnostic.severity) == ("local-positions", "error")


def test_positions_that_are_given_are_clean(tmp_path: Path) -> None:
    overrides = gpt(tmp_path, CONTEXT + ", position_ids: positions}\n", Numbered)
    entry = "+model.batch.position_ids={shape: [batch, sequence], dtype: int64, range: [0, 8]}"
    assert found(*overrides, entry, "parallel=cp2", small=False) == ()


@pytest.mark.parametrize("size", [2, 3])
def test_a_fused_projection_that_is_not_packed_is_named(size: int) -> None:
    heads = ("model.heads=6",)  # which 3 divides too, as it does q|k|v
    written = rule("blocks.*.attention.qkv: colwise")
    (diagnostic,) = found(*GPT, *heads, "parallel=tp2",
                          f"parallel.mesh.tp={size}", written, small=False)  # fmt: skip
    assert (diagnostic.code, diagnostic.severity) == ("fused-features", "error")
    assert "blocks.{0,1}.attention.qkv are taken apart in blocks.{0,1}.attention" in diagnostic.message
    assert diagnostic.help is not None and "packed: [1, 1, 1]" in diagnostic.help
