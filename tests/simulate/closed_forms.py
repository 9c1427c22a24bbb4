"""What a step of the recipe's Llama sends, by arithmetic alone: no torch, and nothing of the dry run's.

Letters: L layers, d model width, V vocabulary, B rows of one part of a rank's batch, S tokens of them that a rank holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

Sums = dict[tuple[str, str, str], tuple[int, int, int]]
"""Count, payload bytes and wire bytes by phase, axis and kind."""

VOCABULARY, WIDTH, HIDDEN, HEADS, KV_HEADS = 48, 64, 96, 16, 8
HEAD = WIDTH // HEADS


@dataclass(frozen=True)
class Case:
    """A Llama, a mesh and a batch. `chunk` is the part of a sequence that one rank of cp and tp has, halved."""

    layers: int = 2
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    rows: int = 2
    chunk: int = 2
    accumulate: int = 1
    checkpoint: bool = False
    sequence_parallel: bool = True
    bfloat16: bool = False
    keep_gathered: bool = False
    reshard: bool = True

    @property
    def tokens(self) -> int:
        """The length of a sequence: cp cuts it into twice its ranks, tp what is left."""
        return 2 * self.cp * self.tp * self.chunk

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.cp * self.tp

    def overrides(self) -> list[str]:
        """The case as the command line takes it."""
        rules = ["rules=['layers.*: checkpoint']"] if self.checkpoint else []
        sizes = {"dp_replicate": self.replicate, "dp_shard": self.shard, "cp": self.cp, "tp": self.tp}
        return [
            f"model.n_layers={self.layers}",
            f"model.vocab_size={VOCABULARY}",
            f"model.dim={WIDTH}",
            f"model.hidden_dim={HIDDEN}",
            f"model.n_heads={HEADS}",
            f"model.n_kv_heads={KV_HEADS}",
            f"model.max_seq_len={self.tokens}",
            f"train.seq_len={self.tokens}",
            f"train.batch_size={self.rows * self.accumulate * self.replicate * self.shard}",
            f"train.accumulate={self.accumulate}",
            f"train.dtype={'bfloat16' if self.bfloat16 else 'float32'}",
            f"plan={'llama' if self.sequence_parallel else 'llama_tp'}",
            f"++parallel.styles.context-parallel.keep_gathered={str(self.keep_gathered).lower()}",
            *([] if self.reshard else ["++parallel.styles.fsdp.reshard_after_forward=false"]),
            *(f"parallel.mesh.{axis}={size}" for axis, size in sizes.items()),
            *rules,
        ]


def expected(case: Case, rank: int = 0) -> Sums:
    """Everything that a rank sends in one step. Ranks differ where shards have several sizes."""
    counts: Counter[tuple[str, str, str]] = Counter()
    payloads: Counter[tuple[str, str, str]] = Counter()
    wires: Counter[tuple[str, str, str]] = Counter()
    for phase, axis, kind, count, payload, ranks in _sent(case, rank):
        if ranks > 1 and count:
            key = phase, axis, kind
            counts[key] += count
            payloads[key] += count * payload
            once = payload * (ranks - 1) // ranks
            wires[key] += count * (2 * once if kind == "all_reduce" else once)
    return {key: (counts[key], payloads[key], wires[key]) for key in counts}


def _sent(c: Case, rank: int) -> Iterator[tuple[str, str, str, int, int, int]]:
    """Phase, axis, kind, count, payload of each in bytes, ranks."""
    size = 2 if c.bfloat16 else 4
    yield from _tensor_parallel(c, size)
    yield from _context_parallel(c, size)
    yield from _data_parallel(c, size)
    yield from _sums(c, rank)


def _tensor_parallel(c: Case, size: int) -> Iterator[tuple[str, str, str, int, int, int]]:
    # Each layer has two blocks, of attention and of the feed-forward network, and so has the model with the
    # embedding before and the output behind: 2L + 1 times a sum goes out, 2L + 1 times the whole comes in.
    blocks, again = c.accumulate * (2 * c.layers + 1), c.accumulate * c.layers * c.checkpoint
    stream = c.rows * (c.tokens // c.cp) * WIDTH * size
    # Logits stay sharded: the loss exchanges a maximum and two terms for each token, in float32.
    tokens = c.rows * (c.tokens // c.cp) * 4
    yield "loss", "tp", "all_reduce", c.accumulate, tokens, c.tp
    yield "loss", "tp", "all_reduce", c.accumulate, 2 * tokens, c.tp
    # A checkpoint's recomputation stops where nothing more is needed: before the last sum of a layer.
    if c.sequence_parallel:
        yield "forward", "tp", "all_gather", blocks, stream, c.tp
        yield "forward", "tp", "reduce_scatter", blocks, stream, c.tp
        yield "backward", "tp", "all_gather", blocks + 2 * again, stream, c.tp
        yield "backward", "tp", "reduce_scatter", blocks + again, stream, c.tp
    else:
        yield "forward", "tp", "all_reduce", blocks, stream, c.tp
        yield "backward", "tp", "all_reduce", blocks + again, stream, c.tp


def _context_parallel(c: Case, size: int) -> Iterator[tuple[str, str, str, int, int, int]]:
    keys_and_values = 2 * c.rows * (KV_HEADS // c.tp) * c.tokens * HEAD * size
    layers = c.accumulate * c.layers
    yield "forward", "cp", "all_gather", layers, keys_and_values, c.cp
    yield (
        "backward",
        "cp",
        "all_gather",
        layers * (not c.keep_gathered) + layers * c.checkpoint,
        keys_and_values,
        c.cp,
    )
    yield "backward", "cp", "all_to_all", layers, keys_and_values, c.cp


def _data_parallel(c: Case, size: int) -> Iterator[tuple[str, str, str, int, int, int]]:
    ranks, axis = c.shard * c.cp, _folded(c)
    layer, norm, table = (_padded(c, params) for params in (_layer(c), [(WIDTH, 1)], _table(c)))
    # The root has the last norm; the embedding and the output are units of one table each.
    for count, elements in (
        (c.accumulate * c.layers, layer),
        (c.accumulate, norm),
        (2 * c.accumulate, table),
    ):
        yield "forward", axis, "all_gather", count, elements * size, ranks
        yield "backward", axis, "reduce_scatter", count, elements * 4, ranks
        yield "backward", "dp_replicate", "all_reduce", count, elements * 4 // ranks, c.replicate
    if c.reshard:  # the root and the output stay gathered in any case
        yield "backward", axis, "all_gather", c.accumulate * c.layers, layer * size, ranks
        yield "backward", axis, "all_gather", c.accumulate, table * size, ranks


def _sums(c: Case, rank: int) -> Iterator[tuple[str, str, str, int, int, int]]:
    """What is summed apart from FSDP: the norms' gradients over tp, the loss and its tokens, the gradient norm."""
    ranks, axis = c.shard * c.cp, _folded(c)
    norms = 2 * c.layers + 1
    if c.sequence_parallel:
        most = math.ceil(WIDTH / ranks)  # the last shards are smaller, or empty
        own = max(0, min(most, WIDTH - rank // c.tp % ranks * most))
        yield "clip", "tp", "all_reduce", 1, norms * own * 4, c.tp  # shards, together
    yield "loss", "dp_replicate", "all_reduce", 1, 8, c.replicate
    yield "loss", axis, "all_reduce", 1, 8, ranks
    # Over the data axes there are two sums of squares, if tp shards some parameters and not others.
    yield "clip", axis, "all_reduce", 1, 8 if c.tp > 1 else 4, ranks
    yield "clip", "tp", "all_reduce", 1, 4, c.tp


def _folded(c: Case) -> str:
    return "+".join(axis for axis, size in (("dp_shard", c.shard), ("cp", c.cp)) if size > 1)


def _layer(c: Case) -> list[tuple[int, int]]:
    """Rows and columns of each parameter of a layer, as tp leaves them to a rank."""
    kv = KV_HEADS * HEAD
    colwise = [(WIDTH, WIDTH), (kv, WIDTH), (kv, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH)]
    rowwise = [(WIDTH, WIDTH), (WIDTH, HIDDEN)]
    return [(r // c.tp, n) for r, n in colwise] + [(r, n // c.tp) for r, n in rowwise] + [(WIDTH, 1)] * 2


def _table(c: Case) -> list[tuple[int, int]]:
    """The rows of the embedding or of the output that tp leaves to a rank."""
    return [(VOCABULARY // c.tp, WIDTH)]


def _padded(c: Case, parameters: list[tuple[int, int]]) -> int:
    """Elements that FSDP gathers: it fills up the rows so that every rank has as many."""
    ranks = c.shard * c.cp
    return sum(ranks * math.ceil(rows / ranks) * columns for rows, columns in parameters)
