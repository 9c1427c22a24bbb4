"""A case: a model with a loss, under a plan, on the axes of a preset, and what becomes of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

Verdict = Literal["right", "wrong", "fails"]
Batch = dict[str, Tensor]

PRESETS: Mapping[str, Mapping[str, int]] = {
    "fsdp2": {"dp_shard": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
    "cp2": {"cp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2},
}
"""The presets that cases use, by their names under configs/parallel, with their axes above 1."""

TOKENS = {"input_ids": {"shape": ["batch", "sequence"], "range": [0, 32]}}
LABELS = {"labels": {"shape": ["batch", "sequence"], "range": [0, 32], "ignore": -100}}
CLASSES = {"labels": {"shape": ["batch"], "range": [0, 8]}}
EVERYWHERE = '  "": fsdp\n'


@dataclass(frozen=True)
class Model:
    """A model as its configuration names it: class, arguments, entries of the batch, and the usual loss.

    `change` may alter a batch that `batch` made, where the entries' shapes and ranges do not tell enough.
    """

    name: str
    target: str
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: TOKENS | LABELS)
    loss: str = "parallelizer.losses.cross_entropy"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 8
    length: int = 16
    change: Callable[[Batch, torch.Generator], None] | None = None

    def build(self) -> nn.Module:
        """The model in float64, with the same values at every call."""
        torch.manual_seed(0)
        return load(self.target)(**self.arguments).double()

    def batch(self, seed: int) -> Batch:
        """A whole batch. Every row has another number of labels that count."""
        generator = torch.Generator().manual_seed(100 + seed)
        words = {"batch": self.rows, "sequence": self.length}
        batch: Batch = {}
        for name, entry in self.entries.items():
            shape = [words.get(size, size) for size in entry["shape"]]
            dtype = entry.get("dtype", "int64")
            if dtype.startswith("float"):
                batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
                continue
            values = torch.randint(*entry.get("range", (0, 2)), shape, generator=generator)
            if (ignored := entry.get("ignore")) is not None:
                ignore_some(values, ignored, seed, generator)
            batch[name] = values.to(getattr(torch, dtype))
        if self.change is not None:
            self.change(batch, generator)
        return batch


def ignore_some(labels: Tensor, ignored: int, seed: int, generator: torch.Generator) -> None:
    """Take labels out, in every row another number of them."""
    if labels.ndim == 1:
        labels[seed % len(labels)] = ignored
        return
    length = labels.shape[1]
    for row in range(len(labels)):
        out = (row * row + 3 + 2 * seed) % 13 % length
        labels[row, torch.randperm(length, generator=generator)[:out]] = ignored


def load(path: str) -> Any:
    """What a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Case:
    """What is judged. `name` is unique, and `why` says what is wrong, or what a hasty checker might think."""

    name: str
    model: Model
    plan: str
    preset: str
    expected: Verdict
    loss: str
    why: str = ""

    @property
    def axes(self) -> Mapping[str, int]:
        return PRESETS[self.preset]

    @property
    def ranks(self) -> int:
        ranks = 1
        for size in self.axes.values():
            ranks *= size
        return ranks


def cases(
    model: Model, name: str, plan: str, loss: str | None = None, why: str = "", **expected: Verdict
) -> list[Case]:
    """One case for each preset, given with the verdict that is expected."""
    text = plan if "rules:" in plan else f"rules:\n{plan}"
    return [
        Case(f"{model.name}/{name}/{preset}", model, text, preset, verdict, loss or model.loss, why)
        for preset, verdict in expected.items()
    ]


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """A text with each first string, which it has once, replaced by the second."""
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is there {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


def without(text: str, *keys: str) -> str:
    """A plan without the rules whose lines begin with these keys."""
    lines = text.splitlines(keepends=True)
    for key in keys:
        own = [line for line in lines if line.strip().startswith(f"{key}:")]
        if len(own) != 1:
            raise ValueError(f"{key!r} begins {len(own)} lines, not one")
        lines.remove(own[0])
    return "".join(lines)


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of every file in `cases`."""
    from tests.silent import cases as folder

    found: list[Case] = []
    for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda m: m.name):
        found += importlib.import_module(f"{folder.__name__}.{module.name}").CASES
    names = [case.name for case in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases have one name: {sorted(n for n in names if names.count(n) > 1)}")
    return tuple(found)
