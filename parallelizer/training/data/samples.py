"""A source of samples from a torch dataset or DataLoader, or from any iterable."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.losses import IGNORED
from parallelizer.training.data import windows
from parallelizer.training.data.source import ALL, Baseline, Source, fingerprint

Sample = Mapping[str, Any] | Tensor | Sequence[int]
"""The entries of one row by name; or token ids, of which the first S are the input and those from the second on the labels."""

PROBED = 64
"""So many held-out samples tell one data set from another."""

HELP = "see docs/data.md: a dataset, a DataLoader, or something that can be iterated again and again"


def source_of(
    samples: Any,
    heldout: Any,
    *,
    shuffle: bool | None = None,
    name: str = "samples",
    baseline: Baseline | None = None,
    unit: str = "tokens",
) -> Source:
    """A training data source of `samples`, evaluated on `heldout`.

    `samples` is a map-style dataset (`len()` and `[i]`), a DataLoader of either kind, an iterable that
    starts again at each iteration, or a function that returns an iterator. A sample is a mapping of
    entries, [S] or the model's shape for one row, or token ids [S + 1]. `heldout` is another of these, or
    the number of first samples that are not trained on.

    Samples with an index are distributed by number: `shuffle` (by default as the DataLoader, and True for a
    dataset) draws a new order for each epoch from `train.seed`. An iterable keeps its order; a resumed run
    reads and drops the samples that were trained on before, and reports this. Each rank iterates all
    samples and keeps its own rows.

    `name` identifies this data when a run is resumed. `baseline` is the loss that the held-out loss is
    compared with; by default the entropy of the held-out labels.
    """
    first = heldout if isinstance(heldout, int) and not isinstance(heldout, bool) else 0
    if first < 0 or (heldout == first and not first):
        raise _unusable("heldout is a number of samples from 1 on, or a data set")
    training = _samples_of(samples, shuffle, first)
    held = (
        _samples_of(samples, False, 0).first(first) if first else _samples_of(heldout, False, 0).first(None)
    )
    return Samples(training, held, name, baseline, unit)


class Samples(Source):
    """What `source_of` returns."""

    def __init__(
        self,
        training: Indexed | Iterated,
        held: Callable[[int], list[dict[str, Tensor]]],
        name: str,
        baseline: Baseline | None,
        unit: str,
    ) -> None:
        self.training, self.held, self.name, self.given = training, held, name, baseline
        self.unit = unit  # type: ignore[misc]
        self.probe = held(PROBED)
        if not self.probe:
            raise _unusable("there is no held-out sample")

    @property
    def baseline(self) -> Baseline:
        if self.given is not None:
            return self.given
        labels = [s["labels"].flatten() for s in self.probe if _is_labelled(s)]
        counted = torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)
        counts = torch.unique(counted[counted >= 0], return_counts=True)[1].double()
        shares = counts / counts.sum()
        one_each = bool(labels) and all(len(of_sample) == 1 for of_sample in labels)  # a class of the row
        return Baseline(
            float(-(shares * shares.log()).sum()) if len(counts) else math.inf,
            "the entropy of the held-out labels",
            "nats a label" if one_each else f"nats a {self.unit.removesuffix('s')}",
        )

    def check_fits(self, seq_len: int) -> None:
        self.training.check()

    def units(self, seq_len: int) -> int:
        return seq_len if self.unit == "tokens" else 1

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        return self.training.batch(position, batch_size, seed, rows)

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        found = self.held(count * batch_size)
        batches: list[dict[str, Tensor]] = []
        for start in range(0, len(found), batch_size):
            here = found[start : start + batch_size]
            padding = {**here[0]}
            if _is_labelled(padding):
                padding["labels"] = torch.full_like(padding["labels"], IGNORED)
            elif len(here) < batch_size and batches:
                break  # nothing would tell the rows that fill it up from those that count
            batches.append(_stacked([*here, *[padding] * (batch_size - len(here))][rows]))
        return batches

    def fingerprint(self) -> str:
        entries = [part for sample in self.probe[:PROBED] for item in sorted(sample.items()) for part in item]
        return fingerprint("samples", self.name, self.training.kind(), *entries)


class Indexed:
    """Samples with numbers: each rank reads its own rows only."""

    def __init__(
        self, dataset: Any, shuffle: bool, skipped: int, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.shuffle, self.skipped, self.collate = dataset, shuffle, skipped, collate

    def kind(self) -> str:
        return f"indexed {len(self.dataset)} {self.skipped} {self.shuffle} {windows.order_probe().tolist()}"

    def check(self) -> None:
        if len(self.dataset) <= self.skipped:
            raise _too_short(f"there are {len(self.dataset)} samples, of which {self.skipped} are held out")

    def batch(self, position: int, batch_size: int, seed: int, rows: slice) -> dict[str, Tensor]:
        """The `rows` of the batch behind `position` samples."""
        count, chosen = len(self.dataset) - self.skipped, []
        for row in range(batch_size)[rows]:
            epoch, place = divmod(position + row, count)
            if self.shuffle:
                place = int(windows.window_order(count, seed, epoch)[place])
            chosen.append(self.skipped + place)
        return self._read(chosen)

    def first(self, count: int | None) -> Callable[[int], list[dict[str, Tensor]]]:
        """A function of a number n that returns the first n samples, at most `count`."""
        held = len(self.dataset) if count is None else min(count, len(self.dataset))
        return lambda most: [_row(self._read([number]), 0) for number in range(min(most, held))]

    def _read(self, numbers: list[int]) -> dict[str, Tensor]:
        found = [self.dataset[number] for number in numbers]
        if self.collate is not None:
            return _entries(self.collate(found))
        return _stacked([_sample(one) for one in found])


class Iterated:
    """Samples that come one after another: every rank reads all of them, and keeps its rows.

    The global batch that was read last is kept, of which the parts of an accumulated batch are taken.
    """

    def __init__(self, begin: Callable[[], Iterator[dict[str, Tensor]]], skipped: int) -> None:
        self.begin, self.skipped = begin, skipped
        self._stream: Iterator[dict[str, Tensor]] | None = None
        self._read = 0  # samples that were taken of the stream
        self._kept: tuple[int, list[dict[str, Tensor]]] = (0, [])
        self._process = os.getpid()

    def kind(self) -> str:
        return f"iterated {self.skipped}"

    def check(self) -> None:
        if next(self._endless(), None) is None:
            raise _too_short(f"no sample follows the {self.skipped} that are held out")

    def batch(self, position: int, batch_size: int, seed: int, rows: slice) -> dict[str, Tensor]:
        """The `rows` of the batch behind `position` samples; `seed` does not matter, the order is the iterable's."""
        if self._process != os.getpid():  # a loader's workers are those of the process that began to iterate
            self._stream, self._read, self._kept, self._process = None, 0, (0, []), os.getpid()
        start, kept = self._kept
        if start != position or len(kept) != batch_size:
            if self._stream is None or self._read > position:
                self._stream, self._read = self._endless(), 0
            if skip := position - self._read:
                _tell_of_skipping(skip)
                next(itertools.islice(self._stream, skip - 1, skip), None)
            kept = list(itertools.islice(self._stream, batch_size))
            self._kept, self._read = (position, kept), position + batch_size
        return _stacked(kept[rows])

    def first(self, count: int | None) -> Callable[[int], list[dict[str, Tensor]]]:
        """As of `Indexed`."""
        return lambda most: list(itertools.islice(self.begin(), most if count is None else min(most, count)))

    def _endless(self) -> Iterator[dict[str, Tensor]]:
        """The samples behind those held out, again and again."""
        while True:
            empty = True
            for sample in itertools.islice(self.begin(), self.skipped, None):
                empty = False
                yield sample
            if empty:
                return


def _tell_of_skipping(samples: int) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        message = f"the data cannot be resumed at a position: {samples:,} samples are read and dropped"
        print(message, file=sys.stderr, flush=True)


def _samples_of(given: Any, shuffle: bool | None, skipped: int) -> Indexed | Iterated:
    if isinstance(given, DataLoader):
        return _of_loader(given, shuffle, skipped)
    if isinstance(given, Iterator):
        raise _unusable(
            f"{type(given).__name__} can be iterated only once, but evaluation and resuming iterate from the start again"
        )
    if not isinstance(given, IterableDataset) and hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return Indexed(given, shuffle is not False, skipped, None)
    begin = given if callable(given) and not isinstance(given, Iterable) else None
    if begin is None and not isinstance(given, Iterable):
        raise _unusable(f"{type(given).__name__} cannot be indexed or iterated")
    if shuffle:
        raise _unusable(
            f"{type(given).__name__} can only be iterated: it keeps its order, shuffle it yourself"
        )
    return Iterated(lambda: map(_sample, iter(begin() if begin is not None else given)), skipped)


def _of_loader(loader: DataLoader[Any], shuffle: bool | None, skipped: int) -> Indexed | Iterated:
    """A loader's rows. One that iterates is asked for its batches, with its workers; of one that indexes the dataset, the
    collate function and whether it shuffles are taken, since its own order is another in each process.
    """
    if isinstance(loader.dataset, IterableDataset):
        if shuffle:
            raise _unusable("an iterable dataset keeps its order: shuffle it yourself")
        return Iterated(lambda: itertools.chain.from_iterable(map(_rows, loader)), skipped)
    drawn = isinstance(loader.sampler, RandomSampler)
    if not drawn and not isinstance(loader.sampler, SequentialSampler):
        kind = type(loader.sampler).__name__
        raise _unusable(
            f"the order of a {kind} is its own: give the dataset, or a loader with shuffle=True or False"
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if loader.batch_sampler is None:
        collate = None
    return Indexed(loader.dataset, drawn if shuffle is None else shuffle, skipped, collate)


def _sample(given: Any) -> dict[str, Tensor]:
    """A sample's entries."""
    if isinstance(given, Mapping):
        return {str(name): torch.as_tensor(value) for name, value in given.items()}
    if isinstance(given, tuple):
        raise _unusable(
            "a sample is a tuple, whose entries have no names: give a mapping, by a collate_fn say"
        )
    tokens = torch.as_tensor(given).long()
    if tokens.ndim != 1 or len(tokens) < 2:
        raise _unusable(f"a sample of token ids is [S + 1], and one has the shape {list(tokens.shape)}")
    return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def _entries(batch: Any) -> dict[str, Tensor]:
    """The entries of a batch that a collate function made."""
    if isinstance(batch, Tensor):
        return {"input_ids": batch[:, :-1].long(), "labels": batch[:, 1:].long()}
    if not isinstance(batch, Mapping):
        raise _unusable(f"a batch is a {type(batch).__name__}, whose entries have no names: give a mapping")
    return {str(name): torch.as_tensor(value) for name, value in batch.items()}


def _rows(batch: Any) -> Iterator[dict[str, Tensor]]:
    entries = _entries(batch)
    for number in range(len(next(iter(entries.values())))):
        yield _row(entries, number)


def _row(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: tensor[number] for name, tensor in batch.items()}


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    except (RuntimeError, KeyError) as error:
        raise _unusable(f"samples differ and cannot be batched: {error}") from None


def _is_labelled(sample: Mapping[str, Tensor]) -> bool:
    return "labels" in sample and not sample["labels"].is_floating_point()


def _unusable(reason: str) -> PlanError:
    return PlanError([Diagnostic("data-unreadable", f"the data cannot be used: {reason}", help=HELP)])


def _too_short(message: str) -> PlanError:
    return PlanError([Diagnostic("data-too-short", message, help="give more samples, or hold fewer out")])
