"""Dropout that keeps a model from being proven is told at its key, with the file to set it to 0 in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.dropout import NO_RANDOM_NUMBERS, place_dropout
from parallelizer.proof.modes import PlainAttention
from parallelizer.proof.recording import recording

FOUND = Diagnostic("model-failed", "it draws", None, NO_RANDOM_NUMBERS)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "_target_: torch.nn.Identity\nplan: llama\nloss: torch.sum\nbatch: {x: {shape: [batch]}}\n"
        "dropout: 0.1\nconfig: {attn_pdrop: 0.2, drop_last: true}\n"
    )
    return str(tmp_path)


def placed(folder: str, *overrides: str) -> Diagnostic:
    return place_dropout(from_config(*compose_config(["model=mine", *overrides], folder)), FOUND)


def test_the_file_and_the_keys_are_named(folder: str) -> None:
    found = placed(folder)
    assert found.span is not None and found.span.file.endswith("mine.yaml") and found.span.line == 5
    assert found.help == (
        f"put `dropout: 0`, `config: {{attn_pdrop: 0}}` into {found.span.file}; or "
        "`tiny: {dropout: 0, config: {attn_pdrop: 0}}` there, which proofs alone use"
    )


def test_what_the_command_line_sets_is_corrected_there(folder: str) -> None:
    found = placed(folder, "model.dropout=0.5", "model.config.attn_pdrop=0")
    assert found.help and found.help.startswith("set model.dropout=0; or")


def test_attention_with_dropout_is_a_finding_through_every_module() -> None:
    model = torch.nn.Sequential(Attention())
    with pytest.raises(PlanError) as caught, PlainAttention(), recording(model, [], []):
        model(torch.zeros(1, 2, 4))
    [found] = caught.value.diagnostics
    assert found.message == "the unsharded run draws random numbers: attention has a dropout of 0.1"
    assert found.help == NO_RANDOM_NUMBERS


class Attention(torch.nn.Module):
    """Of one head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


class Carrying(torch.nn.Linear):
    """A model that has a configuration as those of transformers have."""

    class Config:
        def to_dict(self) -> dict[str, object]:
            return {
                "hidden_dropout_prob": 0.1,
                "attention": {"drop_rate": 0.2},
                "layer_drop": 0,
                "drop_last": True,
            }

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.config = self.Config()


def test_what_a_model_of_transformers_carries_is_named_as_overrides_of_its_tiny_form(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        f"_target_: {__name__}.Carrying\nplan: llama\nloss: torch.sum\nbatch: {{x: {{shape: [batch]}}}}\n"
    )
    found = placed(str(tmp_path))
    assert found.span is None and found.help == (
        "prove it without dropout: add ++model.tiny.config.hidden_dropout_prob=0 "
        "++model.tiny.config.attention.drop_rate=0"
    )
