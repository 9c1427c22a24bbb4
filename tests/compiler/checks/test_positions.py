"""Tables long enough, and under context parallelism positions of a rank's own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload
from tests.findings import findings, mesh_of

IDS = Entry(("batch", "sequence"), range=(0, 32))
PLAN = 'rules: {attend: context-parallel, "": fsdp}\nbuffers: {batch: {input_ids: 1, labels: 1}'
CP = mesh_of(cp=2)


def work(tokens: int = 16) -> Workload:
    return Workload({"input_ids": IDS, "labels": IDS}, 2, tokens, spans={"seq_len": Span("train", 4, 1, 2)})


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.places = nn.Embedding(32, 8), Attend(), nn.Embedding(16, 8)
        self.learned = nn.Parameter(torch.empty(16, 8))

    def reset_parameters(self) -> None:
        pass


class Counts(Base):
    def forward(self, input_ids: Tensor) -> Any:
        return self.attend(
            self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        )


class Takes(Base):
    def forward(self, input_ids: Tensor, places: Tensor) -> Any:
        return self.attend(self.embed(input_ids) + self.places(places))


class Slices(Base):
    def forward(self, input_ids: Tensor) -> Any:
        return self.attend(self.embed(input_ids) + self.learned[: input_ids.shape[1]])


class Keeps(Base):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(1, 16, 8))

    def forward(self, input_ids: Tensor) -> Any:
        return self.attend(self.embed(input_ids) + self.table[:, : input_ids.shape[1]])


@pytest.mark.parametrize(
    ("model", "more", "code", "message", "help_text"),
    [
        (
            Counts,
            "",
            "local-positions",
            "the model's forward builds positions or a mask",
            "`<its name>: positions`",
        ),
        (Slices, "", "local-positions", "reads the first rows of learned", "look the rows up by positions"),
        (
            Keeps,
            "",
            "unlisted-buffer",
            "forward reads table by position, but no entry of `buffers` splits it",
            '`"table": 1`',
        ),
    ],
)
def test_positions_of_another_part_of_the_sequence(
    model: Callable[[], nn.Module], more: str, code: str, message: str, help_text: str
) -> None:
    [found] = findings(PLAN + more + "}", model, CP, workload=work())
    assert found.code == code and message in found.message and help_text in (found.help or "")
    assert found.span is not None and found.span.line == 1
    assert findings(PLAN + more + "}", model, mesh_of(dp_shard=2), workload=work()) == ()


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Takes, PLAN.replace("labels: 1", "labels: 1, places: positions") + "}"),
        (Keeps, PLAN + ", model: {table: 1}}"),
    ],
)
def test_positions_that_are_split_are_fine(model: Callable[[], nn.Module], plan: str) -> None:
    assert findings(plan, model, CP, workload=work()) == ()


def test_a_sequence_that_is_split_inside_begins_whole() -> None:
    plan = (
        "rules:\n  attend: {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}\n"
        '  "": fsdp\n'
    )
    assert findings(plan, Counts, CP, workload=work()) == ()


class Relative(Base):
    """A bias for each distance of two tokens."""

    def forward(self, input_ids: Tensor, places: Tensor) -> Tensor:
        apart = (places[:, :, None] - places[:, None]).abs().clamp(max=3)
        x = self.attend(self.embed(input_ids)) + self.places(apart).mean(2)
        return x


def test_a_table_of_distances_needs_no_row_for_each_token() -> None:
    plan = PLAN.replace("labels: 1", "labels: 1, places: positions") + "}"
    assert findings(plan, Relative, workload=work(64)) == ()


def test_a_rule_that_only_gathers_does_not_make_the_batch_begin_whole() -> None:
    plan = PLAN + "}"
    gathers = plan.replace(
        "rules: {", "rules: {embed: {style: prepare-output, axis: cp, output: shard(1) -> replicate}, "
    )
    assert [d.code for d in findings(gathers, Counts, CP, workload=work())] == ["local-positions"]


@pytest.mark.parametrize(
    ("model", "table"), [(Counts, "places.weight"), (Slices, "learned"), (Keeps, "table")]
)
def test_a_table_must_have_a_row_for_each_token(model: Callable[[], nn.Module], table: str) -> None:
    plan = 'rules: {"": fsdp}'
    assert findings(plan, model, workload=work(16)) == ()
    [found] = findings(plan, model, workload=work(17))
    assert (found.code, found.span) == ("sequence-too-long", Span("train", 4, 1, 2))
    assert found.message == f"{table} has 16 positions, but the sequence has 17"


def test_nothing_is_asked_without_a_workload() -> None:
    assert findings('rules: {"": fsdp}', Counts) == ()


def test_a_misspelt_buffer_is_told_of_once() -> None:
    found = findings(PLAN + ", model: {tabel: 1}}", Keeps, CP, workload=work())
    assert [d.code for d in found] == ["unknown-buffer"]
