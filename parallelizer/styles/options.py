"""Options that several styles share. This file imports no torch, because plans are read with it."""

from __future__ import annotations

from parallelizer.language.styles import OptionKind

INPUT = OptionKind(
    "input", "the placement of an input before and after conversion, by parameter name of forward"
)
OUTPUT = OptionKind("output", "the placement of an output before and after conversion, by index or key")
LOCAL = OptionKind("bool", "return a plain tensor (true) or a DTensor (false): torch's use_local_output")
AXIS = OptionKind("axis", "the mesh axis that the style uses")
PARTS = "the parts of a fused dimension (ratios, or attributes of the module or one around it); each is split separately"
PACKED = OptionKind("parts", PARTS)
DIVIDE = OptionKind(
    "numbers",
    "attributes that forward reads, divided by the axis size; `config.heads` changes a copy of the config for this module; "
    "`x.shape[-1]`: a size that forward reads of its argument",
)
REPLICATE_KV = OptionKind(
    "bool-or-name",
    "for fewer key-value heads than ranks: a group of ranks shares a head. true, or the attribute with the number of heads",
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
    "for a replicated input that is passed as a plain tensor: partial sums its gradients over the axis; replicate does not",
    ("partial", "replicate"),
)
