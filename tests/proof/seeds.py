"""Correct plans on a hundred seeds: other initial values and other batches, and no alarm.

`python -m tests.proof.seeds` runs them, and with --write docs/proving.md puts what it found into the page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from benchmarks.proofs.markdown import replace_between, table
from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import prove
from tests.proof import subjects

SEEDS = 100
RUNS = (
    ("parallel=tp2",),
    ("parallel=cp2",),
    ("parallel=fsdp2", "++parallel.styles.fsdp.min_size=100"),
    ("parallel=cp2_tp2", "++model.tie_embeddings=true"),
    ("parallel=fsdp2_tp2", 'rules=["layers.*: checkpoint"]'),
    ("parallel=hsdp2x2", "plan=llama_tp", "train.accumulate=2"),
    ("parallel=tp2", "plan=llama_tp"),
)
"""What the seeds take turns with; seven of them, so that each meets odd and even seeds."""


def proofs(seeds: Sequence[int]) -> Iterator[tuple[int, tuple[str, ...], Proof]]:
    """Each seed with the overrides that were its turn and its proof."""
    for seed in seeds:
        overrides = RUNS[seed % len(RUNS)]
        yield seed, overrides, prove(subjects.setup(*overrides), seed=seed)


def worst_share(proof: Proof) -> float:
    """The worst error as a share of its bound."""
    return max(difference.share for difference in proof.verdict.differences)


def main() -> None:
    """Prove every seed, and write the figures into the documentation."""
    parser = argparse.ArgumentParser(
        "python -m tests.proof.seeds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (%(default)s)")
    parser.add_argument("--write", metavar="PAGE", help="the page to write the figures into")
    options = parser.parse_args()
    begin, shares, alarms = time.monotonic(), dict[tuple[str, ...], list[float]](), list[str]()
    for seed, overrides, proof in proofs(range(options.seeds)):
        shares.setdefault(overrides, []).append(worst_share(proof))
        if not proof.passed:
            alarms.append(f"- seed {seed}, {' '.join(overrides)}: {proof.divergence}")
    worst = max(share for of_run in shares.values() for share in of_run)
    text = f"{options.seeds - len(alarms)} of {options.seeds} seeds raise no alarm; the worst error is {worst:.2f} of its bound."
    rows = [[f"`{' '.join(run)}`", str(len(found)), f"{max(found):.2f}"] for run, found in shares.items()]
    lines = [text, "", table(["overrides", "seeds", "worst share of the bound"], rows), *alarms]
    if options.write:
        replace_between(options.write, "seeds", "\n".join(lines))
    print(f"{text} ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()
