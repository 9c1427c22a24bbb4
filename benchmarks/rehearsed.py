"""The predicted time of rehearsed steps against what they took on an H100: the runs of docs/gpu.md.

    python -m benchmarks.rehearsed [--case NAME ...]

A rehearsed rank runs alone, so that collectives take no time. The steps ran under torch 2.11, which chooses cuDNN's attention. Of
the constants, DTENSOR_SECONDS alone was taken from them, from the steps under tp.
"""

from __future__ import annotations

import argparse
import sys

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.step_time import step_time
from parallelizer.simulate.record.trace import trace
from parallelizer.simulate.time.price import Habits

B8 = ("model=llama3_8b", "train.seq_len=8192")
CASES: dict[str, tuple[tuple[str, ...], tuple[float, float]]] = {
    "8B fsdp8 checkpoint": (
        (*B8, "parallel.mesh.dp_shard=8", "train.batch_size=8", 'rules=["layers.*: checkpoint"]'),
        (1.16, 1.27),
    ),
    "8B tp8": ((*B8, "parallel.mesh.tp=8", "train.batch_size=1"), (0.60, 0.69)),
    "8B fsdp8_tp8": ((*B8, "parallel=fsdp8_tp8", "train.batch_size=8"), (0.60, 0.69)),
    "405B fsdp1024_cp2_tp8": (
        ("model=llama3_405b", "train.seq_len=8192", "parallel=fsdp1024_cp2_tp8", "train.batch_size=1024"),
        (3.7, 5.0),
    ),
}
"""What is planned, and the shortest and the longest of the measured seconds of a step."""


def main(arguments: list[str]) -> None:
    """Print a row for each case: predicted and measured seconds, and the shares of the host and the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES))
    for name in parser.parse_args(arguments).case or CASES:
        words, (low, high) = CASES[name]
        setup = from_overrides([*words, "hardware=h100", "device=cuda", "train.dtype=bfloat16"])
        model = setup.build_model()
        found = step_time(setup, trace(setup.compile(model), model, setup.recipe()), Habits(alone=True))
        assert found is not None  # noqa: S101
        busy = sum(found.compute.values()) / found.seconds
        print(f"{name:<24} predicted {found.seconds:6.3f} s, the device {busy:4.0%} busy; measured {low:.2f} to {high:.2f} s",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
