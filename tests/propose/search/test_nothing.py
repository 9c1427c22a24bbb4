"""A search without results: by how much nothing fits, and the changes with which something would."""

from __future__ import annotations

import dataclasses

from parallelizer.diagnostics.units import size
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.estimate import Estimates
from parallelizer.propose.search.nothing import nothing, too_little
from parallelizer.propose.search.remedy import remedies
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.task import read_task
from parallelizer.propose.search.within import read_within
from tests.propose.search.tasks import LLAMA

LIMITS = ["mesh.tp=1", "mesh.cp=1", "mesh.pp=1", "mesh.dp_replicate=1", "checkpoint=none", "rows=1,2,4"]


def test_what_does_not_fit_names_the_changes_with_which_it_would() -> None:
    task = read_task([*LLAMA, "gpus=2", "model.n_layers=3"], within=LIMITS, memory=10**9)
    search = Search(task.base, lambda _: None)
    key = Candidate(dp_shard=2).trace_class
    search.classes.trace([key, dataclasses.replace(key, checkpoint="full")])
    estimates = Estimates(task.machine, search.classes.traces)
    plain = Candidate(dp_shard=2, rows=1, accumulate=4)
    small = dataclasses.replace(plain, checkpoint="full")
    assert estimates.peak(small) < estimates.peak(plain)
    task = dataclasses.replace(task, memory=(estimates.peak(small) + estimates.peak(plain)) // 2)
    changes = remedies(search, task)
    assert changes[0].startswith("let --within checkpoint have full: then about ")
    assert any(one.startswith("take 4 GPUs: fsdp4 then needs about ") for one in changes)

    # Without a limit on checkpoints there is nothing to free.
    wide = dataclasses.replace(task, within=read_within(LIMITS[:-2])[0], memory=1)
    assert not any("checkpoint" in one for one in remedies(search, wide))

    found = search.run(dataclasses.replace(task, memory=1))
    assert too_little(found)
    one = nothing(found, task, changes)
    assert one.help == "; or ".join(changes)


def test_limits_without_any_candidate_are_named() -> None:
    task = read_task([*LLAMA, "gpus=4"], within=["mesh.tp=3"])
    found = Search(task.base, lambda _: None).run(task)
    assert not found.total
    one = nothing(found, task)
    assert one.message == "no candidate for 4 GPUs is within the limits: mesh.tp=3"


def test_parameters_that_do_not_fit_alone_say_how_much_is_missing() -> None:
    task = read_task([*LLAMA, "gpus=2", "model.n_layers=3"], within=LIMITS, memory=2**10)
    search = Search(task.base, lambda _: None)
    found = search.run(task)
    one = nothing(found, task)
    assert found.states == search.states // 2  # over two shards
    assert one.message.startswith("no candidate fits 1.0 KiB: parameters and gradients alone need ")
    assert one.message.endswith(f"{size(found.states - 2**10)} too much") and "seq_len" not in str(one.help)
