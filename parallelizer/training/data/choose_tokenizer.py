"""The tokenizer of a text: the configured one, or the model's own; and its files next to a saved model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from parallelizer.training.data.tokenizer import AUTO, BYTES, Tokenizer


def tokenizer_of(choice: str | None) -> Tokenizer:
    """What `data.tokenizer` names: null, and `auto` where no model has settled it, is bytes; else a `tokenizer.json`, a folder
    of a tokenizer, or a hub id. PlanError `tokenizer-unreadable` where there is none.
    """
    if choice is None or choice == AUTO:
        return BYTES
    from parallelizer.training.data.hf_tokenizer import load

    return load(str(choice))


def with_tokenizer(data: DictConfig, model: Mapping[str, Any]) -> DictConfig:
    """The configuration's `data` with `tokenizer: auto` settled: that of the pretrained model, or null, which is bytes."""
    if OmegaConf.select(data, "tokenizer") != AUTO:
        return data
    from parallelizer.training.data.hf_tokenizer import of_model

    settled: DictConfig = copy.deepcopy(data)  # it knows where it stands, for its interpolations
    settled.tokenizer = of_model(model)
    return settled


def save_tokenizer(choice: str | None, folder: Path) -> None:
    """Put the tokenizer that `data.tokenizer` names beside a saved model, which is of no use without; nothing where that came
    with its own, or was trained on bytes.
    """
    if choice is None or choice == AUTO:
        return
    from parallelizer.training.data.hf_tokenizer import has_tokenizer, load

    if not has_tokenizer(folder):
        load(str(choice)).tokens.save_pretrained(str(folder))
