"""`python -m tests.survival [kills] [reshard] [damage] [soak]`: what a run survives, measured, and with --write the page that
says so.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import warnings
from pathlib import Path

import torch

from parallelizer.show.markdown import replace_between
from tests.survival import damage, kills, reshard, soak, table

PARTS = ("kills", "reshard", "damage", "soak")


def main() -> int:
    """Measure what the command line asks for. 1 when something was not survived."""
    torch.set_num_threads(1)  # it forks ranks
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    arguments = _arguments()
    parts, begun, bad = arguments.part or PARTS, time.monotonic(), 0
    texts = []
    for part in (name for name in PARTS if name in parts):
        text, wrong = _measured(part, arguments.seed)
        texts.append(text)
        bad += wrong
        print(f"\n{text}\n", flush=True)
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{part}.md").write_text(text)
    command = shlex.join(["python", "-m", "tests.survival", *arguments.part])
    if arguments.write:
        replace_between(arguments.write, table.MARKER, table.page(texts, command, time.monotonic() - begun))
    return 1 if bad else 0


def _measured(part: str, seed: int) -> tuple[str, int]:
    """The text of a part, and how much was not survived."""
    if part == "kills":
        outcomes = kills.sweep()
        return table.of_kills(outcomes), sum(bool(o.wrong) for o in outcomes)
    if part == "reshard":
        pairs = [pair for model in reshard.MODELS for pair in reshard.matrix(model)]
        return table.of_pairs(pairs), sum(not pair.holds for pair in pairs)
    if part == "damage":
        counts = damage.measure(seed=seed)
        return table.of_damage(counts), damage.missed(counts)
    soaked = soak.soak(seed=seed)
    held = soaked[0].same and soaked[1].apart <= soak.CLOSE
    return table.of_soak(soaked), sum(bool(s.wrong) for s in soaked) + (not held)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.survival", description=__doc__)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="only these (all)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--keep", type=Path, help="a folder for the text of each part, as it is done")
    parser.add_argument("--write", metavar="PAGE", help="the page to write the figures into")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
