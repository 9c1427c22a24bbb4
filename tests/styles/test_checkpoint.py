"""`checkpoint`: which results selective checkpointing keeps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # registers the operators of `_dtensor`
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parallelizer.styles.checkpoint import kept_operators

# Every operator of torch's that a call of attention can reach, and no backward. `_flash_attention_forward_no_dropout_inplace`
# writes into an argument, and a result that an operator writes into cannot be kept.
ATTENTION = re.compile(r"aten::_(scaled_dot_product\w*_attention\w*|\w+_attention_forward)(?<!_backward)")


def names_of_attention() -> set[str]:
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        if ATTENTION.fullmatch(schema.name):
            found.add(schema.name + (f".{schema.overload_name}" if schema.overload_name else ""))
    return found


def test_selective_checkpointing_keeps_every_attention_operator_of_this_torch() -> None:
    found = names_of_attention()
    assert len(found) > 6
    assert found <= set(kept_operators())


def test_every_operator_that_is_kept_exists() -> None:
    schemas = {
        s.name + (f".{s.overload_name}" if s.overload_name else "") for s in torch._C._jit_get_all_schemas()
    }
    assert set(kept_operators()) - schemas == {
        "flex_attention"
    }  # a higher-order operator, which has no schema


@pytest.mark.filterwarnings("ignore")  # not compiled
def test_flex_attention_reaches_checkpointing_under_the_name_that_is_kept() -> None:
    met = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        met.append(operator.name())
        return CheckpointPolicy.PREFER_RECOMPUTE

    forward, _ = create_selective_checkpoint_contexts(policy)
    x = torch.ones(1, 1, 16, 16)
    with forward:
        flex_attention(x, x, x)
    assert "flex_attention" in met
    assert "flex_attention" in kept_operators()
