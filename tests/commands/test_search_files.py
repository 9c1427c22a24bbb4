"""`search` by its command: the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.commands.main import main
from parallelizer.propose.search.bounds import state_bytes
from parallelizer.propose.search.task import read_task
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


@pytest.mark.slow
def test_for_memory_and_for_cost_it_searches_every_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    states = state_bytes(read_task([*LLAMA, "gpus=1"]).base.build_model())
    small = ["--memory", f"{int(states * 0.9)}B"]  # the parameters and gradients of one GPU do not fit
    assert main(["search", *LLAMA, "gpus=4", "--json", *LIMITS, "--for", "memory", *small]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    fits = {one["gpus"]: one["seconds"] is not None for one in document["tried"]}
    assert not fits[1] and document["gpus"] == min((n for n, fit in fits.items() if fit), default=4)

    priced = [one.replace("hardware=h100", "hardware=h100,h200") for one in LLAMA]
    words = ["search", *priced, "gpus=2", "++hardware.price_per_hour=4,1", "--for", "cost", "--json", *LIMITS]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["tried"]) == 4 and document["hardware"].startswith("H200")
    costs = [one["cost"] for one in document["tried"] if one["cost"] is not None]
    assert costs == sorted(costs)
