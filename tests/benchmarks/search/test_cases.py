"""The cases of the parts: the same on every machine, and composed from what they are said to be."""

from __future__ import annotations

from benchmarks.published.rows import read
from benchmarks.search.published import _published, _search_of
from benchmarks.search.valid import CASES, MODELS, OWN, case, own_model
from parallelizer.propose.search.task import read_task
from parallelizer.propose.search.within import read_within


def test_random_cases_are_the_same_again_and_hold_every_model() -> None:
    every = [case(number) for number in range(CASES)]
    assert every == [case(number) for number in range(CASES)]
    assert {words[0].removeprefix("model=") for words, _ in every} == set(MODELS)
    for _, within in every:
        read_within(within)


def test_the_own_model_of_a_case_is_built_with_its_plan() -> None:
    words, within = next(c for c in map(case, range(CASES)) if f"model={OWN}" in c[0])
    with own_model() as folder:
        task = read_task(words, within=within, config_dir=folder)
        assert type(task.base.build_model()).__name__ == "MyGpt" and task.base.plan.rules


def test_a_search_for_a_published_run_has_its_batch_and_its_gpus_and_no_mesh() -> None:
    row = next(row for row in read() if row.mesh.get("pp", 1) > 1)
    words = _search_of(row)
    assert f"gpus={row.run['gpus']}" in words and not any("mesh" in word for word in words)
    assert not any("pipeline" in word for word in words)
    batch = [word for word in words if word.startswith("train.batch_size=")]
    assert batch == [f"train.batch_size={row.run['global_batch']}"]
    assert f"parallel.mesh.pp={row.mesh['pp']}" in _published(row) and batch[0] in _published(row)
