"""What is known only when something runs: a traced step, a proof, a lock, an export."""

from __future__ import annotations

from parallelizer.codes.composition import model
from parallelizer.codes.declare import Code, Example

_SMALL = ("model.dim=64", "train.seq_len=64", "train.batch_size=16")
_TWO_AXES = [
    "parallel=tp2",
    "parallel.mesh.ep=2",
    *_SMALL,
    'rules=["layers.*.feed_forward.w2: {style: shard-params, params: {weight: {ep: shard(0), tp: shard(1)}}, '
    'input: shard(-1) -> shard(-1), output: shard(1)}"]',
]
_PROVEN = "it takes a run of the sharded model beside the unsharded one"

_MUON = """
    from torch.optim import Muon


    def build(model, config):
        return Muon([p for p in model.parameters() if p.ndim == 2], lr=config["lr"])
"""

_BY_VALUE = """
    from torch import nn


    class Mine(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(256, 32), nn.Linear(32, 256))

        def forward(self, input_ids):
            return super().forward(input_ids if input_ids.sum().item() > 0 else -input_ids)
"""

CODES: tuple[Code, ...] = (
    Code(
        "compile-not-traced",
        "the dry run follows the step as it runs without compilation",
        """What `torch.compile` fuses, and what it keeps for backward, shows only in the code that it makes. The dry
        run leaves it out: collectives and parameters are the same, activations and temporaries are those of the
        step as written, of which compiled code needs less, as a rule.""",
        Example(
            overrides=["parallel=tp2", *_SMALL, 'rules=["layers.*.feed_forward: compile"]'],
            traced=True,
        ),
        "note",
    ),
    Code(
        "costly-redistribution",
        "a tensor on several axes is moved in an order that sends more than another",
        """DTensor moves a tensor axis by axis, and the order decides what is sent: a sum before a gather is
        the sum of a part, and what is split first is gathered in part. torch's minimum-cost planner knows a
        path that sends less than the one that was taken; the message has both, and
        `parallel.redistribute=min-cost` takes the cheaper one in the run.""",
        Example(overrides=_TWO_AXES, traced=True),
        "warning",
    ),
    Code(
        "export-style",
        "a style of your own cannot be written out as Python",
        """`export` writes the plan as calls of torch's public functions, and imports the class of a style of
        your own from where it stands. It must then be made anew from the arguments that it was made with:
        they are read off attributes of their names, and believed only if that gives the same object. Leaving
        the style out would export another plan.""",
        Example(
            command="python -m parallelizer export imports=[my_styles] 'rules=[\"output: scaled\"]'",
            because="it takes a style that is registered in Python",
        ),
    ),
    Code(
        "file-unwritable",
        "a file cannot be written",
        """A page of `plan --html`, a plan of `init --output`, the copy of `new`: each is written whole or not at all.
        The folder is not there or may not be written to, or a file is there that would be overwritten.
        `verify --matrix --write` looks before its proofs whether its page is there and has a place for the table.""",
        Example(
            command="python -m parallelizer plan --html nowhere/plan.html",
            because="it depends on who writes, and where",
        ),
    ),
    Code(
        "half-sequence-parallel",
        "some sums leave the sequence whole while others shard it",
        """Sequence parallelism turns every all-reduce of the residual stream into a reduce-scatter, which
        sends half as much. A rule that leaves its output whole in the middle of a sharded stream sends twice
        as much as the others, and its activations are held whole on every rank. The numbers are right; the
        cost is not.""",
        Example(
            """
            extends: llama
            rules:
              layers.1: {style: prepare-input, input: {x: stream -> replicate}, local: true}
              layers.1.{attention_norm,ffn_norm}: {style: sequence, layout: replicate}
              layers.1.{attention,feed_forward}: {none: io}
              layers.1.{attention.wo,feed_forward.w2}: {style: rowwise, output: replicate}
              norm: {style: sequence, layout: replicate}
              output: {style: colwise, input: replicate, output: replicate}
            """,
            ["parallel=tp2", *_SMALL],
            traced=True,
        ),
        "warning",
    ),
    Code(
        "large-root-unit",
        "the root gathers most of the model at once",
        """The root unit is gathered at the beginning of the forward and held until the end of the backward.
        With the layers in it every rank holds most of the model in full for the whole step, which is what
        fsdp is there to avoid.""",
        Example(
            'rules: {"": fsdp}',
            ["parallel=fsdp8_tp8", "parallel.mesh.tp=1", "train.batch_size=8", "train.seq_len=64"],
            traced=True,
        ),
        "warning",
    ),
    Code(
        "lock-incomplete",
        "there is no traced step to lock",
        """A lock holds shards, collectives and memory. Collectives and memory come out of a traced step;
        without one the lock would be silent about them, and a later comparison would find nothing.""",
        Example(
            command="python -m parallelizer plan --lock plan.lock model=mine",
            because="it takes a model whose step cannot be traced",
        ),
    ),
    Code(
        "lock-not-found",
        "there is no lock to compare with",
        """`plan --locked` compares with a file that `--lock` wrote. Without it there is nothing to hold the
        plan to, and a check in CI that passes then checks nothing.""",
        Example(
            command="python -m parallelizer plan --locked nowhere.lock",
            because="a lock is no part of a plan or a preset",
        ),
    ),
    Code(
        "lock-not-written",
        "a lock cannot be written",
        """`plan --lock` writes the whole lock or leaves what was there before, because half a lock would pass
        for a whole one. The folder is not there, or may not be written to.""",
        Example(
            command="python -m parallelizer plan --lock nowhere/plan.lock",
            because="it depends on who writes, and where",
        ),
    ),
    Code(
        "lock-unreadable",
        "a file is no lock, or one of another version",
        """A lock is text that is meant to be reviewed and not to be edited. A line that cannot be read may
        hold any figure, so nothing is compared with the rest.""",
        Example(
            command="python -m parallelizer plan --locked README.md",
            because="a lock is no part of a plan or a preset",
        ),
    ),
    Code(
        "model-failed",
        "the unsharded model cannot run",
        """A proof compares with one process that knows nothing of the plan. When that process fails there is
        nothing to compare with; the model, its batch or its loss is what is wrong, and not the plan. So it is
        when its loss is no number, or when a second run of it with nothing but another order of summation
        gives other results, because it draws random numbers: bounds made from that would let everything
        pass.""",
        Example(
            command="python -m parallelizer verify parallel=tp2 model.loss=builtins.print",
            because=_PROVEN,
        ),
    ),
    Code(
        "multi-hop-redistribution",
        "a tensor on several axes is moved over one after the other",
        """DTensor moves a tensor axis by axis. The message has the path and what it sends in a step. It is a
        note, because the plan asks for it and no order of the hops that torch's planner knows sends less;
        what would is a layout that both sides agree on.""",
        Example(overrides=[*_TWO_AXES, "parallel.redistribute=min-cost"], traced=True),
        "note",
    ),
    Code(
        "no-tp-plan",
        "there is no tp_plan to import",
        """`import-plan` turns what transformers itself says of a model's tensor parallelism into a plan. Some of
        its models say nothing of it, and a model of your own is not transformers'. A plan guessed in its
        place would pass for transformers' own.""",
        Example(
            command="python -m parallelizer import-plan model=hf_gpt2",
            because="it takes a model of transformers, which is an optional extra",
        ),
    ),
    Code(
        "not-equal",
        "the sharded run does not compute what the unsharded one does",
        """The loss, a gradient or an updated parameter differs by more than rounding. An equal loss proves
        nothing: a norm left out of a sequence-parallel plan has a loss that is equal to the last bit and a
        gradient that is 80 % wrong. The rule that governs the first difference is named.""",
        Example(
            command="python -m parallelizer verify --force parallel=tp2 "
            "'rules=[\"layers.*.{attention_norm,ffn_norm}: {none: params}\"]'",
            because=_PROVEN,
        ),
    ),
    Code(
        "optimizer-collectives",
        "the optimizer communicates for each parameter",
        """An optimizer that works on DTensors one by one asks the other ranks for each of them. That is a
        collective, and its latency, for every parameter and step, where a fused one works on the local shards
        and asks for none.""",
        Example(
            overrides=["parallel=fsdp2", "optim._target_=mine.build", *_SMALL],
            files={"mine.py": _MUON},
            traced=True,
        ),
        "warning",
    ),
    Code(
        "parameters-added",
        "parameters were added to a model that is parallel already",
        """Which parameters there are, and how each is sharded and its gradient summed, is settled when a plan is
        applied. What comes after, an adapter that wraps a layer, say, lies whole on every rank, each trains it on
        its own tokens, and the copies drift apart. Adapters that are there before are matched by globs as anything
        else.""",
        Example(
            command="pz.train_step(model, batch, loss, optimizer)",
            because="it is a model that was changed in a program of one's own",
        ),
    ),
    Code(
        "prompt-invalid",
        "a prompt is not what the model can go on from",
        """`python -m recipes.generate` feeds the prompt's tokens to the model: there must be no more than the model takes, and
        none that its vocabulary has not. Cut or replaced without a word, the model would go on from another text than
        was given.""",
        Example(
            command="python -m recipes.generate checkpoint=runs/a model.max_seq_len=4 prompt=longer",
            because="it takes a checkpoint",
        ),
    ),
    Code(
        "rank-failed",
        "a rank of the sharded run failed",
        """A proof runs the plan for real. A rank that raises ends it without a comparison; what it said is
        shown, with the module that it happened in.""",
        Example(
            command="python -m parallelizer verify --force parallel=tp2 "
            "'rules=[\"layers.*.attention: {none: io}\"]'",
            because=_PROVEN,
        ),
    ),
    Code(
        "redundant-redistribution",
        "a tensor is made whole and split again with nothing in between",
        """Two rules that do not agree on how the tensor between them lies pay for it in every step: one
        gathers or sums it whole, the next one splits it again. Where a sum is split, a reduce-scatter would
        have sent half as much.""",
        Example(
            overrides=[
                "parallel=tp2",
                *_SMALL,
                'rules=["layers.*.feed_forward.w2: {style: rowwise, output: replicate}",'
                '"layers.*.feed_forward: {style: prepare-io, input: {x: stream -> replicate}, output: replicate -> stream}"]',
            ],
            traced=True,
        ),
        "warning",
    ),
    Code(
        "replicated-logits",
        "every tensor rank holds all logits",
        """Logits are the largest activation of a small model with a large vocabulary. Gathered over tp they
        are held in full on every rank, and their gradient too; a vocabulary-parallel loss needs a slice of
        them. It is a note, because a loss that wants whole logits is no mistake.""",
        Example(
            overrides=[
                "parallel=tp2",
                *_SMALL,
                'rules=["output: {style: colwise, input: stream, output: replicate}"]',
            ],
            traced=True,
        ),
        "note",
    ),
    Code(
        "small-fsdp-units",
        "all-gathers so small that their number costs more than their bytes",
        """Each fsdp unit is gathered by a collective of its own. Below about a megabyte the latency is most
        of its time, which grows with the number of ranks; one unit around several modules gathers the same
        bytes in fewer calls.""",
        Example(
            """
            rules:
              layers.*.attention.*: fsdp
              layers.*.feed_forward.*: fsdp
              "": fsdp
            """,
            ["parallel.mesh.dp_shard=8", *_SMALL],
            traced=True,
        ),
        "warning",
    ),
    Code(
        "too-many-ranks",
        "a proof is to start more ranks than one machine runs",
        """A proof runs every rank for real, all on this machine. Axes are shrunk for it unless `--full-mesh` asks
        for the whole mesh, and a mesh for a cluster does not fit: hundreds of processes would only swap.""",
        Example(
            command="python -m parallelizer verify --full-mesh parallel=fsdp1024_cp2_tp8",
            because="it takes an option of `verify`",
        ),
    ),
    Code(
        "tp-plan-string",
        "an entry of transformers' tp_plan cannot be expressed",
        """The strings of a `tp_plan` change with releases of transformers, and each means something exact: what
        lies where, and which gradients are summed. One that no style does is named with its key. Left out, or
        taken for the nearest style, it would give a plan that is valid and computes something else.""",
        Example(
            command="python -m parallelizer import-plan model=hf_llama",
            because="it takes a release of transformers with a string that is new",
        ),
    ),
    Code(
        "trace-failed",
        "one step cannot be traced on fake tensors",
        """The dry run feeds the parallel model tensors that have shapes and no values. Code that asks for a
        value (`.item()`, a shape taken from data, a kernel of its own) has no answer there. The plan may
        still run; its collectives and memory stay unknown.""",
        Example(
            'rules: {"": fsdp}',
            ["model=mine", "parallel=fsdp2"],
            {"conf/model/mine.yaml": model("mine.Mine"), "mine.py": _BY_VALUE},
            traced=True,
        ),
        "warning",
    ),
    Code(
        "unknown-code",
        "`explain` is asked for a code that there is none of",
        """Codes are the ones that diagnostics carry in brackets. A word that is none of them, and no path in
        the model either, cannot be explained; the nearest codes are named.""",
        Example(
            command="python -m parallelizer explain unmached-glob",
            because="it is a mistake in the command that asks",
        ),
    ),
    Code(
        "unknown-rank",
        "there is no rank of this number",
        """Ranks are counted from 0, and the mesh says how many there are. Figures of a rank that is not there
        would be those of another mesh.""",
        Example(
            command="python -m parallelizer plan --rank 4 parallel=fsdp2_tp2",
            because="the options of a command stand in no file",
        ),
    ),
)
