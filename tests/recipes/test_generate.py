"""Sampling from a run's checkpoint: the same text under every preset, and what is refused before a rank starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.job.recipe_file import recipe_of
from parallelizer.training.sampling.job import SamplingJob
from parallelizer.training.sampling.prepare import prepare, read_words
from recipes.generate import generate
from tests.recipes.runs import ROOT, SMALL, run_here, typed
from tests.training.data.tokenizers_made import VOCABULARY, bare

PROMPT = "def main(arguments: list[str], *, folder: Path) -> int:"
COUNT = 14
"""Tokens: more than the first length, 64, has room for."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model has random values still, so that its text is no run of blanks."""
    folder = tmp_path_factory.mktemp("run")
    run_here(
        folder, *SMALL, "train.steps=1", "optim.lr=0", "train.checkpoint_every=1", "model.max_seq_len=128"
    )
    return folder


def prepared(folder: Path, *words: str) -> SamplingJob:
    """The job of a command, its configuration laid out in `folder`."""
    folder.mkdir()
    return prepare(read_words([*words, "device=cpu"], recipe_of(generate, "generate")), folder)


def text(job: SamplingJob) -> list[list[int]]:
    """What the ranks make, which must be alike."""
    world = job.setup.mesh.world_size
    first, *others = launch.start(
        generate, (job,), ranks=world, device="cpu", start_timeout=60, collective_timeout=60
    )
    assert all(other == first for other in others)
    return first


def likeliest(run: Path) -> list[int]:
    """The greedy text, from the plain model on the text alone: no plan, no padding, no sampling code."""
    setup = from_config(*compose_config([*SMALL, "model.max_seq_len=128"]))
    model = setup.build_model().to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    load_checkpoint(run / "checkpoints/step_1", model)
    tokens = list(PROMPT.encode())
    with torch.no_grad():
        for _ in range(COUNT):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.ranks
def test_the_greedy_text_is_the_plain_model_s_under_every_preset(run: Path, tmp_path: Path) -> None:
    expected = likeliest(run)
    assert len(set(expected)) > 3
    words = [f"checkpoint={run}", f"prompt={PROMPT}", "temperature=0", f"max_new_tokens={COUNT}"]
    for preset in ("single", "tp2", "cp2", "fsdp2_tp2", "pp2"):
        assert text(prepared(tmp_path / preset, *words, f"parallel={preset}")) == [expected], preset


@pytest.mark.ranks
def test_a_seed_s_texts_are_the_same_on_other_ranks(run: Path, tmp_path: Path) -> None:
    words = [f"checkpoint={run}", "samples=2", "max_new_tokens=12", "seed=5"]
    one = text(prepared(tmp_path / "one", *words))
    assert one == text(prepared(tmp_path / "two", *words, "parallel=cp2")) and one[0] != one[1]
    assert text(prepared(tmp_path / "other", *words[:3])) != one


@pytest.mark.ranks
def test_the_text_goes_to_stdout_and_all_else_to_stderr(run: Path, tmp_path: Path) -> None:
    words = (f"checkpoint={run}", f"prompt='{PROMPT}'", "max_new_tokens=5", "device=cpu")
    ended = typed(*words, cwd=tmp_path, module="recipes.generate")
    assert ended.status == 0, ended.err
    assert ended.out.startswith(PROMPT) and ended.out.endswith("\n")
    assert re.fullmatch(r"from .*/checkpoints/step_1, on 1 rank\n\d bytes in [\d.]+ s\n", ended.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_a_saved_model_comes_with_its_tokenizer_and_goes_on_under_any_preset(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    path, target = bare(tmp_path), tmp_path / "saved"
    words = [
        "model=hf_llama",
        f"model.config.vocab_size={VOCABULARY}",
        "train.seq_len=32",
        "train.batch_size=4",
    ]
    words += ["train.steps=1", "device=cpu", f"data.path={ROOT / 'LICENSE'}", "train.eval_batches=1"]
    ran = typed(
        *words,
        f"data.tokenizer={path}",
        f"train.save={target}",
        f"hydra.run.dir={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    assert ran.status == 0, ran.err
    path.unlink()
    again = ["max_new_tokens=4", "temperature=0", "prompt=the License"]
    one, two = (
        prepared(tmp_path / preset, f"checkpoint={target}", *again, f"parallel={preset}")
        for preset in ("single", "tp2")
    )
    assert one.tokenizer.vocab_size == VOCABULARY and len(one.prompt) < len("the License")
    assert text(one) == text(two)


def test_a_text_ends_where_the_model_s_positions_do(run: Path, tmp_path: Path) -> None:
    words = [f"checkpoint={run}", f"prompt={'a' * 126}", "max_new_tokens=99", "temperature=0"]
    assert len(text(prepared(tmp_path / "long", *words))[0]) == 3


def test_a_model_that_sees_what_is_behind_is_refused(run: Path, tmp_path: Path) -> None:
    job = prepared(tmp_path / "a", f"checkpoint={run}")
    setup = replace(job.setup, model={**job.setup.model, "_target_": f"{__name__}.seeing_all"})
    with pytest.raises(PlanError, match="does not write from left to right"):
        text(replace(job, setup=setup))


def seeing_all(**arguments: object) -> torch.nn.Module:
    """The model, without its causal mask."""
    from parallelizer.models.llama import Llama

    class All(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    model = Llama(**arguments)  # type: ignore[arg-type]
    for layer in model.layers:
        layer.attention.inner = All()
    return model


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], "checkpoint-not-found", "no checkpoint is given"),
        (["checkpoint=nowhere"], "checkpoint-not-found", "checkpoint=nowhere does not exist"),
        (["checkpoint=RUN", "model=vit_tiny"], "data-mismatch", "the model takes images, labels"),
        (["checkpoint=RUN", "model=encoder_decoder_tiny"], "data-mismatch", "takes decoder_input_ids"),
        (["checkpoint=RUN", f"prompt={'a' * 129}"], "prompt-invalid", "129 bytes, and the model takes 128"),
        (["checkpoint=RUN", "parallel=cp2", "model.max_seq_len=127", f"prompt={'a' * 125}"], "prompt-invalid", "takes 124"),
        (["checkpoint=RUN", "prompt=é", "model.vocab_size=128"], "prompt-invalid", "the byte 195, and the model's"),
        (["checkpoint=RUN", "model.dim=128"], "checkpoint-mismatch", "of another size"),
        (["checkpoint=RUN", "temperature=-1"], "wrong-type", "temperature is -1"),
        (["checkpoint=RUN", "top_p=0"], "wrong-type", "top_p is 0"),
        (["checkpoint=RUN", "+temprature=1"], "unknown-key", "temprature"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_a_rank_starts(
    run: Path, tmp_path: Path, words: list[str], code: str, said: str
) -> None:
    with pytest.raises(PlanError) as caught:
        prepared(tmp_path / "laid out", *(word.replace("RUN", str(run)) for word in words))
    assert [(d.code, said in d.message) for d in caught.value.diagnostics] == [(code, True)]
    assert caught.value.diagnostics[0].help
