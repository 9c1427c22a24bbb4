"""A small tokenizer, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recipes.runs import ROOT

VOCABULARY = 320
END = "<|endoftext|>"


def bare(folder: Path, end: str | None = END) -> Path:
    """A `tokenizer.json` of byte pairs, trained on the license."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[end] if end else [],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train([str(ROOT / "LICENSE")], trainer)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path
