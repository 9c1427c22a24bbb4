"""Packed documents: what tells them apart, and that a packed row is its documents run one by one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.losses import IGNORED
from parallelizer.proof.prove import prove
from parallelizer.runtime.initialize import materialize
from parallelizer.runtime.step import forward
from parallelizer.styles.context_parallel.buffers import shard_tokens
from parallelizer.training.data import text
from parallelizer.training.data.documents import told_apart
from parallelizer.training.job.prepare import prepare
from tests.chosen import marks_at
from tests.proof import subjects
from tests.recipes.runs import SMALL, run_here

MODELS = ["llama_packed", "hf_llama_packed"]
END = 9


@given(st.lists(st.lists(st.integers(0, END), min_size=12, max_size=12), min_size=1, max_size=3))
def test_documents_are_numbered_as_a_loop_over_tokens_numbers_them(rows: list[list[int]]) -> None:
    window = torch.tensor(rows)
    batch = told_apart({"input_ids": window[:, :-1], "labels": window[:, 1:]}, END)
    for row, tokens in enumerate(rows):
        number, place = 0, 0
        for at, token in enumerate(tokens[:-1]):
            label = IGNORED if token == END else tokens[at + 1]
            assert [int(batch[name][row, at]) for name in ("document_ids", "position_ids", "labels")] == [
                number,
                place,
                label,
            ]
            number, place = (number + 1, 0) if token == END else (number, place + 1)


def written(folder: Path) -> Path:
    """Forty documents of 1 to 40 bytes."""
    folder.mkdir(exist_ok=True)
    for number in range(40):
        (folder / f"{number}.txt").write_text(
            "".join(chr(97 + (number * 7 + i * i) % 26) for i in range(number + 1))
        )
    return folder


def packed(folder: Path) -> dict[str, Tensor]:
    data = text.load(path=str(written(folder)), heldout=0.1, documents=True)
    return data.training_batch(0, batch_size=4, seq_len=64, seed=0)


def test_the_text_is_the_same_and_its_fingerprint_another(tmp_path: Path) -> None:
    folder = str(written(tmp_path))
    plain, apart = (text.load(path=folder, heldout=0.1, documents=yes) for yes in (False, True))
    ours, theirs = (data.training_batch(3, batch_size=4, seq_len=64, seed=1) for data in (apart, plain))
    assert torch.equal(ours["input_ids"], theirs["input_ids"]) and {*theirs} == {"input_ids", "labels"}
    assert plain.fingerprint() != apart.fingerprint()
    [held] = apart.heldout_batches(batch_size=64, seq_len=16, count=1)
    filled = (held["labels"] == IGNORED).all(1)
    assert filled.any() and not filled.all() and held["document_ids"].shape == (64, 16)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_s_loss_is_the_mean_over_its_documents_run_one_by_one(
    tmp_path: Path, name: str
) -> None:
    if name.startswith("hf"):
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    sizes = [f"model.{key}={value}" for key, value in {"dim": 64, "hidden_dim": 96}.items()]
    setup = from_config(*compose_config([f"model={name}", *(sizes if name == "llama_packed" else [])]))
    model = setup.build_model()
    materialize(model, device="cpu", seed=0)
    whole = packed(tmp_path)
    whole["labels"][:, -1] = IGNORED  # the next token is in no row
    with torch.no_grad():
        total, count = setup.loss()(forward(model, shard_tokens(whole, setup.plan, None)), whole)
        losses = []
        for ids in whole["input_ids"].split(1):
            ends = [0, *((ids[0] == 0).nonzero().flatten() + 1).tolist(), ids.shape[1]]
            for begin, end in itertools.pairwise(ends):
                if end - begin > 1:
                    document = ids[:, begin:end]
                    output = model(input_ids=document)
                    logits = getattr(output, "logits", output)
                    losses += F.cross_entropy(logits[0, :-1], document[0, 1:], reduction="none").tolist()
    assert count == len(losses)
    assert float(total / count) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param("llama_packed", "cp2", marks=marks_at(0)),
        pytest.param("llama_packed", "fsdp2_cp2_tp2", marks=marks_at(1)),
        pytest.param("hf_llama_packed", "fsdp2_cp2_tp2", marks=marks_at(2)),
        pytest.param("hf_llama_packed", "cp2", marks=marks_at(3)),
    ],
)
def test_losses_and_every_gradient_are_one_rank_s(name: str, preset: str) -> None:
    if name.startswith("hf"):
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    proof = prove(subjects.setup(f"model={name}", f"parallel={preset}", "train.seq_len=24"))
    assert proof.passed, proof.divergence


@pytest.mark.ranks
def test_a_run_on_packed_documents_is_one_rank_s_under_cp(tmp_path: Path) -> None:
    words = [*SMALL, "model=llama_packed", "data=text", f"data.path={written(tmp_path / 'text')}"]
    words += ["data.documents=true", "data.heldout=0.1", "train.steps=2"]
    for preset in ("single", "cp2"):
        (tmp_path / preset).mkdir()
    one, two = (run_here(tmp_path / preset, *words, f"parallel={preset}") for preset in ("single", "cp2"))
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)


def test_a_model_for_packed_documents_wants_data_that_has_them() -> None:
    with pytest.raises(PlanError) as caught:
        prepare(*compose_config([*SMALL, "model=llama_packed"]), Path("nowhere"))
    assert {(d.code, d.message.partition(",")[0]) for d in caught.value.diagnostics} == {
        ("data-mismatch", f"the model takes a batch entry {name!r}")
        for name in ("document_ids", "position_ids")
    }
    assert all("data.documents=true" in (d.help or "") for d in caught.value.diagnostics)
