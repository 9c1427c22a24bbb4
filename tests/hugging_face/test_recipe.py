"""`model=hf model.name=<folder>` starts from the folder's weights, and `train.save` writes what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hugging_face.broken import edited
from tests.hugging_face.folders import digests, transformers, values, write
from tests.recipes.runs import ROOT, metrics, typed

VOCAB = {"vocab_size": 256}
"""As many as the recipe's bytes."""

RUN = (
    "model=hf",
    "train.prove=never",
    "train.seq_len=32",
    "train.batch_size=4",
    "train.eval_batches=1",
    "train.log_every=0",
    f"data.path={ROOT / 'LICENSE'}",
    "device=cpu",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("fsdp2_tp2", torch.float32), pytest.param("tp2", torch.bfloat16, marks=pytest.mark.slow)],
)
def test_a_run_that_learns_nothing_saves_what_it_loaded(
    preset: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Though it computes in bfloat16."""
    folder = write(tmp_path / "model", "llama", dtype=dtype, file_size="30KB", **VOCAB)
    more = (
        f"model.name={folder}",
        f"parallel={preset}",
        "optim.lr=0",
        "train.dtype=bfloat16",
        f"train.save={tmp_path / 'saved'}",
    )
    ended = typed(*RUN, *more, "train.steps=1", cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert digests(tmp_path / "saved") == digests(folder)
    [out] = tmp_path.glob("outputs/*/*")
    assert f"model saved in {tmp_path / 'saved'}" in ended.out
    assert metrics(out)[0]["loss"] > 1


@pytest.mark.ranks
@pytest.mark.slow
def test_what_was_trained_is_what_is_saved(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama_tied", **VOCAB)
    losses = []
    for i, start in enumerate([folder, tmp_path / "saved0"]):
        more = (f"model.name={start}", "parallel=tp2", "train.steps=4", "optim.lr=1e-2", "optim.warmup=0")
        here = (f"hydra.run.dir={tmp_path / str(i)}", f"train.save={tmp_path / f'saved{i}'}")
        ended = typed(*RUN, *more, *here, cwd=tmp_path)
        assert ended.status == 0, ended.err
        losses.append([m["loss"] for m in metrics(tmp_path / str(i))])
    assert losses[0][-1] < losses[0][0] and losses[1][0] < losses[0][0] / 2  # it goes on from what was saved
    before, after = values(folder), values(tmp_path / "saved0")
    assert all(not torch.equal(before[k], after[k]) for k in before if k.endswith("proj.weight"))


@pytest.mark.ranks
def test_a_model_that_came_from_no_folder_is_saved_for_from_pretrained(tmp_path: Path) -> None:
    ended = typed(*RUN, "model=hf_llama", "parallel=fsdp2", "train.steps=1", "train.save=mine", cwd=tmp_path)
    assert ended.status == 0, ended.err
    _, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine", output_loading_info=True)
    assert not any(told.values()), told
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_is_wrong_is_said_before_a_rank_starts(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama", **VOCAB)
    edited(folder, lambda tensors: tensors.pop("model.norm.weight"))
    ended = typed(*RUN, f"model.name={folder}", "parallel=fsdp2", cwd=tmp_path)
    assert ended.status == 1 and "error[weights-missing]" in ended.err and "Traceback" not in ended.err
    assert "model.norm.weight" in ended.err and not ended.out
    ended = typed(
        *RUN, f"model.name={folder}", "train.pretrained=false", f"train.save={folder}", cwd=tmp_path
    )
    told = " ".join(ended.err.split())  # as wide as the name of the folder leaves room for
    assert ended.status == 1 and "error[weights-unwritable]" in told and "it exists already" in told


@pytest.mark.parametrize(
    ("override", "word"), [("train.save=[a]", "save"), ("train.pretrained=maybe", "pretrained")]
)
def test_settings_of_no_use_are_refused(override: str, word: str, tmp_path: Path) -> None:
    ended = typed(override, cwd=tmp_path)
    assert ended.status == 1 and f"error[wrong-type]: train.{word} is" in ended.err
