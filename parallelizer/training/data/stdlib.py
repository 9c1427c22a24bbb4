"""The source of Python's standard library: text that exists offline on every machine with Python."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.data import text
from parallelizer.training.data.choose_tokenizer import tokenizer_of
from parallelizer.training.data.corpus import Data, build, stable_hash
from parallelizer.training.data.files import Document, read_document
from parallelizer.training.data.packing import pack

# Folders of what is not the library's own, its tests, and two that hold tables rather than programs.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


def load(
    *,
    max_bytes: int,
    heldout: float,
    path: str | None = None,
    tokenizer: str | None = None,
    documents: bool = False,
) -> Data:
    """At most `max_bytes` of the library, whole files; a share `heldout` of the files is held out.

    Which files are taken, and which of them are held out, depends on hashes of their relative paths.
    With `path`, the text there is read instead, whole. PlanError when there is nothing to read.
    """
    if path is not None:
        return text.load(path=path, heldout=heldout, tokenizer=tokenizer, documents=documents)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = source_files(root)
    if not files:
        message = f"this Python has no source of its standard library in {root}"
        raise PlanError(
            [Diagnostic("data-not-found", message, help="give a text with data.path=FILE_OR_FOLDER")]
        )
    tokens_of = tokenizer_of(tokenizer)
    found = read(root, files, max_bytes)
    train = pack((found[name].content for name in found if not is_heldout(name, heldout)), tokens_of)
    held = pack((found[name].content for name in found if is_heldout(name, heldout)), tokens_of)
    read_from = (document.file for document in found.values())
    return build(train, held, "the standard library", read_from, tokens_of, documents=documents)


def source_files(root: Path) -> list[str]:
    """The paths below `root`, with slashes and sorted, of the library's own modules."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        below = Path(folder).relative_to(root)
        found += [(below / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def read(root: Path, files: list[str], max_bytes: int) -> dict[str, Document]:
    """Files drawn in the order of a hash until the next would pass `max_bytes`; by path, sorted.

    The hash is not the one of `is_heldout`, which would then draw no held-out file, or only those.
    """
    documents: dict[str, Document] = {}
    total = 0
    for name in sorted(files, key=lambda name: stable_hash("draw " + name)):
        document = read_document(root / name)
        total += document.file.size
        if total > max_bytes:
            break
        documents[name] = document
    return dict(sorted(documents.items()))


def is_heldout(name: str, share: float) -> bool:
    """Whether the file is kept from training."""
    return stable_hash(name) < share
