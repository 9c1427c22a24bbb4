"""Checks that the data provides the inputs of the model."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.configuration.origins import Origins
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.training.data.corpus import Data
from parallelizer.training.data.documents import DOCUMENTS
from parallelizer.training.data.source import Source
from parallelizer.training.data.token_file import TokenFile


def check_entries(source: Source, setup: Setup, seed: int) -> None:
    """Raises PlanError `data-mismatch` for each entry of the model's batch that the data lacks or has in another shape."""
    found = list(_mismatches(source, setup, seed))
    if found:
        raise PlanError(found)


def _mismatches(source: Source, setup: Setup, seed: int) -> Iterator[Diagnostic]:
    work = setup.workload
    batch = source.training_batch(
        0, batch_size=work.batch_size, seq_len=work.seq_len, seed=seed, rows=slice(0, 1)
    )
    given = work.renamed(batch)
    made = {name for name, buffer in setup.plan.batch.items() if buffer.make}
    for name, entry in work.entries.items():
        span = setup.origins.span(f"model.batch.{name}")
        wanted = [{"batch": 1, "sequence": work.seq_len}.get(str(size), size) for size in entry.shape]
        if name in made:
            continue
        if name not in given:
            message = f"the model takes a batch entry {name!r}, and the data has {', '.join(batch)}"
            can = isinstance(source, Data) and name in DOCUMENTS
            other = f"write `data: NAME` in the entry, with the data's name for it, or choose other data: {_choices(setup)}"
            yield Diagnostic("data-mismatch", message, span, "set data.documents=true" if can else other)
        elif list(given[name].shape) != wanted:
            message = f"the model takes {name!r} of {wanted} for one row, and the data has {list(given[name].shape)}"
            yield Diagnostic("data-mismatch", message, span, "make the sizes of model and data the same")


def check_vocabulary(source: Source, rows: int | None, origins: Origins) -> None:
    """Raises PlanError `data-mismatch` for a text with tokens that the model has no embedding for, of which it has so many
    `rows`.
    """
    if isinstance(source, Data | TokenFile) and rows is not None and source.vocab_size > rows:
        message = (
            f"the tokens of the text are below {source.vocab_size:,}, and the model's vocabulary is {rows:,}"
        )
        key = "data.tokenizer" if isinstance(source, Data) else "data.vocabulary"
        span = origins.span(key) or origins.span("model.vocab_size")
        help_text = "choose the model's own tokenizer with data.tokenizer, or build the model with a larger vocabulary"
        if isinstance(source, TokenFile):
            help_text = "build the model with a larger vocabulary, or set data.dtype to the dtype of the file"
        raise PlanError([Diagnostic("data-mismatch", message, span, help_text)])


def _choices(setup: Setup) -> str:
    folders = [*setup.origins.folders, config_folder()]
    names = {file.stem for folder in folders for file in (folder / "data").glob("*.yaml")}
    return ", ".join(f"data={name}" for name in sorted(names))
