"""Checks that the data provides the inputs of the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from parallelizer.compiler.observe.families import family_of
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.training.data.corpus import Data
from parallelizer.training.data.documents import DOCUMENTS
from parallelizer.training.data.source import Source


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
            other = f"say `data: NAME` of the entry, as the data calls it, or choose other data: {_choices(setup)}"
            yield Diagnostic("data-mismatch", message, span, "set data.documents=true" if can else other)
        elif list(given[name].shape) != wanted:
            message = f"the model takes {name!r} of {wanted} for one row, and the data has {list(given[name].shape)}"
            yield Diagnostic("data-mismatch", message, span, "make the sizes of model and data the same")


def check_vocabulary(source: Source, setup: Setup, model: nn.Module) -> None:
    """Raises PlanError `data-mismatch` for a text with tokens that the model has no embedding for."""
    rows = vocabulary_of(model, setup)
    if isinstance(source, Data) and rows is not None and source.vocab_size > rows:
        message = (
            f"the tokens of the text are below {source.vocab_size:,}, and the model's vocabulary is {rows:,}"
        )
        span = setup.origins.span("data.tokenizer") or setup.origins.span("model.vocab_size")
        help_text = "choose the model's own tokenizer with data.tokenizer, or build the model with a larger vocabulary"
        raise PlanError([Diagnostic("data-mismatch", message, span, help_text)])


def vocabulary_of(model: nn.Module, setup: Setup) -> int | None:
    """How many tokens a model on meta has an embedding for; None where nothing says so.

    A family of models knows; of others the argument `vocab_size` is taken at its word.
    """
    family = family_of(model)
    if family is not None:
        return family.vocabulary(model)
    said = setup.model.get("vocab_size")
    return said if isinstance(said, int) else None


def _choices(setup: Setup) -> str:
    folders = [*setup.origins.folders, config_folder()]
    names = {file.stem for folder in folders for file in (folder / "data").glob("*.yaml")}
    return ", ".join(f"data={name}" for name in sorted(names))
