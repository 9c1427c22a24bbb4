"""Predicted peaks for CUDA against those that the allocator of an H200 was asked for: docs/gpu.md."""

from __future__ import annotations

import pytest

from benchmarks.gpu.memory import CASES, on_a_gpu
from parallelizer.configuration.read_setup import from_overrides
from parallelizer.simulate.record.planned import plan_step

WORKSPACE = 32.0
"""MiB that cuBLAS takes on Hopper, which the prediction leaves out."""

WORDS = {case.name.removeprefix("memory "): case.arguments for case in CASES}
"""The rank of each case, and its overrides."""

RECIPE = "the recipe in float32"
"""Without a mesh, as `recipes.train parallel=single` runs it: grouped heads in float32."""


@pytest.mark.parametrize(
    ("case", "requested"),
    [
        (RECIPE, 473.2),
        *(
            pytest.param(case, requested, marks=pytest.mark.slow)
            for case, requested in (
                ("8B cp4 ring 8 layers", 14620.4),
                ("8B cp4 ulysses 8 layers", 14748.4),
                ("8B tp8", 21375.4),
                ("8B fsdp8_tp8", 11321.6),
                ("8B fsdp8 accumulate 2", 21528.0),
            )
        ),
    ],
)
def test_the_peak_is_what_the_allocator_was_asked_for(case: str, requested: float) -> None:
    rank, *words = (0, "train.dtype=float32") if case == RECIPE else WORDS[case]
    setup = from_overrides(on_a_gpu(words))
    model = setup.build_model()
    peak = plan_step(setup.compile(model), model, setup.recipe(), rank).peak / 2**20
    assert peak + WORKSPACE == pytest.approx(requested, abs=1.0)
