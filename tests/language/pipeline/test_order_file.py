"""Orders from files, with the places of their mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.pipeline.actions import order_text
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.order_file import MAX_FILE_BYTES, MOST, read_order
from tests.language.pipeline.torch_orders import torch_order, torch_schedule


def mistakes(tmp_path: Path, text: str) -> list[Diagnostic]:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_order(str(path), "mine.csv")
    return list(caught.value.diagnostics)


def placed(found: Diagnostic) -> tuple[str, str]:
    return found.code, str(found.span)


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"])
def test_files_that_torch_writes_are_read(tmp_path: Path, name: str, format: str) -> None:
    path = tmp_path / "order.csv"
    torch_schedule(name, 4, 2, 8)._dump_csv(str(path), format=format)
    assert read_order(str(path), "order.csv") == torch_order(name, 4, 2, 8)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    schedule = SCHEDULES[name]
    order = schedule.order(4, schedule.stages_per_rank, 8)
    path = tmp_path / "order.csv"
    path.write_text(order_text(order) + "\n")
    assert read_order(str(path), "order.csv") == order


def test_a_cell_that_is_no_action_is_reported_at_its_column(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "0F0, 0Q0,0B0\r\n1F0,,1B\r\n")
    assert [placed(one) for one in found] == [
        ("schedule-file", "mine.csv:1:6"),
        ("schedule-file", "mine.csv:2:6"),
    ]
    assert found[0].span is not None and found[0].span.end_column == 9
    assert "'0Q0' is not an action" in found[0].message


def test_an_incomplete_order_is_reported_at_its_action_or_its_row(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "0F0,0F1,0B0,0B1\n1F0,1B0,,1F1\n")
    assert placed(found) == ("schedule-incomplete", "mine.csv:2:10")
    [found] = mistakes(tmp_path, "0F0,0F1,0B0,0B1\n1F0,1B0\n")
    assert placed(found) == ("schedule-incomplete", "mine.csv:2:1")


def test_a_stuck_order_is_reported_at_the_actions_that_wait(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    assert placed(found) == ("schedule-stuck", "mine.csv:1:5")
    [other] = found.related
    assert str(other.span) == "mine.csv:2:1" and other.label == "rank 1 waits at 1F1 for 0F1 of rank 0"


def test_an_empty_file_a_binary_file_and_a_huge_one_are_refused(tmp_path: Path) -> None:
    assert [placed(one) for one in mistakes(tmp_path, "")] == [("schedule-incomplete", "mine.csv:1:1")]
    assert len(mistakes(tmp_path, "%PDF,\0" * 50)) == MOST
    [found] = mistakes(tmp_path, "," * (MAX_FILE_BYTES + 1))
    assert found.code == "yaml-limit"
