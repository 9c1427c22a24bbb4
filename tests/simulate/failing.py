"""Models that no fake tensor gets through: each kind stops at a layer of another sort."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn


@torch.library.custom_op("failing::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    """A kernel of one's own that says nothing of shapes."""
    return x * 2


double.register_autograd(lambda ctx, grad: grad * 2)


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * 2 if grad.sum().item() > 0 else grad


class Layer(nn.Module):
    """A linear, and what its kind does to the output."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(dim, dim), kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.kind)(self.linear(x))
        return y

    def fine(self, y: Tensor) -> Tensor:
        print("printed by the model")
        return y

    def item(self, y: Tensor) -> Tensor:
        return y if y.sum().item() > 0 else -y

    def branch(self, y: Tensor) -> Tensor:
        return y if y.sum() > 0 else -y

    def nonzero(self, y: Tensor) -> Tensor:
        return y * len(y.nonzero())

    def kernel(self, y: Tensor) -> Tensor:
        return double(y)

    def backward(self, y: Tensor) -> Tensor:
        return _Asks.apply(y)

    def shapes(self, y: Tensor) -> Tensor:
        return y @ torch.ones(3, 5)

    def numpy(self, y: Tensor) -> Tensor:
        return y * y.detach().numpy().sum()

    def raises(self, y: Tensor) -> Tensor:
        raise KeyError("nobody\nis here")

    def exits(self, y: Tensor) -> Tensor:
        raise SystemExit(0)

    def dies(self, y: Tensor) -> Tensor:
        if not y.is_meta:  # where the compiler looks, in the test's own process
            os._exit(0)
        return y

    def killed(self, y: Tensor) -> Tensor:
        if not y.is_meta:
            os.kill(os.getpid(), signal.SIGKILL)
        return y


class Failing(nn.Module):
    """Token ids [B, S] to logits [B, S, vocabulary], unless a layer fails."""

    def __init__(self, vocabulary: int, dim: int, depth: int, kind: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, kind) for _ in range(depth))
        self.output = nn.Linear(dim, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def asking_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that reads a value."""
    total = output.sum()
    return (total, total.detach()) if total.item() > 0 else (-total, total.detach())


def no_optimizer(model: nn.Module, config: object) -> torch.optim.Optimizer:
    """A function that makes no optimizer."""
    raise TypeError("there is none")
