"""The process groups of a whole run, and the messages of objects between its steps."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.job.job import Job
from parallelizer.training.job.prepare import prepare
from recipes import train
from tests.chosen import chosen
from tests.recipes.runs import SMALL

OF_THE_MESH = {"fsdp4": [], "fsdp2_tp2": [2, 2], "hsdp2x2": [2, 2], "pp2_fsdp2": [2, 2, 2, 2]}
"""For each preset of four ranks the sizes of a rank's groups beside the world: of its axes, and of a pipeline's channels, one
for each direction."""


def recorded(job: Job, as_nccl: bool) -> tuple[list[tuple[str | None, int]], list[int]]:
    """A run: the backend that each group of this rank was asked for, with its size, and how many messages of objects had begun
    before and after each step. With `as_nccl` the default group stands for one of NCCL, which takes no objects.
    """
    groups: list[tuple[str | None, int]] = []
    of_gloo: list[dist.ProcessGroup] = []
    messages = 0
    counts: list[int] = []

    def made(*args: Any, **more: Any) -> Any:
        group, backend = new_group(*args, **more), more.get("backend")
        if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            groups.append((backend, group.size()))
            of_gloo.extend([group] if backend == "gloo" else [])
        return group

    def noted(call: Any, always: bool = False) -> Any:
        def begun(*args: Any, **more: Any) -> Any:
            nonlocal messages
            messages += always or more.get("group") in of_gloo
            return call(*args, **more)

        return begun

    def step(*args: Any, **more: Any) -> Any:
        counts.append(messages)
        taken = train_step(*args, **more)
        counts.append(messages)
        return taken

    new_group, train_step = dist.new_group, pz.train_step
    with ExitStack() as patches:
        for module in (dist, device_mesh):
            patches.enter_context(mock.patch.object(module, "new_group", made))
        for name in ("all_gather_object", "broadcast_object_list"):
            patches.enter_context(mock.patch.object(dist, name, noted(getattr(dist, name), always=True)))
        for name in ("all_reduce", "isend", "recv"):
            patches.enter_context(mock.patch.object(dist, name, noted(getattr(dist, name))))
        patches.enter_context(mock.patch.object(pz, "train_step", step))
        if as_nccl:
            patches.enter_context(
                mock.patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl")
            )
        train.train(job)
    return groups, counts


@pytest.mark.ranks
@pytest.mark.parametrize("as_nccl", [False, True], ids=["gloo", "as-nccl"])
@pytest.mark.parametrize("preset", chosen(OF_THE_MESH, {"fsdp2_tp2", "pp2_fsdp2"}))
def test_a_run_has_one_group_for_objects_and_its_steps_send_none(
    preset: str, as_nccl: bool, tmp_path: Path
) -> None:
    words = (*SMALL, f"parallel={preset}", "train.steps=4", "train.checkpoint_every=4")
    job = prepare(*compose_config(words), tmp_path)
    found = launch.start(
        recorded, (job, as_nccl), ranks=4, device="cpu", start_timeout=60, collective_timeout=60
    )
    for groups, counts in found:
        assert [size for backend, size in groups if backend is None] == OF_THE_MESH[preset]
        assert [one for one in groups if one[0] is not None] == [("gloo", 4)]
        assert len(counts) == 8
        # A pipeline's first step tells each stage what the one before it sends.
        assert len(set(counts[1:])) == 1, counts
        assert counts[0] > 0
