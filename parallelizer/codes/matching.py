"""Rules and the modules, parameters and buffers that they name. Found with the model's module tree."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

CODES: tuple[Code, ...] = (
    Code(
        "idle-rule",
        "a rule does nothing on this mesh",
        """Every axis that its styles stand on has size 1. A rule of a preset or of the command line was
        written for this mesh, and does nothing there. One plan serves many meshes, so of the rules of its files
        one line tells, and none where only data and context parallelism are left out: a preset that was meant to
        have an axis above 1 is found by it.""",
        Example(overrides=["parallel=tp2", 'rules=["layers.0.attention.inner: context-parallel"]']),
        "note",
    ),
    Code(
        "shadowed-rule",
        "a rule never wins",
        """On one module and one slot the later rule wins. A rule that loses everywhere is dead text: whoever
        reads the plan believes it, and whoever changes it changes nothing. Mostly a broad glob was put behind
        a narrow one. Rules of another file that is extended may be replaced whole: that is the purpose of it.""",
        Example("""
            rules:
              layers.0: {style: fsdp, min_params: 1_000_000}
              layers.*: fsdp
              "": fsdp
        """),
        "warning",
    ),
    Code(
        "style-module",
        "a style cannot do its work on a module of this kind",
        """`colwise` and `rowwise` know the dimensions of linears, of embeddings and of transformers' `Conv1D` only,
        `sequence` takes a module without others inside, and fsdp needs a forward to gather for. On any other module the style
        would shard the wrong dimension, or nothing.""",
        Example("""
            rules:
              layers.*.attention: colwise
              "": fsdp
        """),
    ),
    Code(
        "style-on-parameter",
        "a glob names a parameter, and its style takes modules",
        """`shard-params` and `replicate` can be given to a single parameter. The other styles also lay out
        what goes into a module and what comes out of it, which a parameter does not have.""",
        Example("""
            rules:
              output.weight: colwise
              "": fsdp
        """),
    ),
    Code(
        "unknown-attribute",
        "a module has no such number to divide or to pack by",
        """`divide` and `packed` name attributes that the module's forward reads, such as a number of heads;
        `config.heads` is one of what the module holds. One that is not there, or that cannot be set, would leave
        the forward with sizes of the whole model beside parameters of one rank.""",
        Example("""
            rules:
              layers.*.attention: {style: shard-params, divide: [heads]}
              "": fsdp
        """),
    ),
    Code(
        "unknown-buffer",
        "`buffers` names a tensor that is not there",
        """`buffers` lists what context parallelism splits along the sequence. A misspelt entry is not split:
        every rank then sees the whole sequence there and its own part elsewhere, and positions no longer fit
        tokens.""",
        Example("""
            rules: {"": fsdp}
            buffers:
              batch: {input_id: 1}
        """),
    ),
    Code(
        "unknown-dim",
        "a tensor has no dimension of this number",
        """Dimensions are counted from 0, or from -1 at the end. A tensor cannot be split along one that it
        does not have; most often the parameter is not the one that was in mind, or the sequence is dimension
        1 and not 2.""",
        Example("""
            rules:
              output: {style: shard-params, params: {weight: shard(2)}}
              "": fsdp
        """),
    ),
    Code(
        "unknown-input",
        "forward takes no input of this name, or the module has one output",
        """`input` names parameters of the module's `forward`, so that positional and keyword calls are laid
        out alike. A name that is not among them would never be met, and the tensor would arrive as it
        left.""",
        Example("""
            rules:
              layers.*.attention: {style: prepare-input, input: {hidden: shard(1) -> replicate}}
              "": fsdp
        """),
    ),
    Code(
        "unknown-parameter",
        "a module has no parameter or buffer of this name",
        """`params` names parameters and buffers that a module owns itself, `packed` those of them that the rule
        shards. One that is not there cannot be sharded, and
        the one that was meant would stay whole on every rank.""",
        Example("""
            rules:
              output: {style: shard-params, params: {wieght: shard(0)}}
              "": fsdp
        """),
    ),
    Code(
        "unknown-path",
        "nothing in the model has that name",
        """`explain` was asked about a word that is neither a diagnostic's code nor the path of a module or
        parameter, nor a glob that matches one. Paths are those of `named_modules()` and `named_parameters()`.""",
        Example(
            command="python -m parallelizer explain layers.0.atention.wq",
            because="it is a word of the command, and no file's",
        ),
    ),
    Code(
        "unmatched-alternative",
        "one alternative of a glob's braces, or one character of a set, matches nothing",
        """Braces promise that each of their names is there. When one of them matches nothing while the others
        do, the rule looks as if it worked, and the modules under the misspelt name are left out. The same
        goes for the characters of a set such as `w[qkv]`.""",
        Example("""
            rules:
              layers.*.feed_forward.{w1,w4}: colwise
              "": fsdp
        """),
    ),
    Code(
        "unmatched-glob",
        "a glob matches nothing in the model",
        """This is the commonest mistake, and elsewhere a warning or silence: the entry is skipped, and the
        modules that were meant are not parallelized. The run works, slower and larger than it should be, or
        with wrong gradients. A rule that may match nothing says `optional: true`.""",
        Example("""
            rules:
              layers.*.atention.w[qkv]: colwise
              "": fsdp
        """),
    ),
    Code(
        "unsharded-parameters",
        "more of the model lies whole on every rank than is allowed",
        """`max_unsharded` bounds the share of parameters that no rule shards and no rule calls `replicate`.
        It is off unless a preset sets it. A model that has grown a module since its plan was written trains
        as before, with that module whole on every rank; with the bound it does not start.""",
        Example(
            """
            rules:
              layers.*.feed_forward.w[13]: colwise
            """,
            ["parallel=tp2", "parallel.max_unsharded=0.02"],
        ),
    ),
)
