"""The tensors that carry the sequence: named rightly, and none left out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload
from tests.findings import finding, findings, marked, mesh_of
from tests.runtime.test_step import llama
from tests.styles.models import Mlp, around

ENTRIES = {"input_ids": Entry(("batch", "sequence")), "labels": Entry(("batch", "sequence"))}
RULES = 'rules: {layers.*.attention.inner: context-parallel, "": fsdp}\n'
CP = mesh_of(cp=2)


def work(tokens: int = 16, **more: Entry) -> Workload:
    return Workload({**ENTRIES, **more}, 2, tokens, spans={"seq_len": Span("train", 4, 1, 2)})


def text(buffers: str) -> str:
    """The rules with some buffers; the tables of angles are listed unless others are."""
    listed = "" if "model:" in buffers else ", model: {'rope.*': 0}}"
    return RULES + f"buffers: {buffers[:-1] + listed if listed else buffers}"


@pytest.mark.parametrize(
    ("buffers", "code", "mark", "message", "help_text"),
    [
        ("{batch: {input_ids: 1, labels: 1}, model: {rop.*: 0}}", "unknown-buffer", "rop.*",
         "`rop.*` matches no buffer of the model", "did you mean `rope.*`?"),
        ("{batch: {input_ids: 1, labels: 1}, model: {'rope.*': 2}}", "unknown-dim", "'rope.*'",
         "rope.cos has 2 dimensions, not one of number 2", "its shape is [20, 1]"),
        ("{batch: {input_ids: 1, labels: 2}}", "unknown-dim", "labels", "labels has 2 dimensions, not one of number 2",
         "its shape is [batch, sequence]"),
        ("{batch: {input_ids: 1, labels: 0}}", "wrong-dim", "labels",
         "labels is split in dimension 0, but its sequence is in dimension 1",
         "write `labels: 1`: its shape is [batch, sequence]"),
        ("{batch: {input_ids: 1, labels: 1, lables: 1}}", "unknown-buffer", "lables", "the batch has no entry 'lables'",
         "did you mean labels?"),
        ("{batch: {labels: 1, input_ids: 1, zzz: 1}}", "unknown-buffer", "zzz", "the batch has no entry 'zzz'",
         "it has input_ids, labels"),
    ],
)  # fmt: skip
def test_wrong_names_and_dimensions(
    buffers: str, code: str, mark: str, message: str, help_text: str | None
) -> None:
    found = findings(text(buffers), llama(), CP, workload=work())
    assert [(d.code, d.message, d.help) for d in found][:1] == [(code, message, help_text)]
    assert marked(text(buffers), found[0]) == mark


def test_entries_that_are_made_need_not_be_in_the_batch() -> None:
    class WithPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()()

        def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            y: Tensor = self.model(input_ids)
            return y

    plan = 'rules: {model.layers.*.attention.inner: context-parallel, "": fsdp}\n'
    plan += "buffers: {batch: {input_ids: 1, labels: 1, positions: positions}, model: {'model.rope.*': 0}}"
    assert findings(plan, WithPositions, CP, workload=work()) == ()


def test_every_entry_with_the_sequence_must_be_split() -> None:
    found = finding(text("{batch: {input_ids: 1}}"), llama(), CP, workload=work())
    assert (found.code, found.message) == (
        "missing-buffers",
        "the batch entry 'labels' has a sequence dimension, but the plan does not split it",
    )
    assert found.help is not None and found.help.startswith("add `labels: 1` to buffers.batch of ")
    mask = work(mask=Entry(("batch", 1, "sequence", "sequence")))
    assert [
        d.code for d in findings(text("{batch: {input_ids: 1, labels: 1}}"), llama(), CP, workload=mask)
    ] == ["missing-buffers"]
    weights = work(weight=Entry(("batch",)))
    assert findings(text("{batch: {input_ids: 1, labels: 1}}"), llama(), CP, workload=weights) == ()


def test_a_mask_of_keys_stays_whole() -> None:
    plan = text("{batch: {input_ids: 1, labels: 1}}")
    assert findings(plan, llama(), CP, workload=work(attention_mask=ENTRIES["labels"])) == ()
    square = work(attention_mask=Entry(("batch", 1, "sequence", "sequence")))
    assert finding(plan, llama(), CP, workload=square).code == "missing-buffers"


def test_context_parallelism_without_any_split_entry() -> None:
    found = finding(RULES, llama(), CP)
    assert (found.code, found.message) == (
        "missing-buffers",
        "the plan uses context parallelism, but splits no batch entry",
    )
    assert marked(RULES, found) == "layers.*.attention.inner"
    assert findings(RULES, llama()) == ()  # cp=1


def test_a_sequence_that_a_rule_splits_need_not_be_split_before() -> None:
    plan = 'rules: {inner: {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}, "": fsdp}'
    assert findings(plan, around(Mlp), CP, workload=work()) == ()


def test_positions_must_suffice() -> None:
    found = findings(
        text("{batch: {input_ids: 1, labels: 1}, model: {'rope.*': 0}}"),
        llama(max_seq_len=12),
        CP,
        workload=work(16),
    )
    assert {(d.code, d.span) for d in found} == {("sequence-too-long", Span("train", 4, 1, 2))}
    assert found[0].message == "rope.cos has 12 positions, but the sequence has 16"


def test_of_a_buffer_with_a_longer_dimension_the_wrong_one_is_split() -> None:
    plan = text("{batch: {input_ids: 1, labels: 1}, model: {'rope.*': 1}}")
    found = findings(plan, llama(max_seq_len=20), CP, workload=work(16))
    assert {d.code for d in found} == {"sequence-too-long"} and marked(plan, found[0]) == "'rope.*'"
    assert found[0].message == (
        "rope.cos [20, 1] is split in dimension 1, which has 1 positions, but the sequence has 16"
    )
    assert found[0].help == "dimension 0 has 20: write `rope.*: 0`, or shorten train.seq_len"
    assert [r.span for r in found[0].related] == [Span("train", 4, 1, 2)]


def test_the_length_of_the_sequence_must_reach_the_model() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = llama()().layers
            self.rope = llama()().rope

        def forward(self, tokens: Any) -> Any:
            return tokens

    plan = text("{batch: {input_ids: 1, labels: 1}, model: {'rope.*': 0}}")
    found = finding(plan, Renamed, CP)
    assert (found.message, found.help) == (
        "none of the split batch entries is a parameter of the model's forward",
        "forward takes tokens",
    )
    assert marked(plan, found) == "input_ids"
