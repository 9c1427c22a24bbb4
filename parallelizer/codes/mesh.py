"""Sizes of axes, and the number of ranks."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

CODES: tuple[Code, ...] = (
    Code(
        "mesh-rest-twice",
        "two axes are -1",
        """An axis of -1 takes what the other axes leave of the ranks. With two of them there are many ways to
        share that out, and each is another run.""",
        Example(
            overrides=["parallel.mesh.dp_shard=-1", "parallel.mesh.cp=-1", "world_size=8"],
        ),
    ),
    Code(
        "mesh-rest-unknown",
        "an axis is -1, and the number of ranks is not known",
        """What the other axes leave can be worked out only from the number of ranks. torchrun and Slurm tell
        it to the processes that they start; a command that is started alone is told with `world_size`.""",
        Example(overrides=["parallel=tp2", "parallel.mesh.dp_shard=-1"]),
    ),
    Code(
        "tp-crosses-nodes",
        "ranks of one tensor-parallel group lie on several nodes",
        """Every layer waits for collectives of `tp`, several times in each direction, and nothing hides them: they
        belong inside a node. Ranks are counted node by node with `tp` innermost, so that its groups fit wherever
        `tp` divides the ranks of a node; `hardware` says how many devices a node has, torchrun and Slurm say how many
        ranks they have put on each. The time is a lower bound from the bandwidths of `hardware` alone: what it takes
        to begin so many collectives over a network, and what else uses it, comes on top.""",
        Example(
            overrides=[
                *("parallel=fsdp2_tp2", "hardware=h100", "hardware.devices_per_node=1"),
                *("model.dim=64", "train.seq_len=64", "train.batch_size=2"),
            ],
            traced=True,
        ),
        severity="warning",
    ),
    Code(
        "unused-axis",
        "an axis is above 1, and no rule stands on it",
        """The ranks of such an axis would all compute the same on the same data: the run takes several times
        the machines and gains nothing. Mostly the preset does not fit the plan.""",
        Example('rules: {"": fsdp}', ["parallel.mesh.tp=2"]),
    ),
    Code(
        "world-size",
        "the mesh has another number of ranks than there are",
        """The product of the axes is the number of ranks. With fewer, some coordinates of the mesh have
        nobody; with more, some ranks belong to no group. Both end in a hang at the first collective, so it is
        refused before.""",
        Example(overrides=["parallel=tp4", "world_size=6"]),
    ),
)
