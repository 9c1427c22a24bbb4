"""Digests are equal for equal values wherever they are written, and differ where a value does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.digest import digest
from parallelizer.language.plan import Mesh


@dataclasses.dataclass(frozen=True)
class _Rule:
    key: str
    options: dict[str, Any]
    span: Any = None
    seen: int = dataclasses.field(default=0, compare=False)


RULE = _Rule("layers.*", {"a": 1, "b": (1, 2)})


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(RULE, seen=3),
        dataclasses.replace(RULE, options={"b": [1, 2], "a": 1}),
    ],
    ids=["not compared", "order of keys"],
)
def test_what_makes_no_difference_makes_no_other_digest(other: _Rule) -> None:
    assert digest(other) == digest(RULE)


def test_places_in_files_are_left_out() -> None:
    one, other = (dataclasses.replace(RULE, span=Span("plan.yaml", line)) for line in (1, 2))
    assert digest(one) == digest(other)


def test_a_set_has_one_digest_in_any_order() -> None:
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"}) != digest({"x", "y"})


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(RULE, key="layers.*.w"),
        dataclasses.replace(RULE, options={"a": 1, "b": (2, 1)}),
        dataclasses.replace(RULE, options={"a": 1.5, "b": (1, 2)}),
        dataclasses.replace(RULE, options={"a": "1", "b": (1, 2)}),
        Mesh({"tp": 2}),
    ],
    ids=["text", "order of a tuple", "number", "type", "class"],
)
def test_another_value_has_another_digest(other: object) -> None:
    assert digest(other) != digest(RULE)
