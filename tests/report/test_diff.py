"""Two plans side by side: what each side of the command stands for, and what is printed of the two."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.commands.main import main
from parallelizer.report import diff
from parallelizer.report.figures import Figures, FigureSubject, changes
from tests.report.test_lock import LEDGER, PLAN, USAGE, entry, example

# --- what a side stands for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("fsdp2_tp2", ["parallel=fsdp2_tp2"]),
        ("llama_tp", ["plan=llama_tp"]),
        ("./mine.yaml", ["plan=./mine.yaml"]),
        ("plans/my plan.yaml", ["plan='plans/my plan.yaml'"]),
        ("parallel=tp4,train.seq_len=512", ["parallel=tp4", "train.seq_len=512"]),
        ("++parallel.layouts.stream='shard(1)'", ["++parallel.layouts.stream='shard(1)'"]),
        ("~parallel.styles.fsdp=x", ["~parallel.styles.fsdp=x"]),
        (
            'rules=["a: {style: x, input: y}","b: none"],plan=llama',
            ['rules=["a: {style: x, input: y}","b: none"]', "plan=llama"],
        ),
        ("no such preset", ["parallel='no such preset'"]),
    ],
)
def test_a_side_is_a_preset_a_plan_or_overrides(text: str, overrides: list[str]) -> None:
    assert diff.side(text) == overrides


def test_a_folder_of_ones_own_is_searched_too(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "mine.yaml").write_text("version: 1\n")
    assert diff.side("mine", str(tmp_path)) == ["plan=mine"]
    assert diff.side("mine") == ["parallel=mine"]


plain = st.text("abc=. :", min_size=1, max_size=6).map(str.strip).filter(bool)
bracketed = st.lists(plain, max_size=3).map(lambda xs: f"[{','.join(xs)}]")
in_quotes = st.text("abc,[]{}", max_size=6).map(lambda x: f"'{x}'")


@given(st.lists(st.one_of(plain, bracketed, in_quotes), max_size=5))
def test_only_commas_between_overrides_split(parts: list[str]) -> None:
    assert diff.split(",".join(parts)) == parts


# --- what is printed ---------------------------------------------------------------------------------------


def printed(one: Figures, other: Figures, width: int) -> str:
    stream = io.StringIO()
    diff.write(diff.Side(one), diff.Side(other), ("left", "right"), stream, width=width)
    return stream.getvalue()


OTHER = example(
    plan=PLAN.replace("'*.down'", "'{0,1,3}.down'"),
    ledger=(
        *(dataclasses.replace(e, payload_bytes=4096, wire_bytes=2048) for e in LEDGER[:-1]),
        entry("", 8, "send"),
    ),
    usage=dataclasses.replace(USAGE, peak=999, at_peak={"parameters": 600, "activations": 399}),
)


def test_only_what_changes_is_printed() -> None:
    text = " ".join(printed(example(), OTHER, 100).split())
    assert "2.down.weight local 8x8 local 8x16 - tp=1 tp=- - bytes 256 B bytes 512 B +100%" in text
    assert "forward tp all_gather payload 8.0 KiB payload 32.0 KiB +300%" in text
    assert "loss tp all_reduce sent 4 B - gone" in text
    assert "forward tp send - sent 4 B new" in text
    assert "peak bytes 1,000 B bytes 999 B -0.1%" in text
    assert "7 the same" in text and "up.weight" not in text and "by module" not in text


def test_no_subject_stands_beside_blanks() -> None:
    """Equal changes are told together, and each line has what it is about."""
    names = ("forward tp all_gather", "backward tp all_gather", "loss tp all_reduce")
    fields = {"payload": "8", "sent": "4"}
    one: Figures = {"plan": {}, "collectives": {FigureSubject(n): dict(fields) for n in names}}
    gone: Figures = {"plan": {}, "collectives": {}}
    halved: Figures = {
        "plan": {},
        "collectives": {FigureSubject(n): {"payload": "4", "sent": "2"} for n in names},
    }
    lines = [" ".join(line.split()) for line in printed(one, gone, 100).splitlines()]
    assert all(f"{n} sent 4 B - gone" in lines for n in names)
    lines = [" ".join(line.split()) for line in printed(one, halved, 100).splitlines()]
    assert f"{names[0]} payload 8 B payload 4 B -50%" in lines and f"{names[2]} as above as above" in lines


def test_the_same_plan_twice_changes_nothing() -> None:
    text = printed(example(), example(), 100)
    assert "left" not in text and text.count("the same") == 4


@pytest.mark.parametrize("width", [40, 60, 100])
def test_it_fits_and_is_plain_when_piped(width: int) -> None:
    text = printed(example(), OTHER, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


def test_narrow_and_wide_say_the_same() -> None:
    narrow, wide = printed(example(), OTHER, 60), printed(example(), OTHER, 100)
    assert "8x8 -> 8x16" in narrow
    for word in ("2.down.weight", "+300%", "gone", "new", "-0.1%"):
        assert narrow.count(word) == wide.count(word) > 0


def test_the_document_has_every_change_as_numbers() -> None:
    document = json.loads(
        json.dumps(diff.document(diff.Side(example()), diff.Side(OTHER), ("left", "right")))
    )
    assert document["sides"] == ["left", "right"] and len(document["changes"]) == len(
        changes(example(), OTHER)
    )
    assert {
        "section": "parameters",
        "subjects": ["2.down.weight"],
        "before": {"local": "8x8", "over": "tp=shard(1)", "bytes": 256},
        "after": {"local": "8x16", "over": "tp=replicate", "bytes": 512},
    } in document["changes"]


def test_a_section_that_is_on_no_side_is_said_to_be_empty() -> None:
    empty: Figures = {"plan": {FigureSubject("plan"): {"name": "a"}}, "collectives": {}}
    assert "collectives\n  nothing on either side" in printed(empty, empty, 100)


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_compares_two_plans_under_the_same_overrides(capfd: pytest.CaptureFixture[str]) -> None:
    both = ["parallel=tp2", "model.dim=64", "model.hidden_dim=64", "train.seq_len=32", "train.batch_size=4"]
    assert main(["plan", *both, "--diff", "llama", "llama_tp", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["sides"] == ["llama", "llama_tp"]
    assert {c["section"] for c in document["changes"]} == {
        "plan",
        "collectives",
        "collectives by module",
        "memory",
    }


def test_a_side_that_is_nothing_is_an_error_with_what_is_near(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--diff", "fsdp2_tp3", "tp2"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "did you mean fsdp2_tp2?" in captured.err


def test_a_rank_that_is_not_there_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--diff", "tp2", "tp4", "--rank", "3"]) == 1
    assert "there is no rank 3 among 2" in capfd.readouterr().err
