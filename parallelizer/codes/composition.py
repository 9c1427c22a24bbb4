"""Styles, parameters and buffers that must go together. Found with the model."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_TIED = """
    from torch import nn


    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids):
            return self.head(self.embed(input_ids))
"""

_BARE = """
    import torch
    from torch import nn


    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.scale = nn.Embedding(256, 32), nn.Parameter(torch.ones(32))

        def forward(self, input_ids):
            return (self.embed(input_ids) * self.scale).sum(-1)
"""


_COUNTING = """
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention


    class Attend(nn.Module):
        def forward(self, x):
            return scaled_dot_product_attention(x, x, x, is_causal=True)


    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places, self.attend = nn.Embedding(256, 32), nn.Embedding(512, 32), Attend()

        def forward(self, input_ids):
            places = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
            return self.attend((self.embed(input_ids) + places)[:, None])
"""


def model(target: str, takes: str = "input_ids") -> str:
    """A model config of one's own that takes tokens."""
    return (
        f"_target_: {target}\n"
        "plan: llama\n"
        "loss: parallelizer.losses.cross_entropy\n"
        f"batch: {{{takes}: {{shape: [batch, sequence]}}, labels: {{shape: [batch, sequence]}}}}\n"
    )


_POSITIONS = "+model.batch.position_ids={shape: [batch, sequence]}"
_DOCUMENTS = "+model.batch.documents={shape: [batch, sequence]}"
_MASK = "+model.batch.attention_mask={shape: [batch, sequence], dtype: bool}"

CODES: tuple[Code, ...] = (
    Code(
        "attention-implementation",
        "a transformers model makes masks that know a part of the sequence alone",
        """A transformers model makes its masks from the length of its embedded tokens. Where the sequence is split before, by
        context parallelism or by sequence parallelism, that is a rank's part, and causal masks, windows and padding are wrong.
        On transformers' `sdpa`, the masks are made for the whole sequence instead; other implementations make their own.""",
        Example(overrides=["model=hf_llama", "parallel=cp2", "model.attention=eager"]),
    ),
    Code(
        "attention-left-out",
        "some layers' attention has no context-parallel, where that of others has it",
        """Under context parallelism each rank holds a part of the sequence. Attention that is left out sees the
        tokens of its own rank alone: the step runs, the loss looks plausible, and the gradients are wrong.""",
        Example(
            """
            rules:
              layers.1.attention.inner: context-parallel
              "": fsdp
            buffers:
              batch: {input_ids: 1, labels: 1}
              model: {"rope.*": 0}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "built-whole",
        "every rank builds the model whole for its values",
        """A model is built without memory, and each module then fills its own slices by `reset_parameters()`. Where a
        module has none, or the model's constructor fills parameters itself, as GPT-2's scales some, only the
        constructor knows the values: each rank runs it on its CPU and keeps its slices. That is right, and takes
        the memory of the whole model once for each rank.""",
        Example(
            'rules: {"": fsdp}',
            ["model=bare"],
            {"conf/model/bare.yaml": model("bare.Bare"), "bare.py": _BARE},
        ),
        "warning",
    ),
    Code(
        "compiled-region",
        "something inside a compiled module cannot be compiled",
        """`compile` makes one piece of code of all that a module does: tensor parallelism, context parallelism and
        recomputation included. FSDP gathers before that code runs and frees behind it, so its units stand on the
        compiled module or around it. And torch 2.13 does not compile a recomputation with DTensors inside; one
        around compiled modules works.""",
        Example(
            """
            extends: llama
            rules:
              layers.*: [checkpoint, compile, fsdp]
            """,
            ["parallel=fsdp2_tp2"],
        ),
    ),
    Code(
        "lazy-module",
        "a module has parameters without a shape",
        """A lazy module learns its sizes from its first forward. Until then nothing can be said of what
        divides, and there is nothing to shard; after it every rank would have made its own.""",
        Example(
            'rules: {"": fsdp}',
            ["model=lazy"],
            {"conf/model/lazy.yaml": f"{model('torch.nn.LazyLinear')}out_features: 8"},
        ),
    ),
    Code(
        "local-positions",
        "the model makes positions or masks from the length that a rank sees",
        """Under context parallelism a rank sees the length of its own part, and its part is two chunks from
        the head and the tail of the sequence. Counted from 0 in there, every rank gives its tokens the
        positions of the first ones, and a causal mask of that length hides and shows the wrong keys. Shapes
        fit, the loss falls, and it is wrong.""",
        Example(
            """
            rules: {attend: context-parallel, "": fsdp}
            buffers: {batch: {input_ids: 1, labels: 1}}
            """,
            ["model=counting", "parallel=cp2"],
            {"conf/model/counting.yaml": model("counting.Counting"), "counting.py": _COUNTING},
        ),
    ),
    Code(
        "lost-documents",
        "packed documents that a transformers model would tell by their positions",
        """Given positions and no mask, a transformers model takes every jump in them for the beginning of another document.
        Dealt out over ranks, positions jump elsewhere, so that it is not left to guess; documents that only their positions
        tell would then see each other. Number them, and let the mask be made of that.""",
        Example(
            """
            extends: hf_llama
            buffers: {batch: {position_ids: 1}}
            """,
            ["model=hf_llama", "parallel=cp2", _POSITIONS],
        ),
    ),
    Code(
        "lost-window",
        "a mask of packed documents, for a transformers model with a window",
        """A transformers model takes a mask of four dimensions as it is, and lays no window of its own over it: with a
        `document-mask`, a layer with a sliding window or chunks would see whole documents, on one device too.""",
        Example(
            """
            extends: hf_mistral
            buffers: {batch: {documents: {dim: 1, documents: true}, attention_mask: document-mask}}
            """,
            ["model=hf_mistral", "parallel=cp2", _DOCUMENTS],
        ),
    ),
    Code(
        "missing-buffers",
        "the sequence is split, and a tensor that carries it is not",
        """Under context parallelism each rank has a part of the sequence. The plan's `buffers` say which
        batch entries are cut along it. One that is left out keeps its whole length: tokens then meet labels
        or masks of other positions, and where shapes happen to fit, the loss falls on the wrong tokens.""",
        Example(
            """
            rules:
              layers.*.attention.inner: context-parallel
              "": fsdp
            buffers:
              batch: {input_ids: 1}
              model: {"rope.*": 0}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "missing-input",
        "forward wants what is not in the batch",
        """A model is called with the entries of its batch, by name. An argument that has no default and that no entry
        is called by would be missing at the first step, on every rank. What the data calls otherwise is renamed by
        the entry's `data`.""",
        Example(
            'rules: {"": fsdp}',
            ["model=wanting"],
            {
                "conf/model/wanting.yaml": model("wanting.Wanting"),
                "wanting.py": """
                from torch import nn


                class Wanting(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.embed = nn.Embedding(256, 32)

                    def forward(self, tokens):
                        return self.embed(tokens)
                """,
            },
        ),
    ),
    Code(
        "mixed-balance",
        "two rules deal the sequence out in different orders",
        """Which rows of a sequence a rank holds is one decision for the whole batch: positions, labels and the
        attention of every layer must agree on it.""",
        Example(
            """
            rules:
              layers.*.attention.inner: context-parallel
              layers.1.attention.inner: {style: context-parallel, balance: none}
              "": fsdp
            buffers:
              batch: {input_ids: 1, labels: 1}
              model: {"rope.*": 0}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "nested-attention",
        "context-parallel stands on a module and on one inside it",
        """It answers every attention call that a module makes, however deep. With two of them around one call, what
        the inner one computes on its rank would be taken for a call of the model's by the outer one.""",
        Example(
            """
            rules:
              layers.*.attention: context-parallel
              layers.*.attention.inner: context-parallel
              "": fsdp
            buffers:
              batch: {input_ids: 1, labels: 1}
              model: {"rope.*": 0}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "no-documents",
        "the order or the mask goes by packed documents, and nothing says where they are",
        """To deal each document out evenly, and to mask one from the other, it must be known where they begin.
        One batch entry numbers them: of each token, which document it is in.""",
        Example(
            """
            rules:
              layers.*.attention.inner: {style: context-parallel, balance: per-document}
              "": fsdp
            buffers:
              batch: {input_ids: 1, labels: 1}
              model: {"rope.*": 0}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "no-initializer",
        "a module's values are made by nothing",
        """A model is built without memory, and its parameters and buffers are then filled, by `reset_parameters()` of
        the module that owns them, or by the model's constructor. What neither of them fills would be left with
        whatever lay in memory, other values on every rank.""",
        Example(
            command="python -m recipes.train --config-dir conf model=bare",
            because="values are made by the ranks, and not by `validate`",
        ),
    ),
    Code(
        "order-by-row",
        "each row of the batch has its own order, the model's table has one",
        """Per document, every row of the batch is dealt out in its own way, because its documents end elsewhere.
        A table that the model itself indexes by position is cut once for all rows.""",
        Example(
            """
            rules:
              layers.*.attention.inner: {style: context-parallel, balance: per-document}
              "": fsdp
            buffers:
              batch: {input_ids: 1, labels: 1, document_ids: {dim: 1, documents: true}}
              model: {"rope.*": 0}
            """,
            [
                "parallel=cp2",
                "+model.batch.document_ids={shape: [batch, sequence], dtype: int64}",
            ],
        ),
    ),
    Code(
        "padding-counts",
        "what is padded is counted by the loss",
        """A sequence that does not divide is filled up. The labels of what is filled up must be of the one value
        that the loss ignores, or every step trains on tokens that are not there.""",
        Example(
            """
            rules:
              layers.*.attention.inner: context-parallel
              "": fsdp
            buffers:
              batch: {input_ids: {dim: 1, pad: 0}, labels: 1}
              model: {"rope.*": 0}
            """,
            ["parallel=cp2", "train.seq_len=255"],
        ),
    ),
    Code(
        "placed-twice",
        "two rules place the same parameter",
        """One rule names the module, another a parameter of it, and both say how that parameter lies. They
        would be applied one after the other, and the second would shard the shards of the first.""",
        Example(
            """
            rules:
              output: colwise
              output.weight: {style: shard-params, params: shard(1)}
              "": fsdp
            """,
            ["parallel=tp2"],
        ),
    ),
    Code(
        "rank-local-buffers",
        "running statistics would differ from rank to rank",
        """A batch norm updates its running statistics from the tokens of its own rank. Gradients are reduced
        and buffers are not: the copies drift apart, evaluation depends on the rank, and a checkpoint holds
        those of one of them.""",
        Example(
            'rules: {"": fsdp}',
            ["model=normed", "parallel=fsdp2"],
            {"conf/model/normed.yaml": f"{model('torch.nn.BatchNorm1d', 'input')}num_features: 8"},
        ),
    ),
    Code(
        "split-mask",
        "a padding mask of a transformers model is split with the sequence",
        """`attention_mask` says of every key whether it is padding. Under context parallelism a rank has some of the rows and
        sees all keys: the mask stays whole, and the masks that the model makes of it are made for a rank's rows.""",
        Example(
            """
            extends: hf_llama
            buffers: {batch: {attention_mask: 1}}
            """,
            ["model=hf_llama", "parallel=cp2", _MASK],
        ),
    ),
    Code(
        "tied-parameters",
        "a shared parameter is not placed alike by those who share it",
        """An output layer that is the embedding again is one parameter under two names. Placed in two ways,
        or gathered in two fsdp units, it becomes two parameters that drift apart from the first step on.""",
        Example(
            """
            rules:
              embed: {style: rowwise, input: replicate}
              "": fsdp
            """,
            ["model=tied", "parallel=tp2"],
            {"conf/model/tied.yaml": model("tied.Tied"), "tied.py": _TIED},
        ),
    ),
    Code(
        "unlisted-buffer",
        "forward reads a buffer by position, and it is not split with the sequence",
        """A table of rotary angles has a row for each position. Under context parallelism a rank must see the
        rows of its own tokens; unless the plan's `buffers` list it, it takes the first rows, and all but the
        first chunk are rotated by the angles of other positions.""",
        Example(
            """
            rules: {layers.*.attention.inner: context-parallel, "": fsdp}
            buffers: {batch: {input_ids: 1, labels: 1}}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "unreduced-gradients",
        "ranks see different tokens, and nothing sums their gradients",
        """fsdp is what reduces gradients over the data axes. A parameter outside of every unit gets on each
        rank the gradient of that rank's tokens alone: the copies drift apart, while the loss looks as it
        should.""",
        Example("rules: {layers.*: fsdp}", ["parallel=fsdp2"]),
    ),
    Code(
        "wrong-dim",
        "a batch entry is split in another dimension than its sequence",
        """Under context parallelism the plan's `buffers` say which dimension of each batch entry counts the
        tokens. Another one would be cut instead: rows of the batch dealt out over the ranks of cp, each with its
        whole sequence, which the attention then takes for a part.""",
        Example(
            """
            extends: llama
            buffers:
              batch: {input_ids: 1, labels: 0}
            """,
            ["parallel=cp2"],
        ),
    ),
    Code(
        "wrong-layout",
        "a layout that the style cannot work with",
        """`colwise` computes with a whole input, `rowwise` with one that is split by features, and over cp a
        plain tensor must be told both how it arrives and how it is wanted. Another layout would be multiplied
        as it lies, with a result that is wrong on every rank.""",
        Example("""
            rules:
              output: {style: colwise, input: shard(1) -> shard(1)}
              "": fsdp
        """),
    ),
)
