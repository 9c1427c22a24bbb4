"""Sizes that must divide or suffice. Found with the model, the mesh and the batch."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

CODES: tuple[Code, ...] = (
    Code(
        "batch-not-divisible",
        "the global batch does not divide into equal parts",
        """The sequences of a step are dealt out over the data ranks and the parts that gradients are
        accumulated over. Unequal shares would weigh tokens unequally, and a rank without any would hang the
        others.""",
        Example(overrides=["parallel=fsdp4", "train.batch_size=6"]),
    ),
    Code(
        "fsdp-uneven",
        "a parameter that fsdp was to shard lies whole on every rank",
        """With `shard_dim: largest` a parameter is sharded along its largest dimension that divides by the
        data ranks. Off dimension 0 torch does not pad. Where none divides the parameter stays whole, with its
        gradient and its optimizer state, which is correct and may be most of the memory.""",
        Example(
            'rules: {"": {style: fsdp, shard_dim: largest}}',
            ["parallel.mesh.dp_shard=3", "train.batch_size=3"],
        ),
        "warning",
    ),
    Code(
        "heads-not-divisible",
        "attention heads do not divide by tp",
        """Projections are split by features, but a rank must hold whole heads. Features may divide where
        heads do not: then the forward fails far inside with `shape '[..., -1, 128]' is invalid`, or it runs
        and mixes halves of different heads. With grouped-query attention the key-value heads are what limits
        tp, unless `replicate_kv` gives each of them to a group of ranks.""",
        Example(overrides=["parallel.mesh.tp=16"]),
    ),
    Code(
        "not-divisible",
        "a dimension does not divide by the axes that shard it",
        """Tensor parallelism gives every rank the same share of a dimension. Uneven shards would need padding
        that forward and backward both know of; torch pads some and miscounts others, so it is refused. A
        dimension sharded over two axes must divide by their product.""",
        Example(
            """
            rules:
              layers.*.feed_forward.w[13]: colwise
              "": fsdp
            """,
            ["parallel.mesh.tp=3"],
        ),
    ),
    Code(
        "reshard-size",
        "`reshard_after_forward` is no size that the data ranks can be grouped into",
        """As a number it keeps parameters gathered within smaller groups after the forward. The groups are
        made of data ranks, so it must be a divisor of their number, larger than 1 and smaller than all; and
        torch forms them as if there were no other axes.""",
        Example('rules: {"": {style: fsdp, reshard_after_forward: 3}}', ["parallel=fsdp4"]),
    ),
    Code(
        "sequence-not-divisible",
        "the sequence does not divide into the parts that it is cut into",
        """Context parallelism cuts it into two chunks for each rank, so that causal work is balanced;
        sequence parallelism cuts what a rank has once more over tp. torch switches the balancing off in
        silence when the length does not fit, and with uneven shards positions and tokens drift apart.""",
        Example(overrides=["parallel=tp2", "train.seq_len=255"]),
    ),
    Code(
        "sequence-padded",
        "the sequence does not divide, and is padded",
        """Where the plan says what labels are padded with, a length that does not divide is filled up behind the
        last token. Nothing sees the padding: under a causal mask nothing can, under others it is masked, and
        the loss ignores its labels. It is work for nothing, though, so it is said.""",
        Example(overrides=["parallel=cp2", "train.seq_len=255"]),
        "note",
    ),
    Code(
        "sequence-too-long",
        "the sequence is longer than the model's table of positions",
        """A model that looks positions up has as many as its table has rows. Beyond them an index is out of
        range, which on a GPU is an assertion without a line, and a slice is silently shorter than the
        sequence.""",
        Example(overrides=["train.seq_len=4096"]),
    ),
    Code(
        "ulysses-degree",
        "`ulysses_degree` is no number of ranks that heads can be dealt out to",
        """`method: ulysses-ring` puts the ranks in a grid: those of a row exchange rows of the sequence for
        heads, and keys pass around each column. So the number of ranks to a row must divide them all. No other
        method has such a number.""",
        Example(
            """
            extends: llama
            rules:
              layers.*.attention.inner: {style: context-parallel, method: ulysses-ring, ulysses_degree: 3}
            """,
            ["parallel=cp4"],
        ),
    ),
)
