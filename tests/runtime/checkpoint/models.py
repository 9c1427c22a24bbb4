"""A small model with everything that a checkpoint must cope with, its optimizers, and what they hold, gathered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.runtime.state_dict import state_tensors, whole_state_dict, whole_tensor
from tests.parity import VOCAB, plan, token_batch, token_loss
from tests.styles.models import WIDTH, FusedAttention, GroupedAttention

PLAN = plan(
    "rules:\n"
    "  fused.qkv: {style: colwise, packed: [q_heads, kv_heads, kv_heads]}\n"
    "  fused: {style: shard-params, divide: [heads, kv_heads]}\n"
    "  fused.q_norm: replicate\n"
    "  fused.out: rowwise\n"
    "  grouped.q: colwise\n"
    "  grouped.[kv]: {style: colwise, replicate_kv: true}\n"
    "  grouped.k_norm: replicate\n"
    "  grouped: {style: shard-params, divide_groups: [groups], replicate_kv: true}\n"
    "  grouped.out: rowwise\n"
    '  "": fsdp\n'
)


class Everything(nn.Module):
    """Token ids to logits. A fused projection, fewer key-value heads than ranks, a shared and a frozen parameter, one of
    odd length, buffers that are saved, empty, and not saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Embedding(VOCAB, WIDTH)
        self.fused = FusedAttention(8, 4)
        self.grouped = GroupedAttention(8, 2)
        self.frozen = nn.Linear(WIDTH, 5)
        self.frozen.requires_grad_(False)
        self.back = nn.Linear(5, WIDTH)
        self.after = nn.Linear(WIDTH, VOCAB, bias=False)
        self.after.weight = self.before.weight
        self.extra = Buffers()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(input_ids)
        x = x + self.fused(x)
        x = x + self.grouped(x)
        x = x + self.back(torch.tanh(self.frozen(x))) * self.extra.kept.sum() * self.extra.derived
        logits: Tensor = self.after(x)
        return logits


class Buffers(nn.Module):
    """Three buffers: one that is saved, an empty one that is saved, and one that is made anew."""

    kept: Tensor
    empty: Tensor
    derived: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.empty(3))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("derived", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.kept.copy_(torch.arange(3.0))
        self.derived.fill_(0.5)


def on_meta(build: Callable[[], nn.Module] = Everything) -> nn.Module:
    with torch.device("meta"):
        return build()


def parallel(sizes: dict[str, int], seed: int = 0, build: Callable[[], nn.Module] = Everything) -> nn.Module:
    """The model with values on a mesh of the ranks that there are; without a mesh when `sizes` is empty."""
    model = on_meta(build)
    if sizes:
        pz.parallelize(model, PLAN, pz.build_mesh(Mesh(sizes), "cpu"))
    return pz.materialize(model, device="cpu", seed=seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Steps whose batches depend on their number only. Their losses."""
    losses = []
    for step in steps:
        batch = {name: rows.roll(step, 0) + 0 for name, rows in token_batch().items()}
        batch["input_ids"] = (batch["input_ids"] + step) % VOCAB
        losses.append(pz.train_step(model, _own_rows(model, batch), token_loss, optimizer, 0.3).loss.item())
    return losses


def evaluate(model: nn.Module) -> float:
    return pz.evaluate(model, [_own_rows(model, token_batch())], token_loss).item()


def _own_rows(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    from parallelizer.runtime.state import state_of

    state = state_of(model)
    if state is None:
        return batch
    index, count = pz.batch_rank(state.mesh)
    rows = len(batch["input_ids"]) // count
    return {name: tensor[index * rows : (index + 1) * rows] for name, tensor in batch.items()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), lr=1e-2, foreach=False)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=1e-2, momentum=0.9, foreach=False)


def bare(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=1e-2, foreach=False)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in _trained(model) if p.ndim == 2]
    return torch.optim.Muon(matrices, lr=1e-2)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(_trained(model))


class Counting(torch.optim.Optimizer):
    """Keeps of each parameter a Python int, a Python float, a truth, a scalar and a mean in float64."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "decay": 1.0, "even": True, "scalar": torch.zeros(())}
                    state["mean"] = torch.zeros_like(p, dtype=torch.float64)
                state["count"] += 1
                state["decay"] *= 0.9
                state["even"] = not state["even"]
                state["scalar"] += 0.1
                state["mean"].mul_(0.9).add_(p.grad.double() / 3)
                p.sub_(state["mean"].to(p.dtype), alpha=group["lr"] * state["decay"])


def _trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def gathered_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """SHA-256 of every whole tensor, and what an optimizer has beside tensors, by name. Collective."""
    model_state = whole_state_dict(model)
    found = {f"model.{name}": _hash(tensor) for name, tensor in model_state.items()}
    for name, one in state_tensors(model).items() if optimizer is not None else ():
        for key, value in optimizer.state.get(one.tensor, {}).items():
            if isinstance(value, Tensor) and value.shape == one.tensor.shape:
                value = whole_tensor(value, model, name)
            text = _hash(value) if isinstance(value, Tensor) else repr(value)
            found[f"optimizer.{name}.{key}"] = text
    everywhere: list[dict[str, str]] = [found]
    if dist.is_initialized():  # a stage of a pipeline has the optimizer's state of its own parameters
        everywhere = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, found)
    return {name: text for one in everywhere for name, text in one.items()} | found


def _hash(tensor: Tensor) -> str:
    whole = tensor.detach().cpu().contiguous()
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}"


class Alone(nn.Module):
    """A model that nobody has made parallel."""

    def __init__(self, width: int = 4, depth: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of `Alone`."""
    width = next(p for p in model.parameters()).shape[1]
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.linspace(-1, 1, 3 * width, dtype=dtype).view(3, width)).square().sum().backward()
    optimizer.step()
