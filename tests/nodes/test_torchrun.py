"""torchrun on two nodes: one run, whose ranks lie across both, and which survives what kills some of them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.nodes.network import Nodes
from tests.recipes.runs import SMALL, entries, metrics, run_here
from tests.slurm.cluster import wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def torchrun(nodes: Nodes, node: int, *options: str) -> list[str]:
    """Both namespaces have one machine's name, which is 127.0.0.1 in /etc/hosts: so torchrun must be told addresses,
    and gloo must not look the name up.
    """
    return [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"),
        f"--rdzv-endpoint={nodes.addresses[0]}:29500",
        f"--rdzv-conf=is_host={int(node == 0)}",
        f"--local-addr={nodes.addresses[node]}",
        *options,
    ]


def test_two_nodes_train_as_one(nodes: Nodes, tmp_path: Path) -> None:
    train = ["-m", "recipes.train", *SMALL, "parallel=fsdp2_tp2", "train.steps=2"]
    started = [nodes.start(node, [*torchrun(nodes, node), *train], tmp_path) for node in (0, 1)]
    written = [one.communicate(timeout=300)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], written
    assert sum(text.count("mesh  4 ranks: dp_shard=2 x tp=2") for text in written) == 1
    assert "tp-crosses-nodes" not in "".join(written)
    [folder] = tmp_path.glob("outputs/*/*")
    assert [name for name in entries(folder) if "/" not in name] == [".hydra", "metrics.jsonl"]
    alone = tmp_path / "alone"
    alone.mkdir()
    run_here(alone, "train.steps=2", "train.log_every=0")
    got, expected = ([m["loss"] for m in metrics(run)] for run in (folder, alone))
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_node_whose_ranks_are_killed_comes_back(nodes: Nodes, tmp_path: Path) -> None:
    """torchrun starts all ranks again; they find the run's folder, and lose no step that a checkpoint has."""
    steps = 6
    train = [
        "-m",
        "recipes.train",
        *SMALL,
        "parallel=fsdp2_tp2",
        f"train.steps={steps}",
        "train.checkpoint_every=1",
    ]
    started = [
        nodes.start(
            node,
            [*torchrun(nodes, node, "--max-restarts=3"), *train],
            tmp_path,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        for node in (0, 1)
    ]
    written = [threading.Thread(target=one.stdout.read, daemon=True) for one in started if one.stdout]
    for thread in written:
        thread.start()
    wait_for(lambda: any(tmp_path.glob("outputs/*/*/checkpoints/step_2")), 240)
    for process in nodes.processes(1):
        if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{process}/environ").read_bytes():  # the agent has none
            os.kill(process, signal.SIGKILL)
    assert [one.wait(240) for one in started] == [0, 0]
    for thread in written:
        thread.join(10)
    [folder] = tmp_path.glob("outputs/*/*")
    assert [m["step"] for m in metrics(folder)] == list(range(1, steps + 1))
