"""Labelled images, generated as they are needed: stripes in noise; the direction of the stripes is the class.

They exist on every machine, without a download, and a model learns them in minutes on a CPU. No image occurs
twice, and no held-out image is trained on: each is drawn from a generator seeded by the run's seed, its part,
and its number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parallelizer.styles.random_numbers import derived_seed
from parallelizer.training.data.source import ALL, Baseline, Source, fingerprint

WAVES = 4
"""Stripes across an image."""


@dataclass(frozen=True)
class Images(Source):
    """Batches of `images` float32 [rows, 3, size, size] and `labels` int64 [rows], below `classes`."""

    size: int
    classes: int
    noise: float

    unit: ClassVar[str] = "images"

    @property
    def baseline(self) -> Baseline:
        return Baseline(
            math.log(self.classes), f"the entropy of {self.classes} equally frequent classes", "nats an image"
        )

    def check_fits(self, seq_len: int) -> None:
        """There are as many as anybody wants."""

    def units(self, seq_len: int) -> int:
        return 1

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        return self._drawn(f"training {seed}", [position + row for row in range(batch_size)[rows]])

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        return [
            self._drawn("heldout", [number * batch_size + row for row in range(batch_size)[rows]])
            for number in range(max(1, count))
        ]

    def fingerprint(self) -> str:
        return fingerprint("stripes", WAVES, self.size, self.classes, self.noise)

    def _drawn(self, part: str, numbers: list[int]) -> dict[str, Tensor]:
        pairs = [self._image(derived_seed(number, part)) for number in numbers]
        return {
            "images": torch.stack([image for image, _ in pairs]),
            "labels": torch.tensor([label for _, label in pairs], dtype=torch.int64),
        }

    def _image(self, seed: int) -> tuple[Tensor, int]:
        """One image and its class, drawn from the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        label = int(torch.randint(self.classes, (), generator=generator))
        phases = torch.rand(3, 1, 1, generator=generator) * 2 * math.pi  # of each colour its own
        noise = torch.randn(3, self.size, self.size, generator=generator)
        angle = math.pi * label / self.classes
        place = torch.arange(self.size) * (2 * math.pi * WAVES / self.size)
        across = place[:, None] * math.sin(angle) + place * math.cos(angle)
        return torch.sin(across + phases) + self.noise * noise, label


def load(*, size: int, classes: int, noise: float) -> Images:
    """Images of `size` by `size` pixels; `noise` is its standard deviation, that of the stripes is 0.7."""
    return Images(size, classes, noise)
