"""Presets go on from what others saved: to the bit after loading, and with the same loss after that."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.batches import Batches, local_device
from parallelizer.training.data.corpus import build_data
from parallelizer.training.data.source import Source
from parallelizer.training.settings import Settings, read_settings
from tests.runtime.checkpoint.models import gathered_state
from tests.survival.runs import ROOT

PRESETS: Mapping[str, tuple[str, ...]] = {
    "single": ("parallel=single",),
    "replicate2": ("parallel=single", "parallel.mesh.dp_replicate=2"),
    "fsdp2": ("parallel=fsdp2",),
    "tp2": ("parallel=tp2",),
    "cp2": ("parallel=cp2",),
    "hsdp2x2": ("parallel=hsdp2x2",),
    "fsdp2_tp2": ("parallel=fsdp2_tp2",),
    "cp2_tp2": ("parallel=cp2_tp2",),
    "fsdp2_cp2_tp2": ("parallel=fsdp2_cp2_tp2",),
    "pp2": ("parallel=pp2",),
    "pp2, zbv": ("parallel=pp2", "parallel.pipeline.schedule=zbv"),
    "pp4": ("parallel=pp4",),
    "pp2_fsdp2_tp2": ("parallel=pp2_fsdp2_tp2",),
}
"""Thirteen ways to lie on 1 to 8 ranks."""

MIXTURE: Mapping[str, tuple[str, ...]] = {
    **{name: PRESETS[name] for name in ("single", "fsdp2", "tp2", "pp2")},
    "fsdp2_ep2": ("parallel=fsdp2_ep2",),
    "ep2 of fsdp4": ("parallel=fsdp4", "parallel.mesh.ep=2"),
    "fsdp4_ep4": ("parallel=fsdp4_ep4",),
    "fsdp2_ep4_tp2": ("parallel=fsdp2_ep4_tp2",),
    "pp2_fsdp2, ep2": ("parallel=pp2_fsdp2", "parallel.mesh.ep=2"),
}
"""Those of a mixture: its experts whole, in slices over tp, and shared out in four ways."""

MODELS: Mapping[str, tuple[str, ...]] = {
    "llama": ("model.n_layers=4", "model.dim=64", "model.hidden_dim=96", "model.max_seq_len=32"),
    "gpt2": (
        "model=hf_gpt2",
        "model.config.n_layer=4",
        "model.config.n_embd=64",
        "model.config.n_positions=32",
    ),
    "qwen3_moe": (
        "model=hf_qwen3_moe",
        "model.config.hidden_size=64",
        "model.config.head_dim=16",
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
        "model.config.moe_intermediate_size=32",
    ),
}
"""GPT-2 has queries, keys and values packed in one weight, which tensor parallelism cuts in pieces, and a tied head."""

COMMON = (
    "train.seq_len=32",
    "train.batch_size=8",
    "data=text",
    f"data.path={ROOT / 'LICENSE'}",
    "device=cpu",
)
STEPS = 2
CLOSE = 1e-5
"""Of the loss, relative: float32 sums that were added in another order."""


@dataclass(frozen=True)
class Pair:
    """One preset's checkpoint under another."""

    model: str
    source: str
    target: str
    differing: tuple[str, ...]
    apart: float

    @property
    def holds(self) -> bool:
        return not self.differing and self.apart <= CLOSE


@dataclass(frozen=True)
class Saved:
    """SHA-256 by name of what a source held, and the loss of its next step."""

    state: dict[str, str]
    loss: float


def presets_of(model: str) -> Mapping[str, tuple[str, ...]]:
    """The presets that a model is saved under and goes on from."""
    return MIXTURE if model == "qwen3_moe" else PRESETS


def matrix(model: str, presets: Sequence[str] = (), *, behind: Sequence[int] = ()) -> list[Pair]:
    """All pairs of some presets for one model, or of all. With `behind` each goes on only from those that are so many places
    behind it in the list, which begins again at its end.
    """
    known = presets_of(model)
    folder, pairs = Path(tempfile.mkdtemp(prefix="survival-")), []
    try:
        setups = {name: _composed([*MODELS[model], *known[name]]) for name in presets or known}
        sources = {
            name: _start(_save, *setup, folder / name, ranks=setup[0].mesh.world_size)
            for name, setup in setups.items()
        }
        names = list(setups)
        for place, (target, setup) in enumerate(setups.items()):
            begun = time.monotonic()
            of = {names[(place + far) % len(names)] for far in behind} or {*names}
            loaded = {name: saved for name, saved in sources.items() if name in of}
            found = _start(_load, *setup, folder, loaded, ranks=setup[0].mesh.world_size)
            pairs += [Pair(model, source, target, *found[source]) for source in loaded]
            good = sum(pair.holds for pair in pairs)
            print(
                f"{model} -> {target}: {good} of {len(pairs)}, {time.monotonic() - begun:.1f} s", flush=True
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return pairs


def _start(worker, *args, ranks):  # type: ignore[no-untyped-def]
    return launch.start(
        worker, args, ranks=ranks, device="cpu", start_timeout=300.0, collective_timeout=300.0
    )[0]


def _composed(overrides: Sequence[str]) -> tuple[pz.Setup, Settings, Source]:
    config, origins = compose_config([*COMMON, *overrides])
    return pz.from_config(config, origins), read_settings(config, origins), build_data(config.data)


def _save(setup: pz.Setup, settings: Settings, data: Source, folder: Path) -> Saved:
    model, optimizer, batches = _made(setup, settings, data, settings.seed)
    loss = 0.0
    for step in range(STEPS + 1):
        if step == STEPS:
            state = gathered_state(model, optimizer)
            save_checkpoint(folder, STEPS, model, optimizer)
        loss = _step(setup, model, optimizer, batches, step)
    return Saved(state, loss)


def _load(
    setup: pz.Setup, settings: Settings, data: Source, folder: Path, sources: Mapping[str, Saved]
) -> dict[str, tuple[tuple[str, ...], float]]:
    """By source: the tensors that differ after loading, and how far the next loss is from the source's, relatively."""
    found = {}
    for source, saved in sources.items():
        model, optimizer, batches = _made(setup, settings, data, settings.seed + 1)
        load_checkpoint(folder / source / f"step_{STEPS}", model, optimizer)
        state = gathered_state(model, optimizer)
        differing = tuple(n for n in {**state, **saved.state} if state.get(n) != saved.state.get(n))
        loss = _step(setup, model, optimizer, batches, STEPS)
        found[source] = differing, abs(loss - saved.loss) / saved.loss
    return found


def _made(
    setup: pz.Setup, settings: Settings, data: Source, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    mesh = pz.build_mesh(setup.mesh, "cpu")
    model = setup.build_model()
    model = pz.apply(setup.compile(model), model, mesh)
    pz.materialize(model, device="cpu", seed=seed)
    batches = Batches(data, setup.plan, setup.workload, settings, mesh, local_device("cpu"))
    return model, setup.build_optimizer(model), batches


def _step(
    setup: pz.Setup, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, step: int
) -> float:
    parts = batches.training(step * setup.workload.batch_size)
    return pz.train_step(model, parts, setup.loss(), optimizer, setup.clip).loss.item()
