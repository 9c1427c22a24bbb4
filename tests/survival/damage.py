"""Damage to a checkpoint's files: any flipped bit, any cut, any missing file must be found before a number is read."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from tests.ranks import run_ranks
from tests.runtime.checkpoint.models import adamw, gathered_state, parallel, train

MESH = {"dp_shard": 2, "tp": 2}


@dataclass(frozen=True)
class Count:
    """How many of so many damaged checkpoints were refused as `checkpoint-damaged`, with the model untouched."""

    kind: str
    tried: int
    refused: int


def measure(*, flips: int = 300, cuts: int = 100, seed: int = 0) -> list[Count]:
    """Random bits of random files flipped, one at a time; random files cut at random places; every file removed; a file
    of another checkpoint in the place of one.
    """
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    try:
        run_ranks(_save, 4, folder, timeout=300)
        return _measured(folder / "step_2", folder / "step_1", flips, cuts, random.Random(seed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save(folder: Path) -> None:
    model = parallel(MESH)
    optimizer = adamw(model)
    for step in (1, 2):
        train(model, optimizer, [step - 1])
        save_checkpoint(folder, step, model, optimizer, {"samples": step})


def _measured(whole: Path, other: Path, flips: int, cuts: int, chance: random.Random) -> list[Count]:
    files = {path.name: path.read_bytes() for path in sorted(whole.iterdir())}
    damages: dict[str, list[tuple[str, bytes | None]]] = {
        "one bit flipped": [_flipped(files, chance) for _ in range(flips)],
        "a file cut": [_cut(files, chance) for _ in range(cuts)],
        "a file missing": [(name, None) for name in files],
        "a file of another step": [(name, (other / name).read_bytes()) for name in files],
    }
    model = parallel({}, seed=7)
    optimizer = adamw(model)
    before = gathered_state(model, optimizer)
    counts = []
    for kind, cases in damages.items():
        refused = 0
        for name, content in cases:
            if content is None:
                (whole / name).unlink()
            else:
                (whole / name).write_bytes(content)
            refused += _is_refused(whole, model, optimizer)
            (whole / name).write_bytes(files[name])
        counts.append(Count(kind, len(cases), refused if gathered_state(model, optimizer) == before else 0))
    load_checkpoint(whole, model, optimizer)  # and the whole one is not
    return counts


def _is_refused(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    try:
        load_checkpoint(path, model, optimizer)
    except PlanError as error:
        return {d.code for d in error.diagnostics} == {"checkpoint-damaged"}
    return False


def _flipped(files: dict[str, bytes], chance: random.Random) -> tuple[str, bytes]:
    name = chance.choice(list(files))
    content = bytearray(files[name])
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return name, bytes(content)


def _cut(files: dict[str, bytes], chance: random.Random) -> tuple[str, bytes]:
    name = chance.choice(list(files))
    return name, files[name][: chance.randrange(len(files[name]))]


def missed(counts: Sequence[Count]) -> int:
    """Damaged checkpoints that were not refused."""
    return sum(count.tried - count.refused for count in counts)
