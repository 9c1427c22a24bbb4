"""What torch and transformers call the things that plans are made of, for help to those who come from there."""

from __future__ import annotations

import re

STYLES = {
    "ColwiseParallel": "colwise",
    "RowwiseParallel": "rowwise",
    "SequenceParallel": "sequence",
    "PrepareModuleInput": "prepare-input",
    "PrepareModuleOutput": "prepare-output",
    "PrepareModuleInputOutput": "prepare-io",
    "fully_shard": "fsdp",
    "FullyShardedDataParallel": "fsdp",
    "checkpoint_wrapper": "checkpoint",
    "context_parallel": "context-parallel",
    "colwise_gather_output": "{style: colwise, output: replicate}",
    "colwise_rep": "{style: colwise, output: replicate}",
    "rowwise_split_input": "{style: rowwise, input: replicate}",
    "rowwise_rep": "{style: rowwise, input: replicate}",
    "embedding_rowwise": "{style: rowwise, input: replicate}",
    "embedding_colwise": "{style: colwise, output: replicate}",
    "packed_colwise": "{style: colwise, packed: [1, 1]}",
    "packed_rowwise": "{style: rowwise, packed: [1, 1]}",
    "sequence_parallel": "sequence",
    "all_reduce": "{style: prepare-output, output: partial -> replicate}",
    "replicated_with_grad_allreduce": "replicate",
}
"""Classes and functions of torch's, and the words of transformers' `tp_plan`, as a plan says them."""

OPTIONS = {
    "input_layouts": "input: <how it arrives>",
    "desired_input_layouts": "input: <how it arrives> -> <how it is wanted>",
    "input_kwarg_layouts": "input: {<its name>: <how it arrives>}",
    "desired_input_kwarg_layouts": "input: {<its name>: <how it arrives> -> <how it is wanted>}",
    "output_layouts": "output: <how it leaves>",
    "desired_output_layouts": "output: <how it comes out> -> <how it leaves>",
    "use_local_output": "local: true",
    "use_local_input": "local_input: true",
    "sequence_dim": "layout: shard(1)",
    "mp_policy": "param_dtype: bfloat16, reduce_dtype: float32",
    "offload_policy": "cpu_offload: true",
    "ignored_params": "min_size: 1024",
}
"""Arguments of torch's classes, as options of styles."""

_PLACEMENT = re.compile(
    r"(?:\w+\.)*_?(?:(Replicate|replicate)(?:\(\))?|(Partial|partial)\(.*\)|Shard\((?:dim=)?(-?\d+)\))"
)


def style(word: str) -> str | None:
    """The name in a plan for a style that has this name in another package, however it is imported."""
    return STYLES.get(word.rpartition(".")[2].removesuffix("()"))


def option(word: str) -> str | None:
    """What a plan writes for an argument of torch's."""
    return OPTIONS.get(word)


def placement(text: str) -> str | None:
    """A placement of torch's, `Shard(1)` or `Replicate()`, as plans write it."""
    match = _PLACEMENT.fullmatch(text.strip())
    if match is None:
        return None
    return "replicate" if match[1] else "partial" if match[2] else f"shard({match[3]})"
