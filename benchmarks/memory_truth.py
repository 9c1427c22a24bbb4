"""The predicted peak of memory against the CPU allocator's, over plans, models, meshes, precisions and ranks.

    python -m benchmarks.memory_truth [--only TEXT] [--phases]

Each case is traced in the fake world, and run in a second process with real tensors and kernels on one rank
whose peers do not exist, under torch's profiler; both for two steps, of which the second counts. One thread.
A case is equal when the peaks are, to the byte. `--phases` lists the highest points of single phases that
differ.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from parallelizer.child.children import in_children
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.simulate.record.memory import usage
from parallelizer.simulate.record.trace import record, trace
from tests.simulate.allocator import differences, measured_peaks, predicted_peaks
from tests.simulate.setups import (
    CAST,
    CONFIGS,
    FLOAT8_RECIPES,
    GATHERED,
    GPT,
    LLAMA,
    MIXTURES,
    SELECTIVE,
    in_float8,
    setup_of,
)
from tests.simulate.setups import CHECKPOINT as FULL

MESHES = {
    "single": (),
    "dp2": ("parallel.mesh.dp_replicate=2",),
    "fsdp2": ("parallel=fsdp2",),
    "fsdp3": ("parallel.mesh.dp_shard=3", "train.batch_size=6"),
    "fsdp4": ("parallel=fsdp4",),
    "hsdp2x2": ("parallel=hsdp2x2",),
    "tp2": ("parallel=tp2",),
    "tp4": ("parallel=tp4",),
    "cp2": ("parallel=cp2",),
    "cp4": ("parallel=cp4",),
    "fsdp2_tp2": ("parallel=fsdp2_tp2",),
    "cp2_tp2": ("parallel=cp2_tp2",),
    "fsdp2_cp2": ("parallel.mesh.dp_shard=2", "parallel.mesh.cp=2"),
    "fsdp2_cp2_tp2": ("parallel=fsdp2_cp2_tp2",),
    "hsdp2x2_tp2": ("parallel.mesh.dp_replicate=2", "parallel.mesh.dp_shard=2", "parallel.mesh.tp=2"),
    "tp8_cp2": ("parallel=tp8_cp2",),
}
PIPELINES = ("pp2", "pp2_tp2", "pp2_fsdp2", "pp2_cp2")
EXPERT_PRESETS = ("fsdp2_ep2", "fsdp4_ep4", "fsdp2_ep4_tp2")
TENSOR = ("tp2", "tp4", "fsdp2_tp2", "cp2_tp2", "fsdp2_cp2_tp2")
BFLOAT16 = "train.dtype=bfloat16"


@dataclass(frozen=True)
class Case:
    """One configuration as overrides, and the rank whose memory is compared, from behind if it is negative. `fold` traces
    short models for equal layers.
    """

    name: str
    overrides: tuple[str, ...]
    rank: int = 0
    fold: bool = False


def llama(name: str, mesh: str, *more: str, rank: int = 0, fold: bool = False) -> Case:
    """A case of the recipe's model."""
    return Case(f"{mesh} {name}".strip(), (*LLAMA, *MESHES[mesh], *more), rank, fold)


def gpt(name: str, mesh: str, *more: str, rank: int = 0) -> Case:
    """A case of a model with LayerNorm, biases, a fused projection and tied embeddings."""
    return Case(f"{mesh} gpt {name}".strip(), (*GPT, *MESHES[mesh], *more), rank)


def people(model: str, mesh: str, name: str = "", *more: str) -> Case:
    """A case of a model with convolutions."""
    plan = () if model == "vit_tiny" else (GPT[0], f"plan={CONFIGS}/plans/everywhere.yaml")
    overrides = (*plan, f"model={model}", "train.seq_len=32", "train.batch_size=8", *MESHES[mesh], *more)
    return Case(f"{mesh} {model} {name}".strip(), overrides)


def mixture(model: str, preset: str, name: str = "", *more: str, rank: int = 0) -> Case:
    """A case of a mixture whose experts are shared out."""
    overrides = (f"model={model}", *MIXTURES[model], "train.seq_len=32", f"parallel={preset}", *more)
    return Case(f"{preset} {model} {name}".strip(), overrides, rank)


def pipeline(preset: str, schedule: str, rank: int) -> Case:
    """A case of the recipe's model, cut into stages."""
    overrides = (
        *LLAMA, f"parallel={preset}", f"parallel.pipeline.schedule={schedule}",
        "parallel.pipeline.microbatches=4", "model.n_layers=4",
    )  # fmt: skip
    return Case(f"{preset} {schedule} {'first' if rank == 0 else 'last'} rank", overrides, rank)


def cases() -> Iterator[Case]:
    """Every case, in the order of the table."""
    for mesh in MESHES:
        yield llama("", mesh)
        yield llama("bf16", mesh, BFLOAT16)
        yield llama("checkpoint", mesh, FULL.format("layers"))
        yield llama("bf16 selective", mesh, BFLOAT16, SELECTIVE.format("layers"))
    for mesh in TENSOR:
        yield llama("llama_tp", mesh, "plan=llama_tp")
        yield llama("llama_tp bf16 checkpoint", mesh, "plan=llama_tp", BFLOAT16, FULL.format("layers"))
    for mesh in ("fsdp2", "hsdp2x2", "fsdp2_tp2"):
        for reshard in ("true", "false"):
            yield llama(f"reshard {reshard}", mesh, f"++parallel.styles.fsdp.reshard_after_forward={reshard}")
    for mesh in ("single", "fsdp2", "tp2", "cp2", "fsdp2_cp2_tp2"):
        yield llama("accumulate 2", mesh, "train.accumulate=2")
        yield llama(
            "bf16 accumulate 2 checkpoint", mesh, "train.accumulate=2", BFLOAT16, FULL.format("layers")
        )
    for mesh in ("fsdp2", "fsdp2_tp2"):
        yield llama("min_size", mesh, "++parallel.styles.fsdp.min_size=5000")
        yield llama("bf16 min_size", mesh, "++parallel.styles.fsdp.min_size=5000", BFLOAT16)
        yield llama("shard_dim largest", mesh, "++parallel.styles.fsdp.shard_dim=largest")
        yield llama("tied", mesh, "+model.tie_embeddings=true")
        yield llama("cpu_offload", mesh, "++parallel.styles.fsdp.cpu_offload=true")
        yield llama("no clipping", mesh, "train.clip=null")
        yield llama("unfused", mesh, "optim.fused=false")
        yield llama("reduce bf16", mesh, BFLOAT16, "parallel.styles.fsdp.reduce_dtype=bfloat16")
    yield llama("keep_gathered", "cp2", "++parallel.styles.context-parallel.keep_gathered=true")
    yield llama("long", "single", "train.seq_len=256", "train.batch_size=1")
    yield llama("long bf16", "cp2", "train.seq_len=256", "train.batch_size=1", BFLOAT16)
    for mesh in ("single", "fsdp2", "tp2", "fsdp2_tp2", "cp2"):
        for recipe in FLOAT8_RECIPES:
            yield llama(f"float8 {recipe}", mesh, in_float8(recipe))
            yield llama(f"float8 {recipe} bf16", mesh, in_float8(recipe), BFLOAT16)
    for mesh in ("fsdp2", "tp2"):
        checkpointed = in_float8("tensorwise", "layers.*: checkpoint")
        yield llama("float8 tensorwise bf16 checkpoint", mesh, checkpointed, BFLOAT16)
    for mesh in ("fsdp2", "fsdp3", "fsdp2_tp2", "hsdp2x2_tp2"):
        yield llama("float8 gathered", mesh, in_float8("tensorwise", GATHERED))
        yield llama("float8 gathered bf16", mesh, in_float8("tensorwise", GATHERED), BFLOAT16)
    for mesh in ("tp2", "fsdp2_tp2", "cp2_tp2"):
        yield llama("float8 cast", mesh, in_float8("tensorwise", CAST))
        yield llama("float8 cast bf16", mesh, in_float8("tensorwise", CAST), BFLOAT16)
    for recipe, rank in itertools.product(FLOAT8_RECIPES, (0, -1)):
        place = "first" if rank == 0 else "last"
        overrides = (*LLAMA, "parallel=pp2", "parallel.pipeline.microbatches=4", in_float8(recipe), BFLOAT16)
        yield Case(f"2 stages float8 {recipe} bf16 {place} rank", overrides, rank)
    for mesh, rank in (
        ("fsdp3", 2),
        ("fsdp4", 3),
        ("cp2", 1),
        ("cp4", 2),
        ("fsdp2_tp2", 3),
        ("fsdp2_cp2_tp2", 7),
        ("tp8_cp2", 15),
    ):
        yield llama(f"rank {rank}", mesh, rank=rank)
        yield llama(f"bf16 checkpoint rank {rank}", mesh, BFLOAT16, FULL.format("layers"), rank=rank)
    for preset, schedule, rank in itertools.product(PIPELINES, SCHEDULES, (0, -1)):
        yield pipeline(preset, schedule, rank)
    for mesh in ("single", "fsdp2", "fsdp3", "hsdp2x2", "tp2", "fsdp2_tp2"):
        yield gpt("", mesh)
        yield gpt("bf16", mesh, BFLOAT16)
        yield gpt("checkpoint", mesh, FULL.format("blocks"))
    for model, mesh in itertools.product(("unet", "mamba", "vit_tiny"), ("single", "fsdp2", "hsdp2x2")):
        yield people(model, mesh)
        yield people(model, mesh, "bf16", BFLOAT16)
    for model, preset in itertools.product(MIXTURES, EXPERT_PRESETS):
        yield mixture(model, preset)
        yield mixture(model, preset, "bf16 checkpoint", BFLOAT16, FULL.format("model.layers"))
    for model in MIXTURES:
        yield mixture(model, "fsdp2_ep2", "skewed", "++parallel.routing={skew: 1.3}", rank=1)
        for rank in (0, 1):
            yield mixture(model, "fsdp2_ep2", f"worst rank {rank}", "++parallel.routing=worst", rank=rank)
    for mesh in ("single", "fsdp2_tp2", "cp2"):
        yield llama("10 layers folded", mesh, "model.n_layers=10", fold=True)
        yield llama(
            "10 layers folded checkpoint", mesh, "model.n_layers=10", FULL.format("layers"), fold=True
        )


def compare(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Predicted and measured highest points by phase, in children of this process."""
    setup = setup_of(*case.overrides)
    model = setup.build_model()
    program = setup.compile(model)
    recipe = setup.recipe()
    rank = case.rank % setup.mesh.world_size
    if case.fold:
        predicted = trace(program, model, recipe, rank).memory
        (measured,) = in_children([(measured_peaks, program, model, recipe, rank)])
    else:
        recording, measured = in_children(
            [(f, program, model, recipe, rank) for f in (record, measured_peaks)]
        )
        predicted = usage(recording.before, recording.changes)
    return predicted_peaks(predicted), measured


def main() -> None:
    """Compare every case and print the table, the number of equal ones and the worst error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--phases", action="store_true", help="list the highest points of phases that differ")
    options = parser.parse_args()
    begin, done, equal, phases, worst = time.time(), 0, 0, 0, (0, 0.0, "none")
    print(f"{'case':<44}{'measured':>12}{'predicted':>12}{'difference':>12}")
    for case in cases():
        if options.only not in case.name:
            continue
        predicted, measured = compare(case)
        error, different = predicted["peak"] - measured["peak"], differences(predicted, measured)
        done, equal, phases = done + 1, equal + (not error), phases + (not different)
        if error:
            worst = max(worst, (abs(error), abs(error) / measured["peak"], case.name))
        print(f"{case.name:<44}{measured['peak']:>12,}{predicted['peak']:>12,}{error:>12,}", flush=True)
        if options.phases and different:
            print(f"    {different}")
    print(
        f"\n{equal} of {done} peaks equal to the byte; worst error {worst[0]:,} bytes, {worst[1]:.2%} ({worst[2]})"
    )
    print(f"{phases} of {done} equal in the highest point of every phase")
    print(f"{time.time() - begin:.0f} s, torch {torch.__version__}, one thread")


if __name__ == "__main__":
    main()
