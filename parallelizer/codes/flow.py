"""The layout flow: how tensors lie on their way through the followed forward and backward."""

from __future__ import annotations

from parallelizer.codes.composition import model
from parallelizer.codes.declare import Code, Example

_TP = ("parallel=tp2", "model.dim=64", "train.seq_len=32", "train.batch_size=8")


_FUSED = """
    from torch import nn
    from torch.nn.functional import silu


    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
            self.up, self.down = nn.Linear(32, 128), nn.Linear(64, 32)

        def forward(self, input_ids):
            gate, up = self.up(self.embed(input_ids)).chunk(2, dim=-1)
            return self.head(self.down(silu(gate) * up))
"""


_DROPPING = """
    from torch import nn
    from torch.nn.functional import relu


    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
            self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32)

        def forward(self, input_ids):
            return self.head(self.down(self.drop(relu(self.up(self.embed(input_ids))))))
"""


_NORMED = """
    from torch import nn
    from torch.nn.functional import rms_norm


    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, input_ids):
            x = self.up(self.embed(input_ids))
            return self.head(self.down(rms_norm(x, x.shape[-1:])))
"""


_PICKED = """
    def picked(output, batch):
        labels = batch["labels"]
        own = output.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -own.where(labels >= 0, 0).sum(), (labels >= 0).sum()
"""


def _llama(rule: str, parent: str = "llama") -> Example:
    return Example(f"extends: {parent}\nrules:\n  {rule}\n", _TP, followed=True)


_TWICE = """
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention


    class Attend(nn.Module):
        def forward(self, x):
            return scaled_dot_product_attention(x, x, x, is_causal=True)


    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attend, self.head = nn.Embedding(256, 32), Attend(), nn.Linear(32, 256)

        def forward(self, input_ids):
            x = self.attend(self.embed(input_ids).unsqueeze(1))
            x = scaled_dot_product_attention(x, x, x, is_causal=True)
            return self.head(x.squeeze(1))
"""


_HEADS = """
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention


    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv = nn.Embedding(256, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.out, self.head, self.num_heads = nn.Linear(32, 32), nn.Linear(32, 256), 4

        def forward(self, input_ids):
            x = self.embed(input_ids)
            q = self.qkv[0](x).view(len(x), -1, self.num_heads, 8).transpose(1, 2)
            k = self.qkv[1](x).view(len(x), -1, self.num_heads, 8).transpose(1, 2)
            v = self.qkv[2](x).view(len(x), -1, self.num_heads, 8).transpose(1, 2)
            x = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            return self.head(self.out(x.reshape(*input_ids.shape, -1)))
"""


CODES: tuple[Code, ...] = (
    Code(
        "attention-shape",
        "attention on a rank has other sizes than its heads and rows",
        """Tensor parallelism gives a rank some of the heads, context parallelism some of the rows, and a head keeps its
        size. A forward that says `view(batch, -1, self.num_heads, size)` reads the heads of the whole model, and takes the
        features that a rank lacks for rows that it lacks: every size fits, the step runs, and attention is among wrong rows.
        The calls of the step are compared with those of the model as it was.""",
        Example(
            """
            rules:
              qkv.*: colwise
              out: rowwise
            """,
            ["model=heads", "parallel=tp2", "train.seq_len=32", "train.batch_size=8"],
            {"conf/model/heads.yaml": model("heads.Heads"), "heads.py": _HEADS},
            followed=True,
        ),
    ),
    Code(
        "does-not-run",
        "the step fails under the plan, and without it does not",
        """The compiled plan was applied to the model on a fake world, and torch raised on the way through. It
        would raise on every rank of the real run too, some minutes after the start. Most often two tensors
        meet of which one is split and the other is whole. A forward that reads sizes from attributes, as in
        `view(..., self.heads, self.size)`, is told so: `divide` gives it the numbers of one rank.""",
        _llama("layers.*.attention.wo: rowwise"),
    ),
    Code(
        "equal-random",
        "every rank draws the same random numbers for another part",
        """Generators of the ranks of a tensor axis are seeded alike, since most of what they hold is the same and must
        be dropped alike. What is split over the axis is not: features between two linears, heads, the sequence of
        a residual stream. There the same mask would fall on every part. `local-random` lets each rank draw its
        own.""",
        Example(
            """
            rules:
              up: colwise
              down: rowwise
            """,
            ["model=dropping", "parallel=tp2", "train.seq_len=32", "train.batch_size=8"],
            {"conf/model/dropping.yaml": model("dropping.Dropping"), "dropping.py": _DROPPING},
            followed=True,
        ),
        "warning",
    ),
    Code(
        "fused-features",
        "a fused projection is split as if it were one",
        """One linear layer often makes several things at once, q, k and v or gate and up, and the forward takes
        its output apart. A plain shard of the output features is a run of neighbours: one rank gets q and half
        of k. Every size fits, the step runs, and it computes something else. `packed` splits each part by
        itself.""",
        Example(
            """
            rules:
              up: colwise
              down: rowwise
            """,
            ["model=fused", "parallel=tp2", "train.seq_len=32", "train.batch_size=8"],
            {"conf/model/fused.yaml": model("fused.Fused"), "fused.py": _FUSED},
            followed=True,
        ),
    ),
    Code(
        "layout-mismatch",
        "a tensor lies otherwise than its rule says",
        """A rule says how a module's input arrives, and torch takes its word: a part that is said to be whole,
        or a whole that is said to be a part, becomes another tensor of another shape. What fits by chance
        goes on, and computes something else.""",
        _llama("tok_embeddings: none"),
    ),
    Code(
        "left-out",
        "a glob leaves out a module whose like it styles",
        """A style makes DTensors of a module's parameters, and its neighbours hand DTensors on. A module that a
        glob misses keeps plain ones, and torch refuses the two together. The mistake is most often a letter in the
        glob of the rule that styles the same module in other layers, or its siblings.""",
        _llama('"layers.*.attention.wq": none'),
    ),
    Code(
        "local-attention",
        "attention sees only a part of the sequence",
        """Under context parallelism every rank holds a part of the sequence. Attention outside of a
        `context-parallel` module attends to that part alone: it runs, the loss falls, and every token misses
        most of what stands before it.""",
        Example(
            """
            rules: {attend: context-parallel, "": fsdp}
            buffers: {batch: {input_ids: 1, labels: 1}}
            """,
            ["model=twice", "parallel=cp2"],
            {"conf/model/twice.yaml": model("twice.Twice"), "twice.py": _TWICE},
            followed=True,
        ),
    ),
    Code(
        "needs-whole",
        "an operator needs the whole of what each rank has a part of",
        """A mean, a softmax or a norm over features that a rule has split; a shift, a convolution or a running sum
        along a sequence that context parallelism has split: each rank does it on its own part, every size fits,
        and the result is another. The line of the model is shown. Let the module before hand on the whole, or
        gather there. Operators are judged where their result comes into the loss.""",
        Example(
            """
            rules:
              up: colwise
              down: rowwise
            """,
            ["model=normed", "parallel=tp2", "train.seq_len=32", "train.batch_size=8"],
            {"conf/model/normed.yaml": model("normed.Normed"), "normed.py": _NORMED},
            followed=True,
        ),
    ),
    Code(
        "replicated-sum",
        "what every rank holds alike is summed over the ranks",
        """A sum over an axis is for terms: each rank has a part of the value. Where every rank has the whole
        value, the sum is as many times too large as there are ranks. `grad: partial` on a module that
        computes the same on every rank does that to its gradients, and the loss does not show it.""",
        _llama("norm: replicate", "llama_tp"),
    ),
    Code(
        "sharded-logits",
        "the loss cannot take logits that lie sharded over the vocabulary",
        """A rule with `local: false` leaves the logits as a DTensor, of which each rank holds its columns.
        `parallelizer.cross_entropy` takes them so, and inside `train_step` so does `F.cross_entropy`, by
        exchanging a few numbers for each token. A loss that puts them together with plain tensors in another
        way needs them whole.""",
        Example(
            "extends: llama\n",
            [*_TP, "model.loss=picked.picked"],
            {"picked.py": _PICKED},
            followed=True,
        ),
    ),
    Code(
        "varying-gradient",
        "a gradient differs from rank to rank, and nothing sums it",
        """Every rank of the axis holds the parameter whole, and each computes its gradient from another part
        of the sequence. Unless a rule sums them, each rank trains on its own part, and the copies drift
        apart. The loss of the first step is right to the last bit, so that comparing losses shows nothing.
        The standing example is a norm left out of a sequence-parallel plan.""",
        _llama('"layers.*.ffn_norm": none'),
    ),
    Code(
        "varying-loss",
        "the loss differs from rank to rank of an axis that cuts the model",
        """Ranks that hold slices of one layer must come to one loss. Where the logits that they see are
        parts, each takes the softmax over its part of the vocabulary, and optimizes something else. Handed on
        with `local: false` they are a DTensor, which tells the loss how they lie.""",
        _llama("output: {style: colwise, input: stream}"),
    ),
)
