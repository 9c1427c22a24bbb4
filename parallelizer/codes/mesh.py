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
