"""`python -m parallelizer init` as somebody runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor, nn

from parallelizer.commands.init import _lists_of_experts, _no_context
from parallelizer.commands.main import main
from tests.init.models import Gpt, Mixture
from tests.propose.from_forward.test_roles import found

CONF = ["--config-dir", "tests/init/conf", "train.batch_size=8", "train.seq_len=64"]


def test_a_plan_that_the_model_config_names_and_that_is_not_there_is_written_and_validates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "qwen.yaml"
    assert main(["init", *CONF, "model=qwen_like", "--unproven", "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert "packed: [1, 1]" in target.read_text()
    assert main(["validate", "--no-proof", *CONF, "model=qwen_like", f"plan={target}", "parallel=tp2"]) == 0
    answer = capsys.readouterr()
    assert re.findall(r"^(?:error|warning|note)\[.*", answer.out + answer.err, re.MULTILINE) == []


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.yaml"
    target.write_text("mine")
    assert main(["init", *CONF, "model=gpt", "--output", str(target)]) == 1
    assert target.read_text() == "mine"
    assert "--force" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_said_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *CONF, "model=gpt", "--output", str(tmp_path / "none" / "mine.yaml")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_a_model_that_cannot_be_built_is_a_diagnostic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *CONF, "model=gpt", "+model.places=many"]) == 1
    assert "model-build" in capsys.readouterr().err


def test_a_batch_longer_than_the_models_tables_is_an_error_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mine.yaml"
    assert main(["init", *CONF, "model=gpt", "train.seq_len=4096", "--output", str(target)]) == 1
    said = capsys.readouterr().err
    assert "sequence-too-long" in said and "shorten train.seq_len" in said
    assert not target.exists()


def test_a_forward_that_cannot_be_watched_gives_fsdp_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A value that fake tensors do not have decides its course."""
    assert (
        main(["init", *CONF, "model=gpt", "model._target_=tests.commands.test_init.Peeking", "--unproven"])
        == 0
    )
    answer = capsys.readouterr()
    assert "could not be watched" in answer.out
    assert "could not be watched" in answer.err
    assert "rules:\n" in answer.out and "fsdp" in answer.out


@pytest.mark.slow
def test_what_is_proposed_is_proven_on_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "t5.yaml"
    assert main(["init", *CONF, "model=t5_like", "--output", str(target)]) == 0
    assert main(["verify", *CONF, "model=t5_like", f"plan={target}", "parallel=fsdp2_tp2"]) == 0


class Peeking(Gpt):
    """A GPT that asks for a value."""

    def forward(self, input_ids: Tensor, where: Tensor | None = None) -> Tensor:
        return super().forward(input_ids if input_ids.sum().item() > 0 else -input_ids, where)


def test_a_plan_that_is_not_proven_in_time_is_written_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", *CONF, "model=gpt", "--seconds", "0.001"]) == 1
    answer = capsys.readouterr()
    assert "fsdp" in answer.out and "not proven: the time limit was reached" in answer.out
    for sentence in ("not proven", "could not be watched"):
        assert answer.err.count(sentence) == 1
    assert answer.err.endswith("init: the limit of 0.001 s was reached: run again with --seconds 60\n")
    assert "run again" not in answer.out


class Talking(Gpt):
    """A GPT that says how large it is, as nanoGPT does."""

    def __init__(self, places: int = 256) -> None:
        super().__init__(places)
        print("number of parameters: many")


def test_what_a_model_prints_does_not_stand_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["init", *CONF, "model=gpt", "model._target_=tests.commands.test_init.Talking", "--seconds", "0.001"]
    )
    assert "number of parameters" not in capsys.readouterr().out


class WrittenOut(nn.Module):
    """One layer of attention as two products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).unflatten(-1, (4, 8)).transpose(1, 2)
        y = (x @ x.mT).softmax(-1) @ x
        return self.head(y.transpose(1, 2).flatten(2))


def test_attention_that_is_written_out_is_told_with_its_line_and_the_call_in_its_place() -> None:
    said = _no_context(found(WrittenOut))
    assert re.match(
        r"attention is written out, at .*test_init\.py:\d+: `y = \(x @ x\.mT\)\.softmax\(-1\) @ x`; ", said
    )
    assert "write `scaled_dot_product_attention(q, k, v, is_causal=True)`" in said


def test_a_loop_over_experts_is_told_what_lets_ep_share_them_out() -> None:
    [said] = _lists_of_experts(found(Mixture))
    assert said.startswith("the experts in floors.*.panel are not shared out over ep: ")
    assert "write `floors.*.panel: experts`, else move the loop into such a module" in said
    assert _lists_of_experts(found(Gpt)) == []
