"""A table of keys: values are read, reported where they are of no use, and filled in where the table says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from omegaconf import OmegaConf

from parallelizer.configuration.origins import Origins
from parallelizer.configuration.reading import Reading
from parallelizer.training.keys import Key, Kind, key, keys_of, number, one_of, optional, read, truth, whole


@dataclass(frozen=True)
class Table:
    """Keys of a section and of the root."""

    steps: int = key("train", 5, whole(1, 9), "steps of the optimizer")
    how: str = key("train", "stop", one_of("stop", "skip"), "what happens then")
    keeps: bool = key("train", True, optional(truth), "whether it is kept")
    rate: float = key("", 0.5, number, "how fast")


GOOD: dict[str, Any] = {"train": {"steps": 3, "how": "skip", "keeps": None}, "rate": 1}


def result(
    config: dict[str, Any], *, fill: bool = False
) -> tuple[dict[str, Any], list[tuple[str, str | None]]]:
    reading = Reading(OmegaConf.create(config), Origins())
    found = read(reading, Table, fill=fill)
    return found, [(d.message, d.help) for d in reading.findings.items]


def test_the_keys_are_the_fields_in_their_order() -> None:
    assert [k.name for k in keys_of(Table)] == ["train.steps", "train.how", "train.keeps", "rate"]
    assert [k.section for k in keys_of(Table)] == ["train", "train", "train", ""]
    assert keys_of(Table)[2].takes.words == "true or false, or null"
    assert Table() == Table(5, "stop", True, 0.5)


def test_values_of_use() -> None:
    assert result(GOOD) == ({"steps": 3, "how": "skip", "keeps": True, "rate": 1}, [])


@pytest.mark.parametrize(
    ("changed", "message", "help_text"),
    [
        ({"steps": 10}, "train.steps is 10", "it is a whole number from 1 to 9: steps of the optimizer"),
        ({"steps": True}, "train.steps is True", "it is a whole number from 1 to 9: steps of the optimizer"),
        ({"how": "warn"}, "train.how is 'warn'", "it is stop or skip: what happens then"),
        ({"keeps": "yes"}, "train.keeps is 'yes'", "it is true or false: whether it is kept"),
    ],
)
def test_a_value_of_no_use_is_reported_with_what_is_and_what_for(
    changed: dict[str, Any], message: str, help_text: str
) -> None:
    assert result(GOOD | {"train": GOOD["train"] | changed})[1] == [(message, help_text)]


def test_a_key_that_is_missing_is_an_error_or_has_its_default() -> None:
    assert result({"rate": 1})[1] == [
        ("train.steps is missing", "it is a whole number from 1 to 9: steps of the optimizer"),
        ("train.how is missing", "it is stop or skip: what happens then"),
    ]
    assert result({}, fill=True) == ({"steps": 5, "how": "stop", "keeps": True, "rate": 0.5}, [])
    assert result({"train": {"steps": None}}, fill=True)[1][0][0] == "train.steps is missing"


def test_what_something_else_reads_is_taken_as_it_is() -> None:
    @dataclass(frozen=True)
    class Other:
        name: str = key("", "a", Kind("a name"), "whose")

    reading = Reading(OmegaConf.create({"name": 3}), Origins())
    assert read(reading, Other) == {"name": 3} and keys_of(Other) == (
        Key("name", "a", Kind("a name"), "whose"),
    )
