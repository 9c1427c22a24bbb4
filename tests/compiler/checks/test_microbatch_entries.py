"""Batch entries whose rows a pipeline cannot cut into microbatches."""

from __future__ import annotations

import pytest

from parallelizer.language.workload import Entry, Workload
from tests.compiler.pipeline.models import PLAN, VOCABULARY, Layered
from tests.findings import findings, marked, mesh_of

IDS = Entry(("batch", "sequence"), "int64", (0, VOCABULARY))


def work(**entries: Entry) -> Workload:
    return Workload({"input_ids": IDS, **entries}, 8, 4)


@pytest.mark.parametrize(
    ("shape", "help_text"),
    [
        (("sequence", "batch"), "let the batch be dim 0 of other"),
        (("sequence",), "declare it in the plan, `buffers: {batch: {other: 0}}`"),
        ((4, 4), "give other a first dim of size 1"),
    ],
)
def test_an_entry_whose_first_dim_is_not_the_batch_is_refused(
    shape: tuple[str | int, ...], help_text: str
) -> None:
    [found] = findings(PLAN, Layered, mesh_of(pp=2), workload=work(other=Entry(shape)))
    assert (found.code, found.severity) == ("microbatch-entry", "error")
    assert found.message.startswith("the batch entry other of shape [") and (found.help or "").startswith(
        help_text
    )


@pytest.mark.parametrize("shape", [("batch",), ("batch", "sequence"), (1, "sequence"), ()])
def test_rows_and_what_all_rows_share_are_fine(shape: tuple[str | int, ...]) -> None:
    assert findings(PLAN, Layered, mesh_of(pp=2), workload=work(other=Entry(shape))) == ()


def test_a_declared_sequence_is_fine() -> None:
    text = f"{PLAN}\nbuffers: {{batch: {{other: 0}}}}"
    assert findings(text, Layered, mesh_of(pp=2), workload=work(other=Entry(("sequence",)))) == ()


def test_another_declared_dim_is_refused_at_its_declaration() -> None:
    text = 'rules: {layers.*: stage, "": fsdp}\nbuffers: {batch: {other: 1}}'
    [found] = findings(text, Layered, mesh_of(pp=2), workload=work(other=Entry((4, "sequence"))))
    assert found.code == "microbatch-entry" and "other" in marked(text, found)


def test_without_a_pipeline_every_shape_is_fine() -> None:
    assert (
        findings(PLAN, Layered, mesh_of(dp_shard=2), workload=work(other=Entry(("sequence", "batch")))) == ()
    )
