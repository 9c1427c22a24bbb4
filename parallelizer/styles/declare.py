"""What every style is called, which slot it fills and which options it takes, without importing torch.

The parser and the checks of form stand on this table alone; what a style does stands in the files beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptionKind:
    """The kind of an option's value, and one line on what it does.

    Kinds: `bool`, `int` (not negative), `bool-or-int`, `bool-or-name`, `choice`, `dtype`, `names` (attribute names),
    `placement`, `input` and `output` (flows by parameter name, index or key), `params` (placements by
    parameter and axis), `parts` (sizes of a fused dimension), `parts-by-param` (the same, or by parameter), `size`
    (a number or an attribute name), `axis`.
    """

    kind: str
    doc: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class StyleDeclaration:
    """A style's name, slot, the axis it stands on unless `axis:` says otherwise, and its options.

    `defaults` are, as text, the values that options have where nothing sets them; one that is not there does
    nothing then.
    """

    name: str
    slot: str
    axis: str | None
    doc: str
    options: Mapping[str, OptionKind] = field(default_factory=dict)
    takes_parameters: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)


_INPUT = OptionKind("input", "how an input arrives and is wanted, by parameter name of forward")
_OUTPUT = OptionKind("output", "how an output comes out and leaves, by index or key")
_LOCAL = OptionKind("bool", "hand on a plain tensor (true) or a DTensor (false): torch's use_local_output")
_INPUT_GRAD = OptionKind(
    "choice",
    "of a replicated input handed on as a plain tensor: partial: sum its gradients over the axis; replicate: do not",
    ("partial", "replicate"),
)
_OUTPUT_GRAD = OptionKind(
    "choice",
    "of a replicated output handed on as a plain tensor: partial: sum its gradients over the axis; replicate: do not",
    ("partial", "replicate"),
)
_GRAD_LAST = OptionKind(
    "size",
    "how many of the last features `grad` is of, a number or an attribute of the module or one around it; all unless said",
)
_AXIS = OptionKind("axis", "the mesh axis it stands on")
_PARTS = "the parts of a fused dimension (ratios, or attributes of the module or one around it); each is split by itself"
_PACKED = OptionKind("parts", _PARTS)
_DIVIDE = OptionKind(
    "names",
    "attributes that forward reads, divided by the axis size; `config.heads`: in a copy of the module's own",
)
_REPLICATE_KV = OptionKind(
    "bool-or-name",
    "key-value heads fewer than ranks: each on a group of them. true, or where the number of heads stands",
)
_LINEAR = {
    "input": _INPUT,
    "output": _OUTPUT,
    "local": _LOCAL,
    "axis": _AXIS,
    "packed": _PACKED,
    "divide": _DIVIDE,
}

STYLES: dict[str, StyleDeclaration] = {}
"""Every declared style by name, in the order of the documentation."""


def declare(declaration: StyleDeclaration) -> None:
    """Add a style. Raises ValueError when the name is taken or the slot is none of the known ones."""
    from parallelizer.plan import SLOTS

    if declaration.name in STYLES:
        raise ValueError(f"a style named {declaration.name!r} exists")
    if declaration.slot not in SLOTS:
        raise ValueError(f"unknown slot {declaration.slot!r}: the slots are {', '.join(SLOTS)}")
    STYLES[declaration.name] = declaration


for _declaration in (
    StyleDeclaration(
        "shard-params",
        "params",
        "tp",
        "any module, any parameter, any dimension, several axes; or `divide` alone, on a module without parameters",
        {
            "params": OptionKind(
                "params", "a placement, or placements by axis, for each parameter or buffer"
            ),
            **_LINEAR,
            "packed": OptionKind("parts-by-param", f"{_PARTS}; or a map of parts by parameter"),
            "replicate_kv": _REPLICATE_KV,
            "divide_groups": OptionKind(
                "names", "numbers of query heads to a key-value head, divided by the ranks that share one"
            ),
        },
        takes_parameters=True,
        defaults={"local": "true"},
    ),
    StyleDeclaration(
        "colwise",
        "params",
        "tp",
        "split a linear's outputs or an embedding's columns",
        {**_LINEAR, "replicate_kv": _REPLICATE_KV},
        defaults={"input": "replicate", "output": "shard(-1)", "local": "true"},
    ),
    StyleDeclaration(
        "rowwise",
        "params",
        "tp",
        "split a linear's inputs or an embedding's rows",
        _LINEAR,
        defaults={"input": "shard(-1), replicate for an embedding", "output": "replicate", "local": "true"},
    ),
    StyleDeclaration(
        "sequence",
        "params",
        "tp",
        "run on the sharded sequence with replicated parameters",
        {
            "layout": OptionKind("placement", "how the sequence lies: shard(1) unless said"),
            "local": _LOCAL,
            "axis": _AXIS,
        },
        defaults={"layout": "shard(1)", "local": "false"},
    ),
    StyleDeclaration(
        "replicate",
        "params",
        "tp",
        "replicated parameters inside a sharded region",
        {
            "grad": OptionKind(
                "choice",
                "partial: sum the gradients over the axis; replicate: do not",
                ("partial", "replicate"),
            ),
            "axis": _AXIS,
        },
        takes_parameters=True,
        defaults={"grad": "partial"},
    ),
    StyleDeclaration(
        "local-random",
        "params",
        "tp",
        "draw random numbers of each rank's own, for dropout of what is split",
        {"axis": _AXIS},
    ),
    StyleDeclaration(
        "prepare-input",
        "io",
        "tp",
        "lay out inputs anew",
        {"input": _INPUT, "local": _LOCAL, "grad": _INPUT_GRAD, "axis": _AXIS},
        defaults={"local": "false", "grad": "replicate"},
    ),
    StyleDeclaration(
        "prepare-output",
        "io",
        "tp",
        "lay out outputs anew",
        {"output": _OUTPUT, "local": _LOCAL, "grad": _OUTPUT_GRAD, "grad_last": _GRAD_LAST, "axis": _AXIS},
        defaults={"local": "true", "grad": "replicate"},
    ),
    StyleDeclaration(
        "prepare-io",
        "io",
        "tp",
        "lay out inputs and outputs anew",
        {
            "input": _INPUT,
            "output": _OUTPUT,
            "local": _LOCAL,
            "axis": _AXIS,
            "local_input": OptionKind("bool", "hand plain tensors to the module: torch's use_local_input"),
            "grad": _INPUT_GRAD,
        },
        defaults={"local": "true", "local_input": "false", "grad": "replicate"},
    ),
    StyleDeclaration(
        "context-parallel",
        "attention",
        "cp",
        "exact attention over a sequence that is split over ranks",
        {
            "axis": _AXIS,
            "method": OptionKind(
                "choice",
                "how keys and queries meet; auto takes what sends least",
                ("all-gather", "ring", "ulysses", "ulysses-ring", "auto"),
            ),
            "ulysses_degree": OptionKind(
                "int", "over how many ranks ulysses-ring deals out heads; by default what sends least"
            ),
            "balance": OptionKind(
                "choice",
                "which rows each rank gets, alike in all rules; auto: head-tail, per-document for documents",
                ("auto", "head-tail", "per-document", "by-cost", "none"),
            ),
            "keep_gathered": OptionKind("bool", "keep the gathered keys and values for backward"),
        },
        defaults={"method": "all-gather", "balance": "auto", "keep_gathered": "false"},
    ),
    StyleDeclaration(
        "checkpoint",
        "checkpoint",
        None,
        "recompute activations in backward",
        {
            "mode": OptionKind(
                "choice",
                "full, or selective: keep the results of matmuls and attention",
                ("full", "selective"),
            )
        },
        defaults={"mode": "full"},
    ),
    StyleDeclaration(
        "compile",
        "compile",
        None,
        "compile forward and backward by torch.compile",
        {
            "backend": OptionKind(
                "choice",
                "what makes the code; eager and aot_eager need no compiler",
                ("inductor", "aot_eager", "eager"),
            ),
            "mode": OptionKind(
                "choice", "how hard inductor tries", ("default", "max-autotune-no-cudagraphs")
            ),
            "dynamic": OptionKind(
                "bool", "true: one code for all sizes; false: one for each; else as torch finds out"
            ),
            "fullgraph": OptionKind("bool", "refuse what would break the graph"),
        },
        defaults={"backend": "inductor", "mode": "default", "fullgraph": "false"},
    ),
    StyleDeclaration(
        "fsdp",
        "fsdp",
        None,
        "shard parameters, gradients and optimizer state over the data axes",
        {
            "reshard_after_forward": OptionKind(
                "bool-or-int", "free gathered parameters after forward; or the smaller group's size"
            ),
            "param_dtype": OptionKind("dtype", "the dtype of parameters in forward and backward"),
            "reduce_dtype": OptionKind("dtype", "the dtype in which gradients are reduced"),
            "cpu_offload": OptionKind("bool", "keep shards in host memory"),
            "min_params": OptionKind("int", "leave a module with fewer parameters to its parent"),
            "min_size": OptionKind("int", "replicate a parameter with fewer elements, its gradient reduced"),
            "shard_dim": OptionKind("choice", "the dimension to shard", ("0", "largest")),
        },
        defaults={
            "reshard_after_forward": "true, false for the root",
            "param_dtype": "the parameters' own",
            "reduce_dtype": "param_dtype",
            "cpu_offload": "false",
            "min_params": "0",
            "min_size": "0",
            "shard_dim": "0",
        },
    ),
):
    declare(_declaration)
