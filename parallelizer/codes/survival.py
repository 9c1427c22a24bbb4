"""Checkpoints, faults, and what changes under a run."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_TRAIN = "python -m recipes.train parallel=fsdp2_tp2"

CODES: tuple[Code, ...] = (
    Code(
        "nonfinite",
        "a step's loss or gradient norm is NaN or infinite",
        """No rank takes such a step: one update with a NaN in it makes every parameter a NaN, and what was trained
        is lost. The step is done again with every module looked at, and the message names the first module, in
        forward or in backward, and the rank. Once in a while it is the data, or a learning rate that is too high
        for it; numbers that do not come again with the same batch speak of a faulty device.""",
        Example(
            command=f"{_TRAIN} train.on_nonfinite=stop",
            because="it takes numbers that are not finite in the middle of a run",
        ),
    ),
    Code(
        "out-of-step",
        "ranks are not at the same step, or not on the same data",
        """Ranks add up their gradients without asking of which step they are. One that has skipped a step, or has
        resumed from another checkpoint than the others, goes on without an error, and all train on a mixture.
        So once a step they tell each other where they are; the message names those that are apart from most.""",
        Example(command=_TRAIN, because="it takes ranks that have lost each other in the middle of a run"),
    ),
)
