"""Text through tokenizers of transformers, made here: what tokens a text becomes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data import text
from parallelizer.training.data.choose_tokenizer import tokenizer_of, with_tokenizer
from parallelizer.training.data.corpus import Data
from parallelizer.training.data.packing import pack
from parallelizer.training.data.tokenizer import BYTES
from parallelizer.training.job.prepare import prepare
from tests.recipes.runs import ROOT, SMALL
from tests.training.data.tokenizers_made import END, VOCABULARY, bare

pytest.importorskip("transformers", reason="the optional extra `hf`")


def saved(folder: Path, **more: Any) -> Path:
    """A folder of one, as transformers saves it."""
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    PreTrainedTokenizerFast(tokenizer_file=str(bare(folder)), **more).save_pretrained(folder)
    return folder


def refused(choice: str) -> str:
    with pytest.raises(PlanError) as caught:
        tokenizer_of(choice)
    [found] = caught.value.diagnostics
    assert found.code == "tokenizer-unreadable" and found.help
    return found.message


def test_a_text_comes_back_and_documents_end_with_the_separator(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    ours, theirs = tokenizer_of(str(bare(tmp_path))), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = "Licensor grants — für alle — a license.\n\tTwice."
    [tokens] = ours.encode([words.encode()])
    assert tokens.tolist() == theirs.encode(words).ids and len(tokens) < len(words.encode())
    assert ours.decode(tokens.tolist()) == words
    end = theirs.token_to_id(END)
    assert (ours.separator, ours.vocab_size, ours.unit) == (end, VOCABULARY, "token")
    packed = pack([b"a", words.encode()], ours)
    assert packed.tolist() == [*theirs.encode("a").ids, end, *tokens.tolist(), end]
    assert packed.dtype == torch.int32 and pack([], ours).tolist() == []


def test_a_folder_s_own_end_of_text_separates(tmp_path: Path) -> None:
    plain = tokenizer_of(str(saved(tmp_path / "plain", eos_token=END)))
    other = tokenizer_of(str(saved(tmp_path / "other", eos_token="e")))
    assert plain.decode([plain.separator]) == END and other.decode([other.separator]) == "e"


def test_a_text_is_read_through_it_and_its_file_is_one_of_the_data_s(tmp_path: Path) -> None:
    path = bare(tmp_path)
    data = text.load(path=str(ROOT / "LICENSE"), heldout=0.2, tokenizer=str(path))
    ours = tokenizer_of(str(path))
    whole = torch.cat([data.train, data.heldout]).tolist()
    assert ours.decode(whole[:-1]) == (ROOT / "LICENSE").read_text() and whole[-1] == ours.separator
    assert data.baseline.unit == "nats a token" and data.vocab_size == VOCABULARY
    assert {Path(file.path).name for file in data.files} == {"LICENSE", "tokenizer.json"}
    assert data.fingerprint() != text.load(path=str(ROOT / "LICENSE"), heldout=0.2).fingerprint()


def test_what_is_no_text_is_refused_at_its_byte(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("Schl\xfcssel".encode("latin-1"))
    path = bare(tmp_path)
    with pytest.raises(PlanError, match="byte 4 is not UTF-8"):
        text.load(path=str(tmp_path / "latin"), heldout=0.2, tokenizer=str(path))
    assert isinstance(text.load(path=str(tmp_path / "latin"), heldout=0.5), Data)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallelizer.hugging_face import build

    monkeypatch.setattr(build, "hub_answers", lambda: False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text(json.dumps({"model": 3}))
    assert "there is no such file" in refused("./nowhere")
    assert "there is no such file" in refused("nowhere.json")
    assert "has none of tokenizer.json" in refused(str(tmp_path / "empty"))
    assert "cannot be used" in refused(str(tmp_path / "broken.json"))
    assert "hub cannot be reached" in refused("nobody/has-this")
    assert "no token that ends a document" in refused(str(bare(tmp_path, end=None)))


def test_auto_is_the_tokenizer_that_a_pretrained_model_comes_with(tmp_path: Path) -> None:
    folder, target = saved(tmp_path / "tok"), "parallelizer.hugging_face.causal_lm"
    (tmp_path / "bare").mkdir()
    data = OmegaConf.create({"_target_": "x", "tokenizer": "auto"})
    assert with_tokenizer(data, {"_target_": target, "name": str(folder)}).tokenizer == str(folder)
    assert with_tokenizer(data, {"_target_": target, "name": "some/hub-id"}).tokenizer == "some/hub-id"
    assert with_tokenizer(data, {"_target_": target, "name": str(tmp_path / "bare")}).tokenizer is None
    assert with_tokenizer(data, {"_target_": target, "name": None}).tokenizer is None
    assert with_tokenizer(data, {"_target_": "mine.Model"}).tokenizer is None
    data.tokenizer = None
    assert with_tokenizer(data, {"_target_": target, "name": str(folder)}).tokenizer is None
    assert tokenizer_of("auto") is BYTES and tokenizer_of(None) is BYTES


@pytest.mark.parametrize("model", ["llama_debug", "hf_llama"])
def test_a_vocabulary_that_is_too_small_is_refused_before_a_rank_starts(tmp_path: Path, model: str) -> None:
    size = "model.config.vocab_size" if model == "hf_llama" else "model.vocab_size"
    sizes = [word for word in SMALL if not word.startswith("model.")]
    words = [f"model={model}", *sizes, f"data.tokenizer={bare(tmp_path)}"]
    with pytest.raises(PlanError) as caught:
        prepare(*compose_config([*words, f"{size}={VOCABULARY - 1}"]), tmp_path)
    [found] = caught.value.diagnostics
    assert found.code == "data-mismatch" and "below 320, and the model's vocabulary is 319" in found.message
    assert prepare(*compose_config([*words, f"{size}={VOCABULARY}"]), tmp_path).data.unit == "tokens"
