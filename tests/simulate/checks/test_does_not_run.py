"""What `does-not-run` advises."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.commands.main import parse
from parallelizer.simulate.checks.does_not_run import _advice, _said
from parallelizer.simulate.follow.flow import StepFailure


@pytest.mark.parametrize("path", ["", "layers.0.attention"])
def test_the_command_that_is_proposed_parses(path: str) -> None:
    advice = _advice(StepFailure(path, "forward", "aten.add.Tensor", "RuntimeError", "no"), path)
    program, words = advice.split("`")[1].split(" parallelizer ")
    assert program == "python -m"
    arguments = parse(shlex.split(words))
    assert (arguments.word, arguments.overrides) == (path, [])


def test_torchs_error_of_a_broadcast_is_told_by_the_sizes() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(8, 64, 32, device="meta") * torch.empty(8, 32, 1, device="meta")
    assert _said(str(caught.value)) == (
        "tensors of sizes [8, 64, 32] and [8, 32, 1] are combined, and dimension -2 differs"
    )
    assert _said("another error") == "another error"


def test_a_change_in_place_is_told_what_copies_the_output() -> None:
    text = "Output 0 of _ToTorchTensor is a view and is being modified inplace. This view was created inside a custom Function"
    assert "`own: true`" in _advice(
        StepFailure("a", "forward", "aten.add_.Tensor", "RuntimeError", text), "a"
    )


class Masked(nn.Module):
    """One layer of attention under a mask of keys, which it may also read token by token."""

    def __init__(self, by_token: bool) -> None:
        super().__init__()
        self.by_token = by_token
        self.words, self.attention, self.head = nn.Embedding(16, 8), MaskedAttention(), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        if self.by_token:
            x = x * attention_mask[:, :, None]
        y: Tensor = self.head(self.attention(x, attention_mask))
        return y


class MaskedAttention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, mask[:, None, None, :].bool())[:, 0]


MASKED = """
version: 1
rules:
  attention: context-parallel
  "": fsdp
buffers:
  batch: {input_ids: 1, labels: 1%s}
"""


def of_masked(folder: Path, more: str = "", *, by_token: bool = False) -> tuple[pz.Diagnostic, ...]:
    """What `validate` says of it under cp=2."""
    file = folder / "plan.yaml"
    file.write_text(MASKED % more)
    tokens, mask = (
        pz.Entry(("batch", "sequence"), range=(0, 16)),
        pz.Entry(("batch", "sequence"), range=(0, 2)),
    )
    entries = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        labels = batch["labels"].flatten()
        return F.cross_entropy(output.flatten(0, 1), labels, reduction="sum"), labels.numel()

    work = pz.Workload(entries, batch_size=2, seq_len=16)
    return pz.validate(Masked(by_token), file, {"cp": 2}, workload=work, loss=loss)


def test_a_mask_of_keys_runs_whole_and_the_error_of_a_split_one_says_so(tmp_path: Path) -> None:
    assert of_masked(tmp_path) == ()
    [split] = of_masked(tmp_path, ", attention_mask: 1")
    assert split.code == "does-not-run"
    assert (
        "`attention_mask`, [batch, sequence], stays whole if buffers.batch does not list it" in split.message
    )


def test_a_whole_mask_that_the_forward_reads_token_by_token_is_told_how_to_be_split(tmp_path: Path) -> None:
    [whole] = of_masked(tmp_path, by_token=True)
    assert whole.code == "does-not-run" and whole.help is not None
    assert "add `attention_mask: 1` to buffers.batch of" in whole.help
