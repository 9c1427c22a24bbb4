"""Checkpoints, faults, and what changes under a run."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_RUN = "python -m recipes.train"
_RUNNING = "it takes a run, or the checkpoints of one"

CODES: tuple[Code, ...] = (
    Code(
        "checkpoint-damaged",
        "a checkpoint does not hold what was written",
        """Every file of a checkpoint is hashed before one of its numbers is read: a flipped bit, a file that is cut
        off, missing or changed. A run that goes on by itself (`train.resume=auto`) takes the newest checkpoint that is
        whole, and says which it passed over; one that is named must be whole. A hash tells damage, not intent: load
        checkpoints of people whom you trust.""",
        Example(command=f"{_RUN} train.resume=runs/a/checkpoints/step_40", because=_RUNNING),
    ),
    Code(
        "checkpoint-dtype",
        "a checkpoint holds another kind of numbers than the model",
        """The same names and sizes in another dtype. A cast would lose what the run had, in silence; so the model must
        be built in the dtype that it was saved in.""",
        Example(command=f"{_RUN} train.resume=runs/a", because=_RUNNING),
    ),
    Code(
        "checkpoint-exists",
        "a run that is to start anew finds checkpoints in its folder",
        """`train.resume=never` begins with step 1. Its checkpoints would lie among those of another run, and after a
        restart nobody could tell them apart.""",
        Example(command=f"{_RUN} train.resume=never hydra.run.dir=runs/a", because=_RUNNING),
    ),
    Code(
        "checkpoint-in-use",
        "another run saves into the same folder",
        """Two runs would remove each other's checkpoints and go on from each other's steps. Mostly the other one was
        thought to be dead: ranks may outlive a torchrun that was killed. The message names the process, which holds a lock
        on the folder for as long as it lives.""",
        Example(command=f"{_RUN} train.checkpoint_every=10 hydra.run.dir=runs/a", because=_RUNNING),
    ),
    Code(
        "checkpoint-mismatch",
        "a checkpoint is of another model",
        """Parameters and saved buffers must have the same names and whole shapes; how they are split may differ. What is
        missing would stay random, what is too much would be lost, and neither shows in a loss at once.""",
        Example(command=f"{_RUN} model.dim=512 train.resume=runs/a", because=_RUNNING),
    ),
    Code(
        "checkpoint-not-found",
        "there is no checkpoint where the configuration says",
        """`train.resume` names a checkpoint (a folder `step_<N>` with a manifest), a folder of them, or the output folder
        of a run.""",
        Example(command=f"{_RUN} train.resume=runs/b", because=_RUNNING),
    ),
    Code(
        "checkpoint-optimizer",
        "a checkpoint's optimizer is another than this run's",
        """Its moments belong to parameters and to one kind of optimizer. Another optimizer would start with none, or
        read numbers that mean something else; parameters that were frozen then and are trained now have none.""",
        Example(command=f"{_RUN} optim._target_=mine.build train.resume=runs/a", because=_RUNNING),
    ),
    Code(
        "checkpoint-unwritable",
        "a checkpoint could not be written",
        """The disk is full, the folder may not be written to, or the ranks do not see one folder. The run goes on, the
        checkpoints before it stay as they were, and what was half written is removed; the next one is tried again. What
        can be told before a rank starts, that the place is no folder, is an error.""",
        Example(command=f"{_RUN} train.checkpoint_every=10", because=_RUNNING),
        "warning",
    ),
    Code(
        "data-changed",
        "a file that the run reads is not what it was",
        """A text is read once, when the run starts, and the file's size, times and SHA-256 are noted. At every
        checkpoint its size and times are looked at again, and where only the times differ it is read again: a
        file that was merely touched is fine. What was cut off, removed or overwritten meanwhile is told at once,
        because nobody could resume from that checkpoint: its place in the data would mean other samples.""",
        Example(
            command=f"{_RUN} data=text data.path=./text.txt",
            because="the file has to change while the run goes on",
        ),
    ),
    Code(
        "nonfinite",
        "a step's loss or gradient norm is NaN or infinite",
        """No rank takes such a step: one update with a NaN in it makes every parameter a NaN, and what was trained
        is lost. The step is done again with every module looked at, and the message names the first module, in
        forward or in backward, and the rank. Once in a while it is the data, or a learning rate that is too high
        for it; numbers that do not come again with the same batch speak of a faulty device.""",
        Example(
            command=f"{_RUN} parallel=fsdp2_tp2 train.on_nonfinite=stop",
            because="it takes numbers that are not finite in the middle of a run",
        ),
    ),
    Code(
        "out-of-step",
        "ranks are not at the same step, or not on the same data",
        """Ranks add up their gradients without asking of which step they are. One that has skipped a step, or has
        resumed from another checkpoint than the others, goes on without an error, and all train on a mixture.
        So once a step they tell each other where they are; the message names those that are apart from most.""",
        Example(
            command=f"{_RUN} parallel=fsdp2_tp2",
            because="it takes ranks that have lost each other in the middle of a run",
        ),
    ),
    Code(
        "ranks-drifted",
        "ranks that should hold the same numbers hold different ones",
        """Replicated parameters, the optimizer's states of them and persistent buffers start alike on all ranks, get the
        same updates, and are never compared by what trains them. A gradient that nobody sums, a faulty device or memory,
        or a rank that was loaded otherwise makes them differ, and the loss tells nothing of it. So their bytes are
        compared every so many steps; the message names the ranks, the parameters and how far they are apart.""",
        Example(
            command="python -m recipes.train parallel=fsdp2_tp2 train.check_every=1",
            because="it takes numbers that change on one rank in the middle of a run",
        ),
    ),
    Code(
        "resume-data",
        "a run cannot go on where it was in its data",
        """A checkpoint says how many samples were trained on. Which ones these were depends on the seed, the
        length of a sequence, the files, and the share of them that is held out; with another one, the next
        samples might be some that were seen already, and others would never come. The batch size and the mesh
        may change: samples are counted, not steps.""",
        Example(
            command=f"{_RUN} train.resume=./outputs/checkpoints/step_100 train.seed=1",
            because="it takes a checkpoint of a run with another seed",
        ),
    ),
)
