"""The predicted time of rehearsed steps against what they took on an H200: the runs of docs/gpu.md.

    python -m benchmarks.rehearsed [--case NAME ...]

A rehearsed rank runs alone, so that collectives take no time. The steps ran under torch 2.11, which chooses cuDNN's attention. Of
the constants, COMPILED_DTENSOR alone was taken from them, from the compiled step of tp8.
"""

from __future__ import annotations

import argparse
import sys

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.step_time import step_time
from parallelizer.simulate.record.trace import trace
from parallelizer.simulate.time.price import Habits

ON_H200 = ("model=llama3_8b", "model.n_layers=12", "train.seq_len=8192", "hardware=h200")
COMPILED = 'rules=["layers.*: compile"]'
FLOAT8 = (
    'rules=["layers.*: compile","layers.*.{attention,feed_forward}.w*: {style: float8, recipe: tensorwise}"]'
)
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "single": (("train.batch_size=1",), "0.380 s"),
    "fsdp8": (("parallel.mesh.dp_shard=8", "train.batch_size=8"), "0.360 s, 0.346 s"),
    "fsdp8 compiled": (("parallel.mesh.dp_shard=8", "train.batch_size=8", COMPILED), "0.348 s, 0.328 s"),
    "fsdp8 compiled float8": (("parallel.mesh.dp_shard=8", "train.batch_size=8", FLOAT8), "0.301 s"),
    "tp8": (("parallel.mesh.tp=8", "train.batch_size=1"), "0.162 s, 0.182 s"),
    "tp8 compiled": (("parallel.mesh.tp=8", "train.batch_size=1", COMPILED), "0.087 s, 0.100 s"),
    "fsdp8_tp8 compiled": (("parallel=fsdp8_tp8", "train.batch_size=8", COMPILED), "0.103 s"),
}
"""What is planned, and the time that a step took; where two machines of the kind ran it, on each."""


def main(arguments: list[str]) -> None:
    """Print a row for each case: predicted and measured seconds, and the shares of the host and the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES))
    for name in parser.parse_args(arguments).case or CASES:
        words, took = CASES[name]
        setup = from_overrides([*ON_H200, *words, "device=cuda", "train.dtype=bfloat16"])
        model = setup.build_model()
        found = step_time(setup, trace(setup.compile(model), model, setup.recipe()), Habits(alone=True))
        assert found is not None  # noqa: S101
        busy = sum(found.compute.values()) / found.seconds
        print(f"{name:<22} predicted {found.seconds:6.3f} s, the device {busy:4.0%} busy; measured {took}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
