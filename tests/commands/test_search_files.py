"""`search` by its command: the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.commands.main import main
from tests.propose.search.tasks import LLAMA

LIMITS = ("--within", "rows=1,2", "--within", "checkpoint=none", "--within", "mesh.cp=1")


def test_a_page_has_every_result_and_the_lock_is_that_of_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [one for one in LLAMA if not one.startswith("hardware")]
    folder = tmp_path / "conf" / "parallel"
    folder.mkdir(parents=True)
    page, lock, preset = tmp_path / "found.html", tmp_path / "found.lock", folder / "found.yaml"
    files = ["--html", str(page), "--lock", str(lock), "--output", str(preset)]
    assert main(["search", *LLAMA, "gpus=2", "--top", "1", "--json", *LIMITS, *files]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["results"]) == 1
    assert page.read_text().count("<details") > 1

    more = document["results"][0]["overrides"]
    words = [*run, "hardware=h100", *more, "parallel=found", "--config-dir", str(tmp_path / "conf")]
    assert main(["plan", *words, "--locked", str(lock)]) == 0
    lock.write_text(lock.read_text().replace("reduce_scatter", "all_reduce"))
    assert main(["plan", *words, "--locked", str(lock)]) == 1
