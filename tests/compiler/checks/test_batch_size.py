"""The rows of a batch are dealt out in equal numbers."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload
from tests.findings import finding, findings, mesh_of
from tests.runtime.test_step import llama

ENTRIES = {"input_ids": Entry(("batch", "sequence")), "labels": Entry(("batch", "sequence"))}
HERE = Span("train", 3, 1, 2)


def work(rows: int, accumulate: int = 1) -> Workload:
    return Workload(ENTRIES, rows, 16, accumulate, {"batch_size": HERE})


@pytest.mark.parametrize(
    ("rows", "accumulate", "sizes"),
    [
        (1, 1, {}),
        (4, 1, {"dp_shard": 2}),
        (4, 2, {"dp_shard": 2}),
        (8, 1, {"dp_replicate": 2, "dp_shard": 4}),
        (1, 1, {"cp": 2, "tp": 2}),
    ],
)
def test_equal_parts_are_fine(rows: int, accumulate: int, sizes: dict[str, int]) -> None:
    assert findings("extends: llama", llama(), mesh_of(**sizes), workload=work(rows, accumulate)) == ()


@pytest.mark.parametrize(
    ("rows", "accumulate", "sizes", "message", "help_text"),
    [
        (3, 1, {"dp_shard": 2}, "a global batch of 3 sequences does not divide into 2 equal parts (dp_shard=2)",
         "set train.batch_size=2 or 4; a batch of this size divides over 1, 3 data ranks"),
        (10, 2, {"dp_replicate": 2, "dp_shard": 2},
         "a global batch of 10 sequences does not divide into 8 equal parts (dp_replicate=2 x dp_shard=2 x accumulate=2)",
         "set train.batch_size=8 or 16; a batch of this size divides over 1, 5 data ranks"),
        (1, 4, {}, "a global batch of 1 sequences does not divide into 4 equal parts (accumulate=4)", "set train.batch_size=4"),
        (0, 1, {}, "a global batch of 0 sequences does not divide into 1 equal parts (one)", "set train.batch_size=1"),
    ],
)  # fmt: skip
def test_unequal_parts_are_refused(
    rows: int, accumulate: int, sizes: dict[str, int], message: str, help_text: str
) -> None:
    found = finding("extends: llama", llama(), mesh_of(**sizes), workload=work(rows, accumulate))
    assert (found.code, found.span, found.message, found.help) == (
        "batch-not-divisible",
        HERE,
        message,
        help_text,
    )
    assert [r.span.file for r in found.related] == ["mesh"] * len(sizes)
