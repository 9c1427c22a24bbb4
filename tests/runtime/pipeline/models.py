"""A model with everything that a pipeline must carry around its step, and runs of it on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.runtime.state import state_of
from parallelizer.styles.application import Program
from tests.parity import VOCAB, plan, token_loss

WIDTH, ROWS, TOKENS = 8, 8, 6

PLAN = plan(
    'rules:\n  layers.*: [stage, fsdp]\n  layers.*.up: colwise\n  layers.*.down: rowwise\n  "": fsdp\n'
)

WORKLOAD = Workload(
    {
        "input_ids": Entry(("batch", "sequence"), "int64", (0, VOCAB)),
        "labels": Entry(("batch", "sequence"), "int64", (0, VOCAB), -100),
    },
    ROWS,
    TOKENS,
)


class Block(nn.Module):
    """A residual block with a saved buffer, and a frozen parameter."""

    kept: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.gain = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.register_buffer("kept", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)
        self.kept.copy_(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.drop(inner) * self.gain + self.kept.sum()


class Staged(nn.Module):
    """Token ids to logits, by four blocks. `tied`: the output layer has the embedding's weight. The root has a parameter that
    its own code reads, one that no code reads, and a saved buffer; `spare` is a module that no forward calls.
    """

    total: Tensor

    def __init__(self, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.after = nn.Linear(WIDTH, VOCAB, bias=False)
        self.spare = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.idle = nn.Parameter(torch.empty(2))
        self.register_buffer("total", torch.empty(2))
        if tied:
            self.after.weight = self.before.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.9, 1.1)
        nn.init.uniform_(self.idle)
        self.total.copy_(torch.arange(2.0))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.after(self.norm(x) * self.scale)
        return logits


@dataclass(frozen=True)
class Layout:
    """A mesh, and the schedule of the pipeline on it. No sizes: one process without a mesh."""

    sizes: tuple[tuple[str, int], ...] = ()
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return Mesh(dict(self.sizes)).world_size


ALONE = Layout()
PP2 = Layout((("pp", 2),))
ZBV = Layout((("pp", 2),), "zbv")
PP4 = Layout((("pp", 4),))
TP2 = Layout((("tp", 2),))
PP2_FSDP2 = Layout((("pp", 2), ("dp_shard", 2)))
PP2_TP2 = Layout((("pp", 2), ("tp", 2)))


def on_meta(build: Callable[[], nn.Module] = Staged) -> nn.Module:
    with torch.device("meta"):
        return build()


def program(layout: Layout, model: nn.Module) -> Program:
    """The compiled plan. To be called where there are no ranks yet, or on each of them."""
    return pz.compile(
        PLAN, model, Mesh(dict(layout.sizes)), workload=WORKLOAD, pipeline=Pipeline(layout.schedule)
    )


def parallel(layout: Layout, build: Callable[[], nn.Module] = Staged, seed: int = 0) -> nn.Module:
    """The model with values on the ranks that there are; alone without a mesh."""
    model = on_meta(build)
    if layout.sizes:
        mesh = pz.build_mesh(Mesh(dict(layout.sizes)), "cpu")
        pz.apply(program(layout, model), model, mesh)
    return pz.materialize(model, device="cpu", seed=seed)


def own_rows(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """This data rank's rows of a batch that depends on `seed` alone."""
    batch = WORKLOAD.example(ROWS, TOKENS, "cpu", seed)
    batch["labels"][1, 2:] = -100
    state = state_of(model)
    return batch if state is None else pz.shard_batch(batch, PLAN, state.mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Steps whose batches depend on their number only. Their losses."""
    return [
        pz.train_step(
            model, own_rows(model, step), token_loss, optimizer, 0.3, skip_nonfinite=True
        ).loss.item()
        for step in steps
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def tied(**more: Any) -> nn.Module:
    return Staged(tied=True, **more)
