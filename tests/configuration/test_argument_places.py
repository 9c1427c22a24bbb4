"""The arrow of an error in a model's arguments is under the argument that the error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.validate import _of_the_configuration
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.simulate.trace_failed import LOSS_FAILED
from tests.configuration.test_compose_mistakes import cut, refused

OWN = """\
defaults: [hf, _self_]
config:
  model_type: llama
  hidden_sizes: 64
  num_hidden_layers: 2
"""


def not_built(overrides: list[str], folder: str | None = None) -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        from_overrides(overrides, config_dir=folder).build_model()
    [found] = caught.value.diagnostics
    return found


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["++model.heads=8"], "heads"),
        (["model.dim=100"], "100"),
        (["model.vocab_size=100", "++model.n_heads=12"], "12"),
    ],
)
def test_the_argument_that_is_named_is_marked(overrides: list[str], wrong: str) -> None:
    assert cut(not_built(overrides).span) == wrong


def test_a_misspelt_key_of_one_s_own_config_is_marked_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    own = tmp_path / "model/mine.yaml"
    own.write_text(OWN)
    found = not_built(["model=mine"], str(tmp_path))
    assert found.span and Path(found.span.file).name == "mine.yaml" and cut(found.span) == "hidden_sizes"
    own.write_text(OWN.replace("hidden_sizes", "num_attention_heads").replace("64", "3\n  hidden_size: 64"))
    found = not_built(["model=mine"], str(tmp_path))
    assert found.span and Path(found.span.file).name == "mine.yaml", "not hf.yaml, which is inherited"


def test_a_loss_that_does_not_run_is_marked_where_it_is_set() -> None:
    setup = from_overrides(["model.loss=torch.nn.functional.cross_entropy"])
    failed = Diagnostic("model-failed", f"{LOSS_FAILED}, with or without the plan: the loss fails")
    assert cut(_of_the_configuration(setup, failed).span) == "torch.nn.functional.cross_entropy"


def test_a_near_name_is_the_only_advice() -> None:
    assert refused(["model.n_head=8"]).help == "did you mean n_heads?"
