"""The predicted ledger of collectives against a real run's, entry by entry and rank by rank.

    python -m benchmarks.ledger_truth [--only TEXT]

For every shipped preset of up to four ranks, under both plans, with and without activation checkpointing, in float8 by
every recipe, for those of pipelines under every schedule, and for mixtures whose experts are shared out, with the routing that
ran: the step runs on gloo processes with the recorder that the
dry run uses, and is traced in the fake world for each of its ranks. An entry is equal when kind, axis, ranks, bytes, dtype,
phase, module, rule and overlap are.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from parallelizer.child.children import in_children
from parallelizer.configuration.setup import Setup
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.trace import record
from tests.simulate.real_ledger import real_steps
from tests.simulate.setups import (
    CAST,
    CHECKPOINT,
    FLOAT8_RECIPES,
    GATHERED,
    MIXTURES,
    in_float8,
    llama,
    setup_of,
)

PRESETS = ("single", "fsdp2", "fsdp4", "hsdp2x2", "tp2", "tp4", "cp2", "cp4", "fsdp2_tp2", "cp2_tp2")
PIPELINES = ("pp2", "pp2_tp2", "pp2_fsdp2", "pp2_cp2")
FLOAT8_PRESETS = ("fsdp2", "tp2", "cp2", "pp2", "fsdp2_tp2")
GATHERING_PRESETS = ("fsdp2", "hsdp2x2", "fsdp2_tp2")
CASTING_PRESETS = ("tp2", "fsdp2_tp2", "cp2_tp2")
STAGES = ("parallel.pipeline.microbatches=4", "model.n_layers=4")
PLANS = ("llama", "llama_tp")
VARIANTS = {
    "": (),
    "checkpoint": (CHECKPOINT.format("layers"),),
    "bf16 accumulate 2": ("train.dtype=bfloat16", "train.accumulate=2"),
}


EXPERT_MESHES = (("dp_shard=2", "ep=2"), ("cp=2", "ep=2"), ("tp=2", "ep=2"), ("dp_shard=4", "ep=4"))
EXPERT_VARIANTS = {"": (), "checkpoint": (CHECKPOINT.format("model.layers"),)}


def cases(only: str = "") -> Iterator[tuple[str, Setup]]:
    """Every case with its name, or those whose names contain `only`."""
    for preset, plan, (variant, more) in itertools.product(PRESETS, PLANS, VARIANTS.items()):
        name = f"{preset} {plan} {variant}".strip()
        if only in name:
            yield name, llama(f"parallel={preset}", f"plan={plan}", *more)
    for preset, plan, recipe in itertools.product(FLOAT8_PRESETS, PLANS, FLOAT8_RECIPES):
        name = f"{preset} {plan} float8 {recipe}"
        if only in name:
            yield name, llama(f"parallel={preset}", f"plan={plan}", in_float8(recipe))
    for preset in GATHERING_PRESETS:
        name = f"{preset} llama float8 gathered"
        if only in name:
            yield name, llama(f"parallel={preset}", in_float8("tensorwise", GATHERED))
    for preset in CASTING_PRESETS:
        name = f"{preset} llama float8 cast"
        if only in name:
            yield name, llama(f"parallel={preset}", in_float8("tensorwise", CAST))
    for preset, schedule in itertools.product(PIPELINES, SCHEDULES):
        name = f"{preset} {schedule}"
        if only in name:
            yield name, llama(f"parallel={preset}", f"parallel.pipeline.schedule={schedule}", *STAGES)
    for (model, sizes), mesh, (variant, more) in itertools.product(
        MIXTURES.items(), EXPERT_MESHES, EXPERT_VARIANTS.items()
    ):
        name = f"{' '.join(mesh)} {model} {variant}".strip()
        if only in name:
            axes = (f"parallel.mesh.{axis}" for axis in mesh)
            yield name, setup_of(f"model={model}", *sizes, "train.seq_len=16", *axes, *more)


def predicted_ledgers(setup: Setup) -> list[tuple[Collective, ...]]:
    """What the fake world says of each rank."""
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    return [
        r.ledger
        for r in in_children(
            [(record, program, model, recipe, rank) for rank in range(setup.mesh.world_size)]
        )
    ]


def equal_entries(predicted: tuple[Collective, ...], real: tuple[Collective, ...]) -> tuple[int, int]:
    """How many entries are equal, in order, and how many there are on the longer side."""
    return sum(p == r for p, r in zip(predicted, real, strict=False)), max(len(predicted), len(real))


def main() -> None:
    """Compare every case and print the table and the totals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    begin, equal, total, whole = time.time(), 0, 0, 0
    chosen = list(cases(options.only))
    chosen.sort(key=lambda c: c[1].mesh.world_size)
    print(f"{'case':<40}{'ranks':>6}{'entries':>9}{'equal':>9}")
    for ranks, group in itertools.groupby(chosen, key=lambda c: c[1].mesh.world_size):
        names, setups = zip(*group, strict=True)
        with tempfile.TemporaryDirectory() as folder:
            ran = real_steps(setups, Path(folder))
        for name, setup, (real, routing) in zip(names, setups, ran, strict=True):
            followed = predicted_ledgers(dataclasses.replace(setup, routing=routing))
            counts = [equal_entries(p, r) for p, r in zip(followed, real, strict=True)]
            same, entries = (sum(column) for column in zip(*counts, strict=True))
            equal, total, whole = equal + same, total + entries, whole + (same == entries)
            print(f"{name:<40}{ranks:>6}{entries:>9,}{same:>9,}", flush=True)
    print(f"\n{equal:,} of {total:,} entries equal; {whole} of {len(chosen)} cases equal in all")
    print(f"{time.time() - begin:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()
