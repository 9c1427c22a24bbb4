"""Derive the kernel tables in parallelizer/simulate/time/kernels from the measurements of `aiconfigurator-core`.

pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-*.whl -d aic    (Apache-2.0, NVIDIA)
python -m benchmarks.kernel_tables aic/aiconfigurator_core/systems/data
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from parallelizer.simulate.time.installed_kernels import GPUS, derived

OUT = Path(__file__).resolve().parents[1] / "parallelizer" / "simulate" / "time" / "kernels"


def main(arguments: list[str]) -> None:
    """Write one table a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    data = parser.parse_args(arguments).data
    OUT.mkdir(parents=True, exist_ok=True)
    for gpu in GPUS:
        table = derived(gpu, data)
        text = (
            json.dumps(table, separators=(",", ":")).replace(']]],"', ']]],\n"').replace("]],[[", "]],\n[[")
        )
        (OUT / f"{gpu}.json").write_text(text + "\n")
        print(
            gpu, len(text), {k: len(v["m"]) for k, v in table["gemm"].items()}, table["attention"]["tflops"]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
