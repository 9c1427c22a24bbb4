"""Actions and their text, against PyTorch's parser and writer."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _Action

from parallelizer.language.pipeline.actions import (
    Action,
    ActionKind,
    microbatch_count,
    order_text,
    parse_actions,
    stage_ranks,
    stages_of,
)
from tests.language.pipeline.torch_orders import torch_order, torch_schedule


@pytest.mark.parametrize("kind", list(ActionKind))
def test_an_action_reads_as_torch_reads_it(kind: ActionKind) -> None:
    action = Action(kind, 12, 3)
    theirs = _Action.from_str(str(action))
    assert theirs is not None and (
        theirs.stage_index,
        theirs.computation_type.name,
        theirs.microbatch_index,
    ) == (
        12,
        {"B": "FULL_BACKWARD"}.get(kind, kind.name),
        3,
    )
    assert parse_actions(f" {action} ") == (action,)


def test_waits_and_communication_are_no_actions() -> None:
    for cell in ("", "  ", "0SEND_F1", "3RECV_B10", "2UNSHARD", "2RESHARD", "2REDUCE_GRAD"):
        assert parse_actions(cell) == ()


def test_an_overlapped_pair_is_two_actions() -> None:
    assert list(map(str, parse_actions("(0F8;7B0)OVERLAP_F_B"))) == ["0F8", "7B0"]


@pytest.mark.parametrize(
    "cell",
    [
        "F0",
        "0F",
        "0X1",
        "0F1 0B1",
        "-1F0",
        "0F1x",
        "(0F1;7B0)",
        "(0F1,7B0)OVERLAP_F_B",
        "٠F1",
        "0f1",
        "9" * 30 + "F1",
    ],
)
def test_another_text_is_refused(cell: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse_actions(cell)


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv", "dualpipev"])
def test_both_kinds_of_torchs_files_are_read(tmp_path: Path, name: str, format: str) -> None:
    path = tmp_path / "order.csv"
    torch_schedule(name, 4, 2, 8)._dump_csv(str(path), format=format)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert tuple(tuple(a for c in row for a in parse_actions(c)) for row in rows) == torch_order(
        name, 4, 2, 8
    )


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    order = torch_order("zbv", 4, 2, 8)
    path = tmp_path / "order.csv"
    path.write_text(order_text(order))
    schedule = torch_schedule("zbv", 4, 2, 8)
    schedule._load_csv(str(path))
    assert [list(map(str, schedule.pipeline_order[rank])) for rank in range(4)] == [
        list(map(str, o)) for o in order
    ]


def test_the_rank_of_each_stage_and_the_stages_of_a_rank() -> None:
    order = torch_order("dualpipev", 3, 2, 6)
    assert stage_ranks(order) == (0, 1, 2, 2, 1, 0)
    assert stages_of(stage_ranks(order), 1) == (1, 4)
    assert microbatch_count(order) == 6


def test_a_stage_on_two_ranks_or_on_none_is_refused() -> None:
    one, two = (Action(ActionKind.FORWARD, stage, 0) for stage in (1, 3))
    with pytest.raises(ValueError, match="stage 1 lies on rank 0 and on rank 1"):
        stage_ranks(((one,), (one,)))
    with pytest.raises(ValueError, match="stage 0 lies on no rank"):
        stage_ranks(((one,), (two,)))
