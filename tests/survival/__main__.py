"""`python -m tests.survival [kills] [reshard] [damage] [soak]`: what a run survives, measured, and with --write the page that
says so. `--only pp2 pp4` takes only these presets of kills and reshard.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.proofs.markdown import replace_between
from tests.survival import damage, kills, reshard, soak, table

PARTS = ("kills", "reshard", "damage", "soak")


def main() -> int:
    """Measure what the command line asks for. 1 when something was not survived."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    arguments = _arguments()
    parts = [part for part in PARTS if part in (arguments.part or PARTS)]
    found: Any = [_known(part, arguments.keep) if arguments.known else None for part in parts]
    for place, part in enumerate(parts):
        if found[place] is None:
            begun = time.monotonic()
            text, wrong = _measured(part, arguments.seed, small=arguments.small, only=arguments.only)
            found[place] = Measured(text, wrong, time.monotonic() - begun)
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{part}.json").write_text(json.dumps(asdict(found[place])))
        print(f"\n{found[place].text}\n", flush=True)
    command = shlex.join(["python", "-m", "tests.survival", *arguments.part])
    text = table.page([m.text for m in found], command, sum(m.seconds for m in found))
    if arguments.write:
        replace_between(arguments.write, table.MARKER, text)
    return 1 if any(m.wrong for m in found) else 0


@dataclass(frozen=True)
class Measured:
    """A part: its text, how much was not survived, and how long that took to find out."""

    text: str
    wrong: int
    seconds: float


def _known(part: str, folder: Path) -> Measured | None:
    path = folder / f"{part}.json"
    return Measured(**json.loads(path.read_text())) if path.is_file() else None


def _measured(part: str, seed: int, *, small: bool = False, only: Sequence[str] = ()) -> tuple[str, int]:
    """The text of a part, and how much was not survived."""
    if part == "kills":
        plans = [plan for plan in kills.PLANS if not only or plan.name.partition(":")[0] in only]
        outcomes = kills.sweep([kills.SHORT], steps=10) if small else kills.sweep(plans)
        return table.of_kills(outcomes), sum(bool(o.wrong) for o in outcomes)
    if part == "reshard":
        models = (
            {"gpt2": ("tp2", "cp2")} if small else {name: _presets(name, only) for name in reshard.MODELS}
        )
        pairs = [pair for model, presets in models.items() for pair in reshard.matrix(model, presets)]
        return table.of_pairs(pairs), sum(not pair.holds for pair in pairs)
    if part == "damage":
        counts = damage.measure(seed=seed, **({"flips": 10, "cuts": 5} if small else {}))
        return table.of_damage(counts), damage.missed(counts)
    soaked = soak.soak(seed=seed, **({"steps": 40, "kills": 2, "every": 10} if small else {}))
    held = soaked[0].same and soaked[1].apart <= soak.CLOSE
    return table.of_soak(soaked), sum(bool(s.wrong) for s in soaked) + (not held)


def _presets(model: str, only: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in reshard.presets_of(model) if not only or name in only)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.survival", description=__doc__)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="only these (all)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/parallelizer-survival"),
                        help="where each part is kept when it is done (%(default)s)")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a little of each part, to see that it runs")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PRESET", help="of kills and reshard, only these"
    )
    parser.add_argument("--known", action="store_true", help="measure only what is not kept there")
    parser.add_argument("--write", metavar="PAGE", help="the page to write the figures into")
    arguments = parser.parse_args()
    known = {*(plan.name.partition(":")[0] for plan in kills.PLANS), *reshard.PRESETS, *reshard.MIXTURE}
    if unknown := [name for name in arguments.only if name not in known]:
        parser.error(f"--only: there is no {', '.join(unknown)}")
    if arguments.only and (arguments.write or {"damage", "soak"} & set(arguments.part or PARTS)):
        parser.error("--only goes with kills and reshard, and not with --write")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
