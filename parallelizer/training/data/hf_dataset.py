"""The texts of a dataset that Hugging Face's `datasets` reads from disk or from the hub: the optional extra
`hf`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.hugging_face.extra import not_installed
from parallelizer.training.data.choose_tokenizer import tokenizer_of
from parallelizer.training.data.corpus import Data, build
from parallelizer.training.data.files import record_file
from parallelizer.training.data.packing import pack
from parallelizer.training.data.text import parted
from parallelizer.training.data.tokenizer import Tokenizer

KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
"""What `datasets` calls its readers, by the files that they read."""

SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` leaves in a folder: of several splits, and of one."""

ROWS = 1000
"""Rows that are read at a time."""

HELP = (
    "data.path takes what save_to_disk made, a file or folder of .jsonl, .parquet, .csv or .txt, or a hub id"
)


def load(
    *,
    path: str,
    split: str,
    column: str,
    heldout: float,
    name: str | None = None,
    tokenizer: str | None = None,
    documents: bool = False,
) -> Data:
    """Each row's text is a document; the rows follow each other in their order, and the last share `heldout` of the tokens is
    held out.

    PlanError: `data-not-found`, `data-unreadable`, `data-too-short`, `tokenizer-unreadable`.
    """
    path = str(path)
    rows, files = _opened(path, split, name)
    _check_column(rows, column, path)
    tokens_of = tokenizer_of(tokenizer)
    train, held = parted(pack(_texts(rows, column, tokens_of, path), tokens_of), heldout)
    return build(train, held, path, map(record_file, files), tokens_of, documents=documents)


def _opened(path: str, split: str, name: str | None) -> tuple[Any, list[Path]]:
    """A `datasets.Dataset`, and the files that it is in."""
    try:
        import datasets
    except ImportError:
        raise _unreadable(path, not_installed("datasets")) from None
    datasets.disable_progress_bars()
    place = Path(path).expanduser()
    try:
        if any((place / saved).is_file() for saved in SAVED):
            rows = datasets.load_from_disk(str(place))
            if isinstance(rows, datasets.DatasetDict):
                rows = _of_split(rows, split, path)
            return rows, _cached(rows)
        if place.exists():
            kind, files = _files(place)
            names = [str(file) for file in files]
            return datasets.load_dataset(kind, data_files=names, split=split), files
        if not _may_be_of_the_hub(path):
            message = f"data.path '{path}' does not exist, and the Hugging Face hub is not asked for it"
            raise PlanError([Diagnostic("data-not-found", message, help=HELP)])
        rows = datasets.load_dataset(path, name, split=split)
        return rows, _cached(rows)
    except PlanError:
        raise
    except Exception as error:  # whatever its readers raise for files that they do not understand
        told = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
        raise _unreadable(path, told[0] if told else type(error).__name__) from None


def _of_split(rows: Any, split: str, path: str) -> Any:
    if split not in rows:
        help_text = did_you_mean(split, list(rows), "there are")
        raise PlanError([Diagnostic("data-not-found", f"{path} has no split '{split}'", help=help_text)])
    return rows[split]


def _files(place: Path) -> tuple[str, list[Path]]:
    """The reader's name and the files, sorted, of one kind."""
    if place.is_file():
        found = [place]
    else:
        below = (file for file in sorted(place.rglob("*")) if file.is_file())
        found = [
            file for file in below if not any(part.startswith(".") for part in file.relative_to(place).parts)
        ]
    kinds = {KINDS.get(file.suffix) for file in found}
    if len(kinds) != 1 or None in kinds:
        has = ", ".join(sorted({file.suffix or file.name for file in found})) or "no files"
        raise _unreadable(str(place), f"it has {has}, and a data set is files of one of {', '.join(KINDS)}")
    return str(kinds.pop()), found


def _may_be_of_the_hub(path: str) -> bool:
    from parallelizer.hugging_face.build import hub_answers

    return not path.startswith((".", "/", "~")) and path.count("/") <= 1 and hub_answers()


def _cached(rows: Any) -> list[Path]:
    return sorted({Path(file["filename"]) for file in rows.cache_files})


def _check_column(rows: Any, column: str, path: str) -> None:
    if column not in rows.column_names:
        help_text = did_you_mean(column, rows.column_names, "there are")
        message = f"{path} has no column '{column}'"
        raise PlanError([Diagnostic("data-not-found", message, help=help_text)])
    kind = getattr(rows.features[column], "dtype", type(rows.features[column]).__name__)
    if kind not in ("string", "large_string"):
        message = f"the column '{column}' of {path} holds {kind}"
        raise PlanError([Diagnostic("data-unreadable", message, help="data.column names a column of texts")])


def _texts(rows: Any, column: str, tokenizer: Tokenizer, path: str) -> Iterator[bytes]:
    """The texts that are not empty. PlanError at the first that the tokenizer refuses."""
    batches: Iterable[dict[str, list[str | None]]] = rows.select_columns([column]).iter(batch_size=ROWS)
    texts = itertools.chain.from_iterable(batch[column] for batch in batches)
    for number, text in enumerate(texts, 1):
        document = (text or "").encode("utf-8", "surrogatepass")
        if (reason := tokenizer.refuses(document)) is not None:
            raise _unreadable(f"row {number} of {path}", reason)
        if document:
            yield document


def _unreadable(what: str, reason: str) -> PlanError:
    return PlanError([Diagnostic("data-unreadable", f"{what} cannot be read: {reason}", help=HELP)])
