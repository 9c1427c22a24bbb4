"""What builds a transformers model, and what is said where it cannot be built."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.hugging_face import build, causal_lm

transformers = pytest.importorskip("transformers", reason="the optional extra `hf`")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {"model_type": "llama", **SIZES}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(build.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(build, "getproxies", dict)


def built(**arguments: Any) -> Any:
    with torch.device("meta"):
        return causal_lm(**arguments)


def test_from_a_config_on_our_attention_and_without_a_cache() -> None:
    model = built(config=LLAMA)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config._attn_implementation == "parallelizer" and model.config.use_cache is False
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


def test_from_a_folder_whose_sizes_a_config_changes(tmp_path: Path, no_network: None) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert built(name=str(tmp_path)).config.hidden_size == 16
    model = built(name=str(tmp_path), config={"hidden_size": 8})
    assert (model.config.hidden_size, model.config.vocab_size) == (8, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "the model config chooses no transformers model: it needs a name, or a config with a model_type"),
        ({"config": SIZES}, "chooses no transformers model"),
        ({"config": {"model_type": "lama"}}, "has no model_type 'lama'; did you mean llama?"),
        ({"config": {"model_type": "zzzzzzzz"}}, "has no model_type 'zzzzzzzz'"),
        ({"config": LLAMA, "auto": "AutoModelForCausalML"}, "no class AutoModelForCausalML; did you mean AutoModelForCausalLM?"),
        ({"config": LLAMA, "auto": "LlamaConfig"}, "transformers has no class LlamaConfig"),
        ({"config": {"model_type": "vit"}}, "set another class with model.auto, for example AutoModelForImageClassification"),
        ({"config": LLAMA, "dtype": "float31"}, "torch has no dtype 'float31'"),
        ({"config": LLAMA | {"hidden_size": "x"}}, "'hidden_size' expected int, got str"),
        ({"config": LLAMA, "attention": "fast"}, "is not supported"),
        ({"name": "./nowhere"}, "there is no folder ./nowhere"),
        ({"name": "some/model"}, "there is no folder some/model, no local copy of it exists, and the Hugging Face hub cannot be"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_said_in_one_line(
    arguments: dict[str, Any], message: str, no_network: None
) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError) as caught:
        built(**arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450
    assert time.monotonic() - begun < 10  # the hub's client would ask five times, with pauses


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        built(name=str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"cannot be read"):
        built(name=str(tmp_path))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'path/to/parallelizer\[hf\]'"):
        causal_lm(config=LLAMA)


def test_transformers_remarks_on_a_small_vocabulary_are_not_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    before = transformers.logging.get_verbosity()
    built(config={"model_type": "opt", "vocab_size": 8, "hidden_size": 16, "word_embed_proj_dim": 16,
                  "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 9999})  # fmt: skip
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.get_verbosity() == before


def said(*overrides: str) -> Diagnostic:
    """The one thing that `validate` says."""
    with pytest.raises(PlanError) as caught:
        from_config(*compose_config(overrides, None)).build_model()
    [found] = caught.value.diagnostics
    return found


@pytest.mark.parametrize(
    ("overrides", "code", "message", "help_text"),
    [
        (["model=hf"], "model-build", "chooses no transformers model", "set model.name=<folder or hub id>, or"),
        (["model=hf", "model.config={model_type: lama}"], "model-build", "has no model_type 'lama'", "did you mean llama?"),
        (["model=hf", "model.config={model_type: bloom}"], "plan-not-found",
         "no plan is shipped for model_type 'bloom'", "`python -m parallelizer init model=hf ... --output FILE`"),
        (["model=hf", "model.name=some/model"], "plan-not-found", "which plan some/model takes is not known",
         "as in plan=hf_llama"),
        (["model=hf", "model.name=./nowhere"], "model-build", "there is no folder ./nowhere", "set model.name=<folder"),
        (["model=hf", "model.name=./nowhere", "plan=hf_llama"], "model-build", "there is no folder ./nowhere", ""),
        (["model=hf_llama", "plan=hf_lama"], "plan-not-found", "there is no plan named 'hf_lama'", "did you mean hf_llama?"),
    ],
)  # fmt: skip
def test_a_command_says_what_to_set(overrides: list[str], code: str, message: str, help_text: str) -> None:
    found = said(*overrides)
    assert found.code == code and message in found.message and help_text in (found.help or "")
    assert found.span is not None


def test_nothing_but_json_is_printed_where_json_is_asked_for() -> None:
    command = [
        sys.executable,
        "-m",
        "parallelizer",
        "validate",
        "--no-proof",
        "--json",
        "model=hf_opt",
        "train.seq_len=64",
    ]
    done = subprocess.run(
        [*command, "model.config.vocab_size=128"], capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout)["valid"] is True, done.stderr
    assert done.stderr == ""


def test_a_size_that_the_configuration_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaConfig has no 'hiden_size'; did you mean hidden_size"):
        causal_lm(config={"model_type": "llama", "hiden_size": 64})
