"""What a training step is fed: the batch's entries, and how many sequences of which length it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Span

if TYPE_CHECKING:
    import torch

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
"""The dtypes that a batch entry may have, by torch's names."""


@dataclass(frozen=True)
class Entry:
    """One batch entry: its shape in the words `batch` and `sequence` or numbers, its dtype, and the range
    of whole numbers.

    `ignore` is the label value that the loss ignores, if there is one. `data` is the data's name for the
    entry, if it differs from the model's. With `ascending`, the numbers of an example ascend along the
    sequence, as those of packed documents.
    """

    shape: tuple[str | int, ...]
    dtype: str = "int64"
    range: tuple[int, int] = (0, 2)
    ignore: int | None = None
    data: str | None = None
    ascending: bool = False

    def sequence_dim(self) -> int | None:
        """The sequence dimension, or None."""
        return self.shape.index("sequence") if "sequence" in self.shape else None


@dataclass(frozen=True)
class Workload:
    """The global batch of one step: `batch_size` sequences of `seq_len` tokens in `accumulate` parts.

    `spans` has the places where the sizes were set, under `batch_size`, `seq_len` and `accumulate`, and those of
    the entries, under `batch.NAME`.
    """

    entries: Mapping[str, Entry]
    batch_size: int
    seq_len: int
    accumulate: int = 1
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False)

    def has_sequence(self) -> bool:
        """Whether any entry has a sequence dimension; True if there are no entries."""
        return not self.entries or any(entry.sequence_dim() is not None for entry in self.entries.values())

    def name_of(self, data: str) -> str:
        """The model's name for the data's entry `data`."""
        return next((name for name, entry in self.entries.items() if entry.data == data), data)

    def renamed(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch of the data's entries, under the model's names."""
        return {self.name_of(name): tensor for name, tensor in batch.items()}

    def example(
        self, rows: int, seq_len: int, device: str | torch.device = "cpu", seed: int = 0
    ) -> dict[str, torch.Tensor]:
        """A random batch of `rows` sequences of `seq_len` tokens; on meta, shapes only."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        batch = {}
        for name, entry in self.entries.items():
            words = {"batch": rows, "sequence": seq_len}
            shape = [words[s] if isinstance(s, str) else s for s in entry.shape]
            dtype = getattr(torch, entry.dtype)
            if str(device) == "meta":
                batch[name] = torch.empty(shape, dtype=dtype, device="meta")
            elif dtype.is_floating_point:
                batch[name] = torch.randn(shape, dtype=dtype, generator=generator).to(device)
            else:
                numbers = torch.randint(*entry.range, shape, dtype=dtype, generator=generator)
                if entry.ascending:
                    numbers = numbers.sort(dim=entry.sequence_dim() or 0).values
                batch[name] = numbers.to(device)
        return batch
