"""A run that is started again: it goes on where it was, under another plan, with another batch, or says why not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from parallelizer.runtime.checkpoint.folder import steps_in
from parallelizer.runtime.checkpoint.loading import open_checkpoint
from tests.recipes.runs import ROOT, SMALL, metrics, run_here, typed

pytestmark = pytest.mark.ranks

FAMILIES = sorted(
    path.stem
    for path in (ROOT / "configs/model").glob("*.yaml")
    if path.stem.startswith(("hf_", "vit", "enc", "ali"))
)
DATA = {
    "vit_tiny": ["data=images"],
    "encoder_decoder_tiny": ["data=halves", f"data.path={ROOT / 'LICENSE'}"],
    "hf_llama_packed": ["data.documents=true", f"data.path={ROOT / 'LICENSE'}"],
}
RUN = (*SMALL, "hydra.run.dir=run", "train.log_every=0", "train.checkpoint_every=2")


def losses(folder: Path) -> list[float]:
    return [m["loss"] for m in metrics(folder / "run")]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks."""
    folder = tmp_path_factory.mktemp("four")
    ended = typed(*RUN, "parallel=fsdp2", "train.steps=4", cwd=folder)
    assert ended.status == 0, ended.err
    return folder


@pytest.fixture
def here(four: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(four, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_it_goes_on_under_another_preset_and_says_so(here: Path) -> None:
    again = typed(*RUN, "parallel=tp2", "train.steps=7", cwd=here)
    assert again.status == 0, again.err
    assert "resuming after step 4 from run/checkpoints/step_4, saved on dp_shard=2" in again.out
    assert [m["step"] for m in metrics(here / "run")] == list(range(1, 8))
    assert steps_in(here / "run/checkpoints") == [4, 6, 7]


@pytest.mark.slow
def test_a_checkpoint_has_the_fingerprint_of_the_proof(tmp_path: Path) -> None:
    words = (*RUN, "train.prove=auto", "parallel=tp2", "train.steps=2")
    ended = typed(*words, cwd=tmp_path)
    assert ended.status == 0, ended.err
    (name,) = set(re.findall(r"certificate (\w{12})", ended.out))
    assert str(open_checkpoint(tmp_path / "run/checkpoints/step_2").state["certificate"]).startswith(name)


def test_on_the_same_mesh_it_is_the_same_run_to_the_bit(tmp_path: Path) -> None:
    steady = (
        "parallel=fsdp2",
        "optim.final_ratio=1",
        "optim.warmup=1",
        "train.log_every=0",
        "train.checkpoint_every=2",
    )
    for name, every in {"whole": (5,), "parts": (2, 5)}.items():
        (tmp_path / name / "run").mkdir(parents=True)
        for steps in every:
            run_here(tmp_path / name / "run", *steady, f"train.steps={steps}")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (
        flat(read_by_torch(tmp_path / name / "run/checkpoints/step_5")) for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and len(whole) > 60
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def read_by_torch(checkpoint: Path) -> dict[str, Any]:
    """What torch's own tool makes of a checkpoint."""
    dcp_to_torch_save(checkpoint, checkpoint.with_suffix(".pt"))
    content: dict[str, Any] = torch.load(checkpoint.with_suffix(".pt"), weights_only=True)
    assert content.keys() == {"model", "optimizer", "random"}
    return content


def flat(content: dict[str, Any], name: str = "") -> dict[str, torch.Tensor]:
    """Nested dictionaries of tensors by their paths."""
    found: dict[str, torch.Tensor] = {}
    for key, value in content.items():
        found |= flat(value, f"{name}/{key}") if isinstance(value, dict) else {f"{name}/{key}": value}
    return found


def test_another_mesh_gives_the_same_losses_to_rounding(tmp_path: Path) -> None:
    steady = (*RUN, "optim.final_ratio=1", "optim.warmup=1")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert typed(*steady, "train.steps=5", cwd=tmp_path / "whole").status == 0
    assert typed(*steady, "train.steps=2", "parallel=cp2", cwd=tmp_path / "parts").status == 0
    assert typed(*steady, "train.steps=5", "parallel=tp2", cwd=tmp_path / "parts").status == 0
    torch.testing.assert_close(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-5, atol=0)


def test_a_finished_run_says_so_and_changes_nothing(here: Path) -> None:
    before = losses(here)
    ended = typed(*RUN, "parallel=fsdp2", "train.steps=4", cwd=here)
    assert ended.status == 0 and "no step was left to train: all 4 are done" in ended.out
    assert losses(here) == before and steps_in(here / "run/checkpoints") == [2, 4]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("model.dim=32",), "checkpoint-mismatch", "the checkpoint is of another size"),
        (("train.seed=1",), "resume-data", "train.seed is 1, and the checkpoint was trained with 0"),
        (("train.resume=never",), "checkpoint-exists", "up to step 4"),
        (("train.resume=nowhere", "train.checkpoint_dir=new"), "checkpoint-not-found", "does not exist"),
    ],
)
def test_what_does_not_fit_is_told_before_a_rank_starts(
    words: tuple[str, ...], code: str, said: str, here: Path
) -> None:
    ended = typed(*RUN, "parallel=fsdp2", "train.steps=6", *words, cwd=here)
    assert ended.status == 1 and f"error[{code}]" in ended.err and said in " ".join(ended.err.split())
    assert "Traceback" not in ended.err and len(losses(here)) == 4


def test_what_begins_anew_goes_on_all_the_same_when_its_job_is_queued_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ended = typed(*RUN, "parallel=fsdp2", "train.steps=5", "train.resume=never", cwd=here)
    assert ended.status == 0 and "resuming after step 4" in ended.out


def test_a_damaged_newest_one_is_passed_over_and_a_named_one_refused(here: Path) -> None:
    newest = here / "run/checkpoints/step_4"
    part = newest / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    named = typed(*RUN, "train.checkpoint_dir=other", f"train.resume={newest}", "train.steps=6", cwd=here)
    assert named.status == 1 and "error[checkpoint-damaged]: __1_0.distcp holds other bytes" in named.err
    ended = typed(*RUN, "parallel=fsdp2", "train.steps=6", cwd=here)
    assert ended.status == 0 and "warning[checkpoint-damaged]" in ended.err
    assert "resuming after step 2" in ended.out and [m["step"] for m in metrics(here / "run")] == [
        *range(1, 7)
    ]


def test_a_run_starts_from_another_ones_output_folder_and_then_goes_on_with_its_own(here: Path) -> None:
    words = (
        *SMALL,
        "hydra.run.dir=mine",
        "train.log_every=0",
        "train.checkpoint_every=1",
        "train.resume=run",
    )
    first = typed(*words, "train.steps=5", cwd=here)
    assert first.status == 0 and "from run/checkpoints/step_4" in first.out
    second = typed(*words, "train.steps=6", cwd=here)
    assert second.status == 0 and "from mine/checkpoints/step_5" in second.out
    assert [m["step"] for m in metrics(here / "mine")] == [5, 6]


def test_a_changed_text_stops_the_run_at_its_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words to learn from. " * 200)
    run = (*RUN, "data=text", "data.path=text.txt", "train.steps=4")
    assert typed(*run, cwd=tmp_path).status == 0
    (tmp_path / "text.txt").write_text("other words to learn from, " * 200)
    ended = typed(*run, "train.steps=8", cwd=tmp_path)
    assert ended.status == 1 and "error[resume-data]: text.txt" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_goes_on_under_another_preset(model: str, tmp_path: Path) -> None:
    if model.startswith("hf_"):
        pytest.importorskip("transformers", reason="the model is one of transformers")
    steady = (
        f"model={model}",
        *DATA.get(model, [f"data.path={ROOT / 'LICENSE'}"]),
        *(
            "optim.final_ratio=1",
            "optim.warmup=1",
            "train.batch_size=4",
            "train.eval_batches=1",
            "device=cpu",
        ),
        *("hydra.run.dir=run", "train.log_every=0", "train.checkpoint_every=2"),
        *(() if model == "vit_tiny" else ("train.seq_len=32",)),
    )
    (tmp_path / "whole").mkdir()
    assert typed(*steady, "train.steps=4", cwd=tmp_path / "whole", timeout=300).status == 0
    for steps, preset in ((2, "tp2"), (4, "fsdp2_tp2" if model == "hf_bert" else "fsdp2_cp2_tp2")):
        ended = typed(*steady, f"parallel={preset}", f"train.steps={steps}", cwd=tmp_path, timeout=300)
        assert ended.status == 0, ended.err
    torch.testing.assert_close(losses(tmp_path), losses(tmp_path / "whole"), rtol=2e-6, atol=0)


def test_what_differs_from_the_checkpoint_is_told_in_a_line(here: Path) -> None:
    again = typed(*RUN, "parallel=fsdp4", "train.steps=5", "optim.lr=1e-4", cwd=here)
    [line] = [line for line in again.out.splitlines() if line.startswith("changed since the checkpoint")]
    assert "mesh dp_shard=2 -> dp_shard=4" in line and "-> 0.0001" in line
    same = typed(*RUN, "parallel=fsdp4", "train.steps=6", "optim.lr=1e-4", cwd=here)
    assert "resuming after step 5" in same.out
    assert (
        "changed since the checkpoint: train.steps 5 -> 6 (over which the learning rate is scheduled)\n"
        in same.out
    )


def test_a_finished_run_that_saved_its_model_is_no_mistake_when_it_is_started_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = ("model=hf_llama", "hydra.run.dir=run", "train.seq_len=16", "train.batch_size=4", "device=cpu")
    run += ("train.checkpoint_every=2", "train.steps=2", "train.save=tuned", f"data.path={ROOT / 'LICENSE'}")
    run += ("train.compare=false",)
    first = typed(*run, cwd=tmp_path)
    assert first.status == 0 and "model saved in tuned\n" in first.out, first.err
    again = typed(*run, cwd=tmp_path)
    assert again.status == 0, again.err
    assert "no step was left to train" in again.out
    assert "model saved in tuned, by an earlier run" in again.out
    before = (tmp_path / "tuned" / "model.safetensors").read_bytes()
    more = typed(*run, "train.steps=3", cwd=tmp_path)  # its own model, trained further
    assert more.status == 0 and "model saved in tuned\n" in more.out, more.err
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.glob(".tuned*")] == []
    other = typed(*run, "hydra.run.dir=other", cwd=tmp_path)
    assert other.status == 1 and "error[weights-unwritable]" in other.err
