"""A user's text: one file, or all files below a folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torch import Tensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.data.choose_tokenizer import tokenizer_of
from parallelizer.training.data.corpus import Data, build, stable_hash
from parallelizer.training.data.files import Document, read_document
from parallelizer.training.data.packing import pack
from parallelizer.training.data.tokenizer import BYTES, Tokenizer

GIVE_PATH = "data.path takes a text file, or a folder of text files, relative to the current directory"


def load(*, path: str | None, heldout: float, tokenizer: str | None = None, documents: bool = False) -> Data:
    """Reads `path` whole, as bytes or the tokens of a `tokenizer`, its files in the order of a hash; the last share `heldout`
    is held out.

    So one file is enough; the cut may fall inside a document. Hidden and empty files are passed over.
    PlanError: `data-not-found`, `data-unreadable` (every unreadable file at once), `data-changed` (while it is
    read), `data-too-short`, `tokenizer-unreadable`.
    """
    path = "" if path is None else str(path)  # a folder called 2024 is a number to the configuration
    tokens_of = tokenizer_of(tokenizer)
    found = read(path, tokens_of)
    tokens = pack((found[name].content for name in sorted(found, key=stable_hash)), tokens_of)
    train, held = parted(tokens, heldout)
    files = (document.file for document in found.values())
    return build(train, held, path, files, tokens_of, documents=documents)


def parted(tokens: Tensor, heldout: float) -> tuple[Tensor, Tensor]:
    """What is trained on, and the last share, which is held out."""
    cut = len(tokens) - round(heldout * len(tokens))
    return tokens[:cut], tokens[cut:]


def read(path: str, tokenizer: Tokenizer = BYTES) -> dict[str, Document]:
    """Every file that is not empty by its relative name. PlanError as in `load`."""
    problems: list[Diagnostic] = []
    documents = {}
    for name, file in find(path, problems):
        try:
            document = read_document(file)
        except OSError as error:
            problems.append(unreadable(file, error.strerror or str(error)))
            continue
        except PlanError as error:
            problems += error.diagnostics
            continue
        if (reason := tokenizer.refuses(document.content)) is not None:
            problems.append(unreadable(file, reason))
        elif document.content:
            documents[name] = document
    if problems:
        raise PlanError(problems)
    if not documents:
        raise PlanError([Diagnostic("data-too-short", f"data.path {path} holds no text", help=GIVE_PATH)])
    return documents


def find(path: str, problems: list[Diagnostic]) -> list[tuple[str, Path]]:
    """Relative names and paths of the regular files at or below `path`; what is wrong goes to `problems`."""
    root = Path(os.path.expanduser(path))
    try:
        mode = os.stat(root).st_mode if path else None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero character
        mode = None
    except OSError as error:
        problems.append(unreadable(root, error.strerror or str(error)))
        return []
    if mode is None:
        problems.append(Diagnostic("data-not-found", f"data.path '{path}' does not exist", help=GIVE_PATH))
        return []
    if stat.S_ISREG(mode):
        return [(root.name, root)]
    if not stat.S_ISDIR(mode):  # reading a pipe or a device might never end
        problems.append(unreadable(root, "it is neither a file nor a folder"))
        return []
    return below(root, problems)


def below(root: Path, problems: list[Diagnostic]) -> list[tuple[str, Path]]:
    """As `find`, for a folder. Links to folders are not followed."""

    def failed(error: OSError) -> None:
        problems.append(unreadable(Path(error.filename), error.strerror or str(error)))

    found = []
    for folder, subfolders, files in os.walk(root, onerror=failed):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = [Path(folder) / name for name in files if not name.startswith(".")]
        found += [(file.relative_to(root).as_posix(), file) for file in paths if os.path.isfile(file)]
    return found


def unreadable(file: Path, reason: str) -> Diagnostic:
    return Diagnostic("data-unreadable", f"{file} cannot be read: {reason}", help=GIVE_PATH)
