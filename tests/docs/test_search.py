"""docs/search.md says what `search` takes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.search.__main__ import PARTS
from parallelizer.commands.search import add_options
from parallelizer.propose.search.within import NUMBERS, WORDS

TITLES = {
    "time": "Time",
    "exhaustive": "Exhaustive search",
    "large": "Large spaces",
    "published": "Published meshes",
    "valid": "Found presets",
    "here": "On this machine",
}
"""The tables of the parts."""

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "search.md").read_text()


def test_the_table_of_within_has_every_key() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", TEXT.partition("## How it searches")[0], re.M)
    named = {key for row in rows for key in re.findall(r"`([\w.]+)`", row)} - {"--within"}
    assert named == {*NUMBERS, *WORDS}


def test_every_option_of_its_own_is_on_the_page() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    own = {o for a in parser._actions for o in a.option_strings if o.startswith("--")}
    own -= {"--help", "--config-dir", "--config-name"}
    assert not {option for option in own if f"`{option}" not in TEXT and f"{option} " not in TEXT}


def test_every_part_of_the_measurements_is_named() -> None:
    assert set(TITLES) == set(PARTS)
    assert not [part for part in PARTS if f"`{part}`" not in TEXT and f"--only {part}`" not in TEXT]


def test_every_measured_claim_on_the_page_holds() -> None:
    """A table ends with a list of what does not hold. The page says of a part without a table that it was not measured."""
    tables = TEXT.partition("<!-- search:begin -->")[2].partition("<!-- search:end -->")[0]
    titles = re.findall(r"^### (.+)$", tables, re.M)
    assert len(titles) == len(set(titles)) and set(titles) <= set(TITLES.values())
    assert not re.findall(r"^- .+$", tables, re.M)
    unmeasured = re.search(r"^Not measured with the current code: (.+)\.$", TEXT, re.M)
    named = re.findall(r"`(\w+)`", unmeasured[1]) if unmeasured else []
    assert {part for part, title in TITLES.items() if title not in titles} == set(named)
