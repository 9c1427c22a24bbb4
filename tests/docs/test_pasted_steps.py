"""The line of a run's first step, where a page shows one, has as many collectives as the dry run of that command plans today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelizer.configuration.read_setup import from_overrides
from tests.simulate.setups import traced

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "parallelizer/commands/new/starter"


@pytest.mark.parametrize(
    ("pages", "preset", "folder"),
    [
        (("README.md", "docs/commands.md"), "tp8_cp2", None),
        (("docs/watching.md",), "fsdp2_tp2", None),
        (("docs/index.md",), "fsdp2_tp2", STARTER),
    ],
)
def test_as_many_collectives_are_shown_as_are_planned(
    pages: tuple[str, ...], preset: str, folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [
        re.findall(r"step 1: ([\d,]+) collectives as planned", (ROOT / page).read_text()) for page in pages
    ]
    conf, words = None, [f"parallel={preset}", "device=cpu"]
    if folder is not None:
        monkeypatch.syspath_prepend(str(folder))
        conf, words = str(folder / "conf"), [*words, "model=my_gpt"]
    setup = from_overrides(words, config_dir=conf)
    planned = f"{len(traced(setup, fold=True).ledger):,}"
    assert all(set(found) == {planned} for found in shown)
