"""Tokenizers of transformers, from a `tokenizer.json`, a folder, or a hub id: the optional extra `hf`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.hugging_face.architecture import TARGET
from parallelizer.hugging_face.extra import not_installed
from parallelizer.training.data.files import FileRecord, read_document
from parallelizer.training.data.tokenizer import Tokenizer

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of these lies in every folder of a tokenizer."""

ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
"""What ends a document in the tokenizers of this world, looked for where a bare `tokenizer.json` does not say it."""

HELP = (
    "data.tokenizer takes a tokenizer.json, a folder of a tokenizer, or a hub id; null: bytes are the tokens"
)


class HuggingFaceTokenizer(Tokenizer):
    """`tokens` is a tokenizer of transformers. Nothing is put around a text but the separator behind it: its token for the end
    of a text. PlanError for one that has none.
    """

    def __init__(self, tokens: Any, name: str, files: tuple[FileRecord, ...] = ()) -> None:
        self.tokens, self.name, self._files = tokens, name, files
        self.vocab_size = len(tokens)
        known = tokens.get_vocab()
        ends = [tokens.eos_token_id, *(known.get(end) for end in ENDS)]
        found = next((end for end in ends if end is not None), None)
        if found is None:
            raise _unreadable(
                name, f"it has no token that ends a document (an eos_token, or one of {', '.join(ENDS)})"
            )
        self.separator = int(found)

    def encode(self, documents: Sequence[bytes]) -> list[Tensor]:
        texts = [document.decode(errors="replace") for document in documents]
        fast = getattr(self.tokens, "backend_tokenizer", None)
        if fast is not None:  # in threads, and without transformers' remark on long texts
            ids = [each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            ids = [self.tokens.encode(text, add_special_tokens=False) for text in texts]
        # Ranks are forked from this process: threads of the tokenizer's do not live on there.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return [torch.tensor(each, dtype=torch.int32) for each in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokens.decode(list(tokens), clean_up_tokenization_spaces=False))

    def refuses(self, document: bytes) -> str | None:
        if 0 in document:
            return "it holds a zero byte, so it is no text"
        try:
            document.decode()
        except UnicodeDecodeError as error:
            return f"byte {error.start} is not UTF-8, and a tokenizer reads text"
        return None

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self._files


def load(choice: str) -> HuggingFaceTokenizer:
    """PlanError `tokenizer-unreadable` without transformers, without such a tokenizer, or without an end of documents."""
    path = Path(choice).expanduser()
    if not path.exists() and (
        choice.startswith((".", "/", "~")) or choice.count("/") > 1 or path.suffix == ".json"
    ):
        raise _unreadable(choice, "there is no such file or folder")
    try:
        import transformers

        from parallelizer.hugging_face.build import hub_answers
    except ImportError:
        raise _unreadable(choice, not_installed("transformers")) from None
    if path.is_dir() and not has_tokenizer(path):
        raise _unreadable(choice, f"the folder has none of {', '.join(FILES)}")
    here = path.exists() or not hub_answers()
    tokens: Any
    try:
        if path.is_file():
            tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            name = str(path) if path.is_dir() else choice
            tokens = transformers.AutoTokenizer.from_pretrained(name, local_files_only=here)
    except Exception as error:  # whatever its readers raise for a file that they do not understand
        told = str(error).strip().splitlines() or [type(error).__name__]
        reason = (
            told[0] if path.exists() or not here else "there is no such folder, and the hub cannot be reached"
        )
        raise _unreadable(choice, reason) from None
    return HuggingFaceTokenizer(tokens, choice, _records(path))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


def of_model(model: Mapping[str, Any]) -> str | None:
    """The tokenizer that a configured model comes with: the folder or hub id `model.name`; None where it has none."""
    name = model.get("name")
    if model.get("_target_") != TARGET or not name:
        return None
    folder = Path(str(name)).expanduser()
    return str(name) if not folder.is_dir() or has_tokenizer(folder) else None


def _records(path: Path) -> tuple[FileRecord, ...]:
    """The files of a local tokenizer; a text must be read by the same one when a run goes on."""
    named = [path] if path.is_file() else [path / name for name in FILES]
    return tuple(read_document(file).file for file in named if file.is_file())


def _unreadable(choice: str, reason: str) -> PlanError:
    message = f"data.tokenizer={choice} cannot be used: {reason}"
    return PlanError([Diagnostic("tokenizer-unreadable", message, help=HELP)])
