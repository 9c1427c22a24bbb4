"""`train.dtype: auto`: the dtype that a device computes fast in."""

from __future__ import annotations

import pytest

from parallelizer.configuration.read_setup import from_overrides


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["device=cuda"], "bfloat16"),
        (["device=cpu"], "float32"),
        (["device=cuda", "train.dtype=float32"], "float32"),
        (["device=cpu", "train.dtype=bfloat16"], "bfloat16"),
    ],
)
def test_it_is_bfloat16_on_gpus_and_float32_on_cpus_unless_it_is_set(words: list[str], dtype: str) -> None:
    assert from_overrides(["parallel=fsdp2", *words]).defaults["fsdp"].options["param_dtype"].value == dtype
