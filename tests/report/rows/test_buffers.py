"""The rows of buffers are the plan's, where the sequence is split at all."""

from __future__ import annotations

from parallelizer.report.rows.buffers import buffer_rows, dealt_out
from tests.report.rows.plans import compiled


def test_the_batch_comes_before_the_model() -> None:
    program, _ = compiled("parallel=cp2")
    assert [(row.name, row.owner, row.split) for row in buffer_rows(program)] == [
        ("input_ids", "batch", "dimension 1"),
        ("labels", "batch", "dimension 1"),
        ("rope.*", "model", "dimension 0"),
    ]
    assert dealt_out(program).startswith("head and tail chunks paired: ")


def test_without_cp_nothing_is_split() -> None:
    assert buffer_rows(compiled("parallel=tp2")[0]) == []
