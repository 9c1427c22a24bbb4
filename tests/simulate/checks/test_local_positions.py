"""Positions that a forward counts itself, under context parallelism.

Most of it is refused already when the plan is compiled, by what the model calls; here such a plan is forced through.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from parallelizer.diagnostics.diagnostic import Diagnostic
from tests.simulate.gpt import Gpt
from tests.simulate.setups import CONFIGS, GPT, LLAMA, followed_findings, setup_of

PLAN = Path(__file__).parents[3] / "configs" / "plans" / "llama.yaml"
CONTEXT = "  blocks.*.attention: context-parallel\nbuffers:\n  batch: {input_ids: 1, labels: 1"


def found(*overrides: str, small: bool = True) -> tuple[Diagnostic, ...]:
    """What following a step finds, whatever the compiler has to say."""
    setup = setup_of(*LLAMA, *overrides) if small else setup_of(*overrides)
    model = setup.build_model()
    return followed_findings(setup, setup.compile(model, force=True), model)


class Numbered(Gpt):
    """As Gpt, with positions that are given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def gpt(tmp_path: Path, more: str, model: type = Gpt) -> tuple[str, ...]:
    plan = tmp_path / "plan.yaml"
    plan.write_text((CONFIGS / "plans" / "gpt.yaml").read_text() + more)
    return (*GPT, f"plan={plan}", f"model._target_={model.__module__}.{model.__qualname__}")


def test_positions_counted_by_every_rank_are_named(tmp_path: Path) -> None:
    (diagnostic,) = found(*gpt(tmp_path, CONTEXT + "}\n"), "parallel=cp2", small=False)
    assert (diagnostic.code, diagnostic.severity) == ("local-positions", "error")


class Windowed(Gpt):
    """As Gpt, for sequences of whole windows: at a length that tells positions from all else it does not run."""

    def forward(self, input_ids: Tensor) -> Tensor:
        assert input_ids.shape[1] % 4 == 0
        return super().forward(input_ids)


def test_positions_of_a_model_that_runs_at_some_lengths_only_are_named_here_alone(tmp_path: Path) -> None:
    setup = setup_of(*gpt(tmp_path, CONTEXT + "}\n", Windowed), "parallel=cp2")
    model = setup.build_model()
    program = setup.compile(model)
    assert "local-positions" not in [d.code for d in program.diagnostics]
    (diagnostic,) = followed_findings(setup, program, model)
    assert (diagnostic.code, diagnostic.severity) == ("local-positions", "error")


def test_positions_that_are_given_are_clean(tmp_path: Path) -> None:
    overrides = gpt(tmp_path, CONTEXT + ", position_ids: positions}\n", Numbered)
    entry = "+model.batch.position_ids={shape: [batch, sequence], dtype: int64, range: [0, 8]}"
    assert found(*overrides, entry, "parallel=cp2", small=False) == ()
