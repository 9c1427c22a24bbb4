"""What a run that goes is compared with, and whom it tells."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_RUN = "python -m recipes.train"

CODES: tuple[Code, ...] = (
    Code(
        "not-as-planned",
        "a run's first step is not the one that the dry run has followed",
        """Rank 0 counts the collectives of its first step by phase, axis and kind, and its allocator's peak, and compares
        them with what `parallelizer plan` says. Where they differ, the run does something that was not planned: another
        branch of the model, hooks of your own, a kernel that moves data or holds it. The training goes on. On CUDA
        DTensor exchanges some tensors by an all-to-all that it gathers on a CPU, whose operators the dry run follows.
        `train.compare=false` looks no more.""",
        Example(command=f"{_RUN} model=mine", because="it takes a run"),
        "warning",
    ),
    Code(
        "tracker-failed",
        "a tracker has failed while the run goes on",
        """TensorBoard or Weights & Biases could not be opened or written to: a full disk, no key, no network. It is left
        out from then on; `metrics.jsonl` has every step, and the training is not touched.""",
        Example(command=f"{_RUN} train.trackers=[wandb]", because="it depends on what is reachable"),
        "warning",
    ),
    Code(
        "tracker-missing",
        "a tracker's package is not installed",
        """`train.trackers` names it. It is looked for before a rank starts, so that a run does not end up without the
        curves that it was started for.""",
        Example(command=f"{_RUN} train.trackers=[wandb]", because="it depends on what is installed"),
    ),
)
