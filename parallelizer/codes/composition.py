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


def model(target: str) -> str:
    """A model config of one's own that takes tokens."""
    return f"""
        _target_: {target}
        plan: llama
        loss: recipes.losses.cross_entropy
        batch: {{input_ids: {{shape: [batch, sequence]}}, labels: {{shape: [batch, sequence]}}}}
    """


CODES: tuple[Code, ...] = (
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
        "no-initializer",
        "a module on the meta device cannot make its values",
        """Models are built without memory, and every module then fills the parameters and buffers that it
        owns, through `reset_parameters()`. One that has none would be left with whatever lay in memory, other
        values on every rank.""",
        Example(
            'rules: {"": fsdp}',
            ["model=bare"],
            {"conf/model/bare.yaml": model("bare.Bare"), "bare.py": _BARE},
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
        "unreduced-gradients",
        "ranks see different tokens, and nothing sums their gradients",
        """fsdp is what reduces gradients over the data axes. A parameter outside of every unit gets on each
        rank the gradient of that rank's tokens alone: the copies drift apart, while the loss looks as it
        should.""",
        Example("rules: {layers.*: fsdp}", ["parallel=fsdp2"]),
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
