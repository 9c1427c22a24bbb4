"""The timeline of a schedule on a page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, replay
from parallelizer.language.pipeline.settings import Pipeline, order_of
from parallelizer.report.html.schedule import COLOURS, LABEL, ROW, WIDTHS, section, timeline
from parallelizer.report.rows.schedules import schedule_rows


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_action_has_a_block_at_its_time_in_its_ranks_row(name: str) -> None:
    order = order_of(Pipeline(name, 8), 4)
    stages = 1 + max(action.stage for actions in order for action in actions)
    found = replay(order, ActionCosts((1.0,) * stages, (1.25,) * stages, (0.75,) * stages))
    root = ElementTree.fromstring(timeline(found, 20))
    blocks = {g.findtext("title"): g.find("rect") for g in root.findall("g")}
    assert len(blocks) == sum(map(len, order))
    for rank, actions in enumerate(found.ranks):
        for one in actions:
            block = blocks[str(one.action)]
            assert block is not None
            assert float(block.attrib["x"]) == LABEL + round(20 * one.start)
            assert float(block.attrib["y"]) == rank * ROW
            assert float(block.attrib["width"]) == round(20 * one.end) - round(20 * one.start) - 1
            assert block.attrib["fill"] == COLOURS[one.action.kind][0]
        tones = [blocks[str(one.action)].attrib["opacity"] for one in actions]  # type: ignore[union-attr]
        by_stage = {one.action.stage: tone for one, tone in zip(actions, tones, strict=True)}
        assert list(dict(sorted(by_stage.items())).values()) == ["1", "0.7"][: len(by_stage)]
    numbers = [text.text for text in root.findall("text") if text.get("class") == "number"]
    assert numbers == [str(one.action.microbatch) for rank in found.ranks for one in rank]
    words = [text.text for text in root.findall("text") if text.get("class") is None]
    kinds = {action.kind for actions in order for action in actions}
    assert words == [
        *(f"rank {r}" for r in range(4)),
        *(COLOURS[k][1] for k in COLOURS if k in kinds),
        "wait",
    ]


def test_the_width_follows_the_shortest_action_between_two_limits() -> None:
    for count, ranks in ((2, 2), (8, 4), (64, 16)):
        found = replay(order_of(Pipeline("zbv", count), ranks))
        root = ElementTree.fromstring(timeline(found))
        assert LABEL + WIDTHS[0] <= int(root.attrib["width"]) <= LABEL + WIDTHS[1] + 1
    # Blocks that are too narrow for a number have none, and no block covers another.
    rects = [g.find("rect") for g in root.findall("g")]
    places = sorted(
        (float(r.attrib["y"]), float(r.attrib["x"]), float(r.attrib["width"])) for r in rects if r is not None
    )
    assert all(x + width <= other for (y, x, width), (below, other, _) in pairwise(places) if y == below)
    assert not [text for text in root.findall("text") if text.get("class") == "number"]


def test_an_order_without_time_is_drawn() -> None:
    order = order_of(Pipeline("1f1b", 1), 1)
    ElementTree.fromstring(timeline(replay(order, ActionCosts.equal(1, 0, 0, 0))))


def test_the_section_has_the_timeline_and_the_other_schedules() -> None:
    html = section(replay(order_of(Pipeline("1f1b", 15), 8)), schedule_rows(8, 15))
    assert html.count("<svg") == 1 and html.count('role="row"') == 1 + 5
    assert "31.8%" in html and "dualpipev on 8 ranks takes 16 microbatches or more, not 15." in html
