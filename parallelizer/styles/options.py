"""Options that several styles share. This file imports no torch, because plans are read with it."""

from __future__ import annotations

from parallelizer.language.styles import OptionKind

INPUT = OptionKind("input", "how an input arrives and is wanted, by parameter name of forward")
OUTPUT = OptionKind("output", "how an output comes out and leaves, by index or key")
LOCAL = OptionKind("bool", "hand on a plain tensor (true) or a DTensor (false): torch's use_local_output")
AXIS = OptionKind("axis", "the mesh axis it stands on")
PARTS = "the parts of a fused dimension (ratios, or attributes of the module or one around it); each is split by itself"
PACKED = OptionKind("parts", PARTS)
DIVIDE = OptionKind(
    "numbers",
    "attributes that forward reads, divided by the axis size; `config.heads`: in a copy of the module's own; "
    "`x.shape[-1]`: a size that forward reads of its argument",
)
REPLICATE_KV = OptionKind(
    "bool-or-name",
    "key-value heads fewer than ranks: each on a group of them. true, or where the number of heads stands",
)
LINEAR = {
    "input": INPUT,
    "output": OUTPUT,
    "local": LOCAL,
    "axis": AXIS,
    "packed": PACKED,
    "divide": DIVIDE,
}
"""What colwise, rowwise and shard-params take."""

INPUT_GRAD = OptionKind(
    "choice",
    "of a replicated input handed on as a plain tensor: partial: sum its gradients over the axis; replicate: do not",
    ("partial", "replicate"),
)
