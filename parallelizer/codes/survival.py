"""Checkpoints that cannot be saved, loaded or gone on from, and what goes wrong under a run."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_TRAIN = "python -m recipes.train"

CODES: tuple[Code, ...] = (
    Code(
        "data-changed",
        "a file that the run reads is not what it was",
        """A text is read once, when the run starts, and the file's size, times and SHA-256 are noted. At every
        checkpoint its size and times are looked at again, and where only the times differ it is read again: a
        file that was merely touched is fine. What was cut off, removed or overwritten meanwhile is told at once,
        because nobody could resume from that checkpoint: its place in the data would mean other samples.""",
        Example(
            command=f"{_TRAIN} data=text data.path=./text.txt",
            because="the file has to change while the run goes on",
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
            command=f"{_TRAIN} train.resume=./outputs/checkpoints/step_100 train.seed=1",
            because="it takes a checkpoint of a run with another seed",
        ),
    ),
)
