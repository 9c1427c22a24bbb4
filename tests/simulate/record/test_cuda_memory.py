"""Predicted peaks for CUDA against those that the allocator of an H200 was asked for: docs/gpu.md."""

from __future__ import annotations

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.simulate.record.planned import plan_step

WORKSPACE = 32.0
"""MiB that cuBLAS takes on Hopper, which the prediction leaves out."""

B8 = ("model=llama3_8b", "train.seq_len=8192", "train.dtype=bfloat16")
CUT = ("model.n_layers=8", "train.batch_size=1")


def _inner(method: str) -> str:
    return f'rules=["layers.*.attention.inner: {{style: context-parallel, method: {method}}}"]'


@pytest.mark.parametrize(
    ("words", "requested"),
    [
        pytest.param(("train.dtype=float32",), 473.2, id="grouped heads in float32"),
        *(
            pytest.param(words, requested, id=name, marks=pytest.mark.slow)
            for name, requested, words in (
                ("ring", 14620.4, (*B8, *CUT, "parallel.mesh.cp=4", _inner("ring"))),
                ("ulysses", 14748.4, (*B8, *CUT, "parallel.mesh.cp=4", _inner("ulysses"))),
                ("tp", 21375.4, (*B8, "train.batch_size=1", "parallel.mesh.tp=8")),
                ("fsdp and tp", 11321.6, (*B8, "train.batch_size=8", "parallel=fsdp8_tp8")),
                ("two parts", 21528.0, (*B8, CUT[0], "train.batch_size=16", "train.accumulate=2", "parallel.mesh.dp_shard=8")),
            )
        ),
    ],
)  # fmt: skip
def test_the_peak_is_what_the_allocator_was_asked_for(words: tuple[str, ...], requested: float) -> None:
    setup = from_overrides(["device=cuda", *words])
    model = setup.build_model()
    peak = plan_step(setup.compile(model), model, setup.recipe()).peak / 2**20
    assert peak + WORKSPACE == pytest.approx(requested, abs=1.0)
