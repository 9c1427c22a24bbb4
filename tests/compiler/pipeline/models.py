"""Small models that are cut before each of their layers, some whose parts reach each other by many ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.language.workload import Entry, Workload

WIDTH, VOCABULARY = 8, 32
PLAN = 'rules: {layers.*: stage, "": fsdp}'
WORK = Workload({"input_ids": Entry(("batch", "sequence"), "int64", (0, VOCABULARY))}, 8, 4)

Layer = Callable[[], nn.Module]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Layered(nn.Module):
    """An embedding, layers, and a head."""

    def __init__(self, layer: Layer = linear, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def before(self, embedded: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first layer is given, and what all layers are given in addition."""
        return embedded, None

    def forward(self, input_ids: Tensor) -> Tensor:
        x, skipped = self.before(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x) if skipped is None else layer(x) + skipped
        return self.head(x)


class DroppedOnce(Layered):
    """Dropout in the model's own code, for the first layer alone."""

    def before(self, embedded: Tensor) -> tuple[Tensor, None]:
        return F.dropout(embedded, 0.1), None


class DroppedForAll(Layered):
    """The same for a value that all layers are given."""

    def before(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout(embedded, 0.1)
        return dropped, dropped


class DropoutModule(Layered):
    """The dropout is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def before(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        dropped = self.drop(embedded)
        return dropped, dropped


class Noise(nn.Module):
    """Random numbers of the shape of a batch entry: no parameters, so every stage can run it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.randn(*input_ids.shape, WIDTH, device=input_ids.device)


class NoiseForAll(Layered):
    """All layers are given the same noise."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, input_ids: Tensor) -> Tensor:
        x, noise = self.embed(input_ids), self.noise(input_ids)
        for layer in self.layers:
            x = layer(x) + noise
        return self.head(x)


class Average(nn.Module):
    """A running average of its input, in a buffer."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.get_buffer("average").mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.linear(x)


class Replaced(Average):
    """The same with a new tensor in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.get_buffer("average") * 0.9 + 0.1 * x.detach().mean((0, 1))
        return self.linear(x)


class AverageOutside(Layered):
    """The average is in the module that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def before(self, embedded: Tensor) -> tuple[Tensor, None]:
        self.get_buffer("average").add_(embedded.detach().mean())
        return embedded, None


class Normed(nn.Module):
    """A norm over the channels."""

    def __init__(self, norm: Layer) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm()

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x).mT).mT
        return normed


class Block(nn.Module):
    """[B, S, WIDTH] to the same, with what it is told added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, told: Tensor | None = None) -> Tensor:
        y: Tensor = x + self.down(self.up(x if told is None else x * told).tanh())
        return y


class Positions(nn.Module):
    """Rows of a table without parameters, as a rotary embedding has them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], device=x.device, dtype=x.dtype).sin()[None, :, None]


class Plain(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Tangled(Plain):
    """What crosses its cuts: the stream; the embedding, to the end; the output of the first block, to the last two. Glue reads a
    parameter of its own and that of a module, and changes the stream in place. The embedding is called at both ends, and
    what a table without parameters returns reaches every block.
    """

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.positions = Positions()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.words(input_ids)
        where = self.positions(x)
        skips = []
        for at, block in enumerate(self.blocks):
            x = block(x * self.scale if at % 2 else x, where if at < 2 else skips[0])
            skips.append(x)
            if at == 1:
                x += where
        x = x + first + self.words(input_ids.flip(1)) * self.norm.weight
        y: Tensor = self.head(self.norm(x)) + (self.words.weight @ x.mT).mT
        return y


class Two(nn.Module):
    """An encoder, and a decoder of which each block reads what the encoder returns."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        read = self.words(input_ids)
        for block in self.encoder:
            read = block(read)
        x = self.words(input_ids + 1)
        for block in self.decoder:
            x = block(x, read)
        y: Tensor = self.head(x)
        return y


class Tied(Two):
    """The tables of the encoder and of the decoder and the head are one parameter, which a module has that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.written = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        for one in (self.read, self.written, self.head):
            one.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        read = self.read(input_ids)
        for block in self.encoder:
            read = block(read)
        x = self.written(input_ids + 1)
        for block in self.decoder:
            x = block(x, read)
        y: Tensor = self.head(x)
        return y


class Counting(Two):
    """Its embedding counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = _CountingEmbedding(VOCABULARY, WIDTH)


class _CountingEmbedding(nn.Embedding):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(input)


class Choosing(Plain):
    """A mixture whose rows are chosen by values."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids).flatten(0, 1)
        for block in self.blocks:
            rows = (x.sum(-1) > 0).nonzero()[:, 0]
            x = x.index_add(0, rows, block(x[rows]))
        y: Tensor = self.head(x).unflatten(0, input_ids.shape)
        return y


class Fickle(Plain):
    """Its course depends on values."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            if float(x.sum()) > 0:
                x = block(x)
        y: Tensor = self.head(x)
        return y
