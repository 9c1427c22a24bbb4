"""The time of a setup's step with the computation that one rank was seen to take."""

from __future__ import annotations

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.configuration.step_time import measured_step_time, step_time
from parallelizer.simulate.record.trace import Trace, trace

SMALL = ("model.dim=64", "model.n_layers=2", "train.seq_len=64", "device=cuda", "hardware=h100")


def traced(*words: str) -> tuple[Setup, Trace]:
    setup = from_config(*compose_config([*words, *SMALL]))
    model = setup.build_model()
    return setup, trace(setup.compile(model), model, setup.recipe())


def test_one_rank_alone_takes_what_it_was_seen_to_take() -> None:
    setup, step = traced("parallel=single")
    time = measured_step_time(setup, step, 0.5)
    assert time is not None
    assert time.seconds == pytest.approx(0.5, rel=1e-6)


def test_the_computation_is_stretched_and_the_links_are_not() -> None:
    setup, step = traced("parallel=fsdp2_tp2")
    priced, time = step_time(setup, step), measured_step_time(setup, step, 0.5)
    assert priced is not None and time is not None
    assert time.links == pytest.approx(priced.links)
    assert sum(time.compute.values()) + time.waits.get("host", 0.0) == pytest.approx(0.5, rel=0.01)
    assert 0.499 < time.seconds < 0.5 + sum(time.links.values())


def test_a_processor_s_seconds_are_not_put_on_a_gpu_s_links() -> None:
    _, step = traced("parallel=tp2")
    on_cpu = from_config(*compose_config(["parallel=tp2", *SMALL, "device=cpu"]))
    assert measured_step_time(on_cpu, step, 0.5) is None
