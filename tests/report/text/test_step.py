"""The tables of collectives and memory: they fit, they add up, and they say what they leave out."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest

from parallelizer.report.text import step
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.trace import Trace


def entry(phase: str, axis: str, kind: str, sent: int, *, ahead: bool = False) -> Collective:
    return Collective(phase, kind, axis, 4, 2 * sent, sent, "float32", "layers.0", None, ahead)


LEDGER = (
    entry("forward", "dp_shard+cp", "all_gather", 3 << 20, ahead=True),
    entry("forward", "tp", "reduce_scatter", 1 << 30),
    entry("forward", "tp", "reduce_scatter", 1 << 30),
    entry("backward", "tp", "all_gather", 1000 << 30),
    entry("clip", "dp_shard+cp", "all_reduce", 8),
)
USAGE = Usage(
    4 << 30,
    "backward",
    "layers.31.feed_forward",
    {"activations": 3 << 30, "parameters": 1 << 30, "gathered": 0},
)


def printed(
    ledger: tuple[Collective, ...] = LEDGER,
    usage: Usage = USAGE,
    *,
    width: int = 100,
    encoding: str = "utf-8",
    **more: object,
) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    step.write(Trace(3, ledger, usage), stream, device="cpu", width=width, **more)  # type: ignore[arg-type]
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut(width: int) -> None:
    text = printed(width=width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text and "reduce_scatter" in text and "1,000.0 GiB" in text


def test_piped_it_is_plain_and_100_columns_wide_or_what_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, least, most in (("", 91, 100), ("60", 50, 60)):
        monkeypatch.setenv("COLUMNS", columns)
        stream = io.StringIO()
        step.write(Trace(0, LEDGER, USAGE), stream, device="cpu")
        assert "\x1b" not in stream.getvalue()
        assert least <= max(map(len, stream.getvalue().splitlines())) <= most


def test_a_row_for_each_kind_on_each_axis_in_each_phase() -> None:
    rows = [line.split() for line in printed().splitlines()[2:6]]
    assert rows == [
        ["forward", "dp_shard+cp", "all_gather", "1", "6.0", "MiB", "3.0", "MiB"],
        ["tp", "reduce_scatter", "2", "4.0", "GiB", "2.0", "GiB"],
        ["backward", "tp", "all_gather", "1", "2.0", "TiB", "1,000.0", "GiB"],
        ["clip", "dp_shard+cp", "all_reduce", "1", "16", "B", "8", "B"],
    ]


def test_what_is_issued_ahead_is_told_from_what_is_waited_for() -> None:
    text = " ".join(printed().split())
    assert "5 calls, this rank sends 1,002.0 GiB. FSDP issues 1 of them, 3.0 MiB" in text
    assert "Each is waited for" in printed(LEDGER[1:])


def test_it_names_the_device_it_simulates_and_what_differs_elsewhere() -> None:
    text = " ".join(printed().split())
    assert "those of a CPU mesh" in text and "On CUDA" in text


def test_what_is_sent_in_another_dtype_than_the_parameters_is_named() -> None:
    def lines(dtype: str | None) -> list[str]:
        stream = io.StringIO()
        bytes_too = (*LEDGER, dataclasses.replace(LEDGER[0], dtype="uint8"))
        step.write(Trace(3, bytes_too, USAGE), stream, device="cpu", width=100, dtype=dtype)
        return stream.getvalue().splitlines()[1:6]

    same = LEDGER[0].dtype
    assert {one.dtype for one in LEDGER} == {same}
    named = lines(same)
    assert named[0].split()[-1] == "dtype"
    assert [line.split()[-1] == "uint8" for line in named[1:]] == [True, False, False, False]
    assert all(
        line.rstrip().endswith(f"{same}, uint8" if at == 0 else same)
        for at, line in enumerate(lines("float64")[1:])
    )
    assert not any("dtype" in line for line in lines(None))


def test_operators_whose_own_memory_is_not_known_are_named() -> None:
    stream = io.StringIO()
    step.write(
        Trace(3, LEDGER, USAGE, uncounted=frozenset({"sort", "convolution"})), stream, device="cpu", width=100
    )
    assert "in calls too large to be tried here: convolution, sort." in " ".join(stream.getvalue().split())
    assert "Not counted" not in printed()


def test_a_rank_that_talks_to_nobody() -> None:
    text = printed(())
    assert "none" in text and "payload" not in text


def test_memory_is_listed_by_size_and_its_shares_add_up() -> None:
    text = printed()
    lines = text[text.index("memory of rank 3") :].splitlines()
    assert lines[0] == "memory of rank 3: peak 4.0 GiB, in backward, layers.31.feed_forward"
    assert [line.split()[0] for line in lines[1:3]] == ["activations", "parameters"]
    assert "gathered" not in text
    assert sum(float(share) for share in re.findall(r"([\d.]+)%", text)) == 100.0
    bars = [line.count("█") for line in lines[1:3]]
    assert bars[0] == 3 * bars[1] or abs(bars[0] - 3 * bars[1]) <= 3


def test_bars_are_drawn_with_what_the_stream_can_write() -> None:
    assert "#" in printed(encoding="ascii") and "█" in printed()


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        (8, "fits, 4.0 GiB (50%) to spare"),
        (4, "tight, 0 B (0%) to spare"),
        (3, "does not fit, 1.0 GiB too much"),
    ],
)
def test_the_verdict_has_the_margin(gib: int, words: str) -> None:
    text = printed(hardware={"name": "X", "memory_gib": gib})
    assert f"X, {gib}.0 GiB: {words}" in text and "Not counted" in text


def test_without_a_capacity_there_is_no_verdict() -> None:
    assert "fit" not in printed(hardware={"name": "auto"}).replace("all_gather", "")
