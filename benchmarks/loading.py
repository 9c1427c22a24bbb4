"""Host memory and time of loading pretrained weights: each rank's slices, against `from_pretrained` in one process.

    python benchmarks/loading.py [--layers 16] [--hidden 2048] [--dtype bfloat16 float32] [--repeats 3]
        [--ways fsdp4 tp2 fsdp2_tp2]

Writes a Llama of random values (by default about 1.9 GB in bfloat16, in files of 500 MB) into a temporary folder, and
loads it in new processes: by `from_pretrained` in one, and by `load_pretrained` under the plan hf_llama at fsdp4, tp2 and
fsdp2_tp2, in turns. Memory is a rank's highest resident set while it loads (VmHWM, reset before) above what it had with
the parallel model on meta, and every parameter is looked at once: `from_pretrained` maps files into memory, and without
a cast its tensors are pages that come when they are first read. Mapped pages count. `slice` is what the rank's parameters
need. The clock is the slowest rank's; files are in the page cache for all.

What was loaded is then saved, by `save_pretrained` of transformers in one process and by ours, whose files are compared with
the first ones.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

import torch

WAYS: Mapping[str, dict[str, int]] = {
    "fsdp4": {"dp_shard": 4},
    "tp2": {"tp": 2},
    "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
}
MIB = 1 << 20


def memory(key: str) -> int:
    """A figure of this process from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def measured(load: Callable[[], Any]) -> tuple[Any, int, float]:
    """What a call returns, its highest memory above that before it, and its seconds."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    started = time.perf_counter()
    result = load()
    return result, memory("VmHWM") - before, time.perf_counter() - started


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """What this process holds of every parameter."""
    from torch.distributed.tensor import DTensor

    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def touched(model: torch.nn.Module) -> torch.nn.Module:
    """The model, of which one number on every page has been read."""
    for shard in shards(model):
        shard.detach().reshape(-1)[:: 4096 // shard.element_size()].sum()
    return model


def one_process(folder: Path, dtype: str) -> list[dict[str, float]]:
    """`from_pretrained`, and its counterpart."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    model, peak, seconds = measured(
        lambda: touched(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind))
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    saved = Path(f"{folder}-transformers")
    _, more, saving = measured(lambda: model.save_pretrained(saved, max_shard_size="500MB"))
    return [{"slice": size, "peak": peak, "seconds": seconds, "save": saving, "save_peak": more}]


def sharded(folder: Path, dtype: str, way: str) -> list[dict[str, float]]:
    """`load_pretrained` on every rank."""
    from parallelizer.runtime.launch import launcher as launch

    torch.set_num_threads(1)
    import transformers  # noqa: F401  before the ranks are forked

    sizes = WAYS[way]
    return launch.start(_rank, (folder, dtype, way), ranks=_product(sizes), device="cpu", start_timeout=120)


def _product(sizes: Mapping[str, int]) -> int:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return ranks


def _rank(folder: Path, dtype: str, way: str) -> dict[str, float]:
    import torch.distributed as dist

    import parallelizer as pz
    from parallelizer.hugging_face import causal_lm
    from parallelizer.language.plan import Mesh

    with torch.device("meta"):
        model = causal_lm(str(folder), dtype=dtype)
    mesh = pz.build_mesh(Mesh(WAYS[way]), "cpu")
    pz.parallelize(model, "hf_llama", mesh)
    _, peak, seconds = measured(lambda: touched(pz.load_pretrained(model, folder, device="cpu")))
    size = sum(p.numel() * p.element_size() for p in shards(model))
    saved = Path(f"{folder}-{way}")
    _, more, saving = measured(lambda: pz.save_pretrained(model, saved))
    dist.barrier()
    same = identical(folder, saved)
    return {"slice": size, "peak": peak, "seconds": seconds, "save": saving, "save_peak": more, "same": same}


def identical(folder: Path, other: Path) -> bool:
    """Whether every weights file of one folder is in the other, to the byte."""
    return all(
        cmp(p, other / p.name, shallow=False)
        for p in folder.glob("*.safetensors")
        if (other / p.name).exists()
    ) and {p.name for p in folder.glob("*.safetensors")} == {p.name for p in other.glob("*.safetensors")}


def write(folder: Path, layers: int, hidden: int, dtype: str) -> int:
    """A random Llama. Its bytes."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-1, 1)
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def command(*arguments: str) -> Any:
    """This script in a new process: what it prints as JSON."""
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], help="of the loaded parameters"
    )
    parser.add_argument("--stored", default="bfloat16", help="of the files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="presets that load (all)")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way == "write":
        print(json.dumps(write(given.folder, given.layers, given.hidden, given.stored)))
    elif given.way == "from_pretrained":
        print(json.dumps(one_process(given.folder, given.dtype[0])))
    elif given.way:
        print(json.dumps(sharded(given.folder, given.dtype[0], given.way)))
    else:
        with tempfile.TemporaryDirectory(prefix="loading-") as folder:
            compare(Path(folder), given)


def compare(here: Path, given: argparse.Namespace) -> None:
    """Every way, and what it took."""
    import shutil

    folder = here / "model"
    sizes = ["--layers", str(given.layers), "--hidden", str(given.hidden), "--stored", given.stored]
    size = command("--way", "write", "--folder", str(folder), *sizes)
    print(f"{size / 1e9:.2f} GB of {given.stored}, {len(list(folder.glob('*.safetensors')))} files")
    names = f"{'way':<16} {'ranks':>5} {'slice':>8} {'peak':>8} {'s':>6} {'peak/from_pretrained':>21}"
    head = f"{names} {'save: peak':>11} {'s':>6} same bytes"
    for dtype in given.dtype:
        print(f"\nloaded as {dtype} (MiB of the highest rank, medians of {given.repeats})\n{head}")
        runs: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ("from_pretrained", *given.ways)}
        for _ in range(given.repeats):
            for way, found in runs.items():
                found.append(command("--way", way, "--folder", str(folder), "--dtype", dtype))
                for made in here.glob("model-*"):
                    shutil.rmtree(made)
        for way, found in runs.items():

            def middle(key: str, found: list[list[dict[str, float]]] = found) -> float:
                return statistics.median(max(rank[key] for rank in ranks) for ranks in found)

            whole = statistics.median(ranks[0]["peak"] for ranks in runs["from_pretrained"])
            same = "" if way == "from_pretrained" else all(rank["same"] for ranks in found for rank in ranks)
            print(
                f"{way:<16} {len(found[0]):>5} {middle('slice') / MIB:>8.0f} {middle('peak') / MIB:>8.0f} "
                f"{middle('seconds'):>6.1f} {middle('peak') / whole:>21.2f} {middle('save_peak') / MIB:>11.0f} "
                f"{middle('save'):>6.1f} {same}"
            )


if __name__ == "__main__":
    main()
