"""What watches over a run: numbers that are not finite, ranks out of step, and ranks that drift apart.

    done = pz.train_step(model, parts, loss, optimizer, clip, skip_nonfinite=True)
    if done.skipped is not None:
        found = find_nonfinite(model, parts, loss, done.skipped)

Each looks and tells; what to do about it is the training loop's to say.
"""

from parallelizer.guards.agreement import Agreement, Verdict, out_of_step
from parallelizer.guards.drift import Drift, find_drift, ranks_drifted
from parallelizer.guards.nonfinite import Nonfinite, find_nonfinite, nonfinite

__all__ = [
    "Agreement",
    "Drift",
    "Nonfinite",
    "Verdict",
    "find_drift",
    "find_nonfinite",
    "nonfinite",
    "out_of_step",
    "ranks_drifted",
]
