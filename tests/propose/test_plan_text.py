"""The text of a plan: columns, and what is too long for its line."""

from __future__ import annotations

import dataclasses

from parallelizer.language.yaml_nodes import MappingNode, read
from parallelizer.propose.plan_text import Form, PlanLine, Section, plan_text

FORM = Form(60, gap=" ", comment="  # ", widest_styles=20)
BELOW = dataclasses.replace(FORM, room=20, styles_below=True)


def rules(form: Form, *lines: PlanLine) -> list[str]:
    text = plan_text(form, ["a title"], [Section(lines)], buffers={"batch": {"ids": "1"}})
    assert isinstance(read(text, "plan.yaml"), MappingNode)
    title, *between, buffers, batch = text.splitlines()
    assert (title, buffers, batch) == ("# a title", "buffers:", "  batch: {ids: 1}")
    assert between[:2] == ["version: 1", "rules:"]
    return between[2:]


def test_keys_styles_and_comments_stand_in_columns() -> None:
    lines = (
        PlanLine("a.*", ("one",), "first"),
        PlanLine("*", ("one", "two"), "second"),
        PlanLine("", ("one",)),
    )
    for form in (FORM, BELOW):
        assert rules(form, *lines) == [
            "  a.*: one         # first",
            '  "*": [one, two]  # second',
            '  "":  one',
        ]


def test_what_is_too_long_for_its_line_stands_on_several() -> None:
    lines = (
        PlanLine("a", ("one",), "first"),
        PlanLine("b", ("a-style-that-is-long", "another-one-like-that"), "a comment"),
        PlanLine("c", ("a-style-that-is-long", "another-one-like-that", "and-a-third-one")),
    )
    assert rules(FORM, *lines) == [
        "  a: one  # first",
        "  # a comment",
        "  b: [a-style-that-is-long, another-one-like-that]",
        "  c:",
        "    - a-style-that-is-long",
        "    - another-one-like-that",
        "    - and-a-third-one",
    ]
    assert rules(BELOW, *lines) == [
        "  a: one  # first",
        "  b:  # a comment",
        "    [a-style-that-is-long, another-one-like-that]",
        "  c:",
        "    [a-style-that-is-long, another-one-like-that, and-a-third-one]",
    ]


def test_sections_have_comments_around_their_lines_and_columns_of_their_own() -> None:
    sections = [
        Section((PlanLine("a", ("one",), "first"),), ("above",), ("below",)),
        Section((PlanLine("b", ("another",), "second"),)),
    ]
    text = plan_text(FORM, [], sections, layouts=["stream: replicate"])
    assert text.splitlines()[3:] == [
        "rules:",
        "  # above",
        "  a: one  # first",
        "  # below",
        "  b: another  # second",
    ]
