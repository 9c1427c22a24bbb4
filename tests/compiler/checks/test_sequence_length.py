"""The sequence is cut for cp in two chunks a rank, and again over tp."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload
from tests.findings import finding, findings, mesh_of
from tests.runtime.test_step import llama

UNPADDED = "extends: llama\nbuffers: {batch: {labels: 1}}"
HERE = Span("train", 4, 1, 2)
ENTRIES = {"input_ids": Entry(("batch", "sequence")), "labels": Entry(("batch", "sequence"), ignore=-100)}


def work(tokens: int) -> Workload:
    return Workload(ENTRIES, 8, tokens, spans={"seq_len": HERE})


@pytest.mark.parametrize(
    ("tokens", "sizes", "text"),
    [
        (7, {}, "extends: llama"),
        (7, {"dp_shard": 2}, "extends: llama"),
        (12, {"cp": 3}, "extends: llama"),
        (8, {"cp": 2, "tp": 4}, "extends: llama"),
        (7, {"tp": 2}, "extends: llama_tp"),
        (12, {"cp": 2, "tp": 4}, "extends: llama_tp"),
    ],
)
def test_lengths_that_divide(tokens: int, sizes: dict[str, int], text: str) -> None:
    assert findings(text, llama(), mesh_of(**sizes), workload=work(tokens)) == ()


@pytest.mark.parametrize(
    ("tokens", "sizes", "text", "message", "help_text"),
    [
        (
            7,
            {"tp": 2},
            "extends: llama",
            "a sequence of 7 tokens is not a multiple of 2 (tp=2)",
            "set train.seq_len=6 or 8",
        ),
        (
            10,
            {"cp": 2},
            UNPADDED,
            "a sequence of 10 tokens is not a multiple of 4 (2*cp=4)",
            "set train.seq_len=8 or 12",
        ),
        (
            2,
            {"cp": 2},
            UNPADDED.replace("llama", "llama_tp"),
            "a sequence of 2 tokens is not a multiple of 4 (2*cp=4)",
            "set train.seq_len=4",
        ),
        (
            12,
            {"cp": 2, "tp": 4},
            UNPADDED,
            "a sequence of 12 tokens is not a multiple of 8 (2*cp=4, cp*tp=8)",
            "set train.seq_len=8 or 16; with this length tp can be 1, 2, 3, 6",
        ),
    ],
)
def test_lengths_that_do_not(
    tokens: int, sizes: dict[str, int], text: str, message: str, help_text: str
) -> None:
    found = finding(text, llama(), mesh_of(**sizes), workload=work(tokens))
    assert (found.code, found.span, found.message, found.help) == (
        "sequence-not-divisible",
        HERE,
        message,
        help_text,
    )
    assert [r.label for r in found.related] == [f"{a}={n} is set here" for a, n in sizes.items()]


@pytest.mark.parametrize(
    ("tokens", "sizes", "message"),
    [
        (10, {"cp": 2}, "a sequence of 10 tokens is not a multiple of 4, so it is padded to 12"),
        (12, {"cp": 2, "tp": 4}, "a sequence of 12 tokens is not a multiple of 8, so it is padded to 16"),
    ],
)
def test_where_labels_say_what_they_are_padded_with_it_is_a_note(
    tokens: int, sizes: dict[str, int], message: str
) -> None:
    found = finding("extends: llama", llama(), mesh_of(**sizes), workload=work(tokens))
    assert (found.code, found.severity, found.span, found.message) == (
        "sequence-padded",
        "note",
        HERE,
        message,
    )


def test_without_context_parallelism_nothing_is_padded() -> None:
    found = finding("extends: llama", llama(), mesh_of(tp=2), workload=work(7))
    assert found.code == "sequence-not-divisible"
