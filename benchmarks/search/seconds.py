"""What a search takes: its time, the time of the processors, and the memory of all its processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.kept import Kept
from benchmarks.search.tables import Table
from parallelizer.commands.search import add_options
from parallelizer.diagnostics.units import size
from parallelizer.report.rows.time import duration

QWEN = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
"""The public configuration of Qwen3-30B-A3B."""

CASES = {
    "Llama 3 8B, 8 H100": (
        "model=llama3_8b", "gpus=8", "hardware=h100", "train.seq_len=8192", "train.batch_size=16",
    ),
    "Llama 3 70B, 256 H100": (
        "model=llama3_70b", "gpus=256", "hardware=h100", "train.seq_len=8192", "train.batch_size=512",
    ),
    "Llama 3.1 405B, 1,024 H100": (
        "model=llama3_405b", "gpus=1024", "hardware=h100", "train.seq_len=8192", "train.batch_size=1024",
    ),
    "Qwen3-30B-A3B, 64 H200": (
        "model=hf", "model.name=QWEN", "gpus=64", "hardware=h200", "train.seq_len=4096", "train.batch_size=512",
        "--memory", "128GiB", "--within", "mesh.tp=1..8", "--top", "5",
    ),
}  # fmt: skip
"""QWEN is the folder of its configuration."""

SECONDS, BYTES = 60.0, 10**9
"""What a search may take on two idle cores."""

IDLE = 0.1
"""Cores that other processes may use without a difference."""


def measure(kept: Kept, only: str) -> Table:
    """Each case in a process of its own."""
    rows, wrong = [], []
    for name, overrides in CASES.items():
        if only not in name:
            continue
        one = kept.of(f"time: {name}", lambda given=overrides: _measured(given))
        rows.append([
            name, f"{one['candidates']:,}", f"{one['priced']:,}", str(one["classes"]), str(one["traced"]),
            f"{one['wall']:.0f} s", f"{one['processor']:.0f} s", f"{one['load']:.1f}", f"{_on_two(one):.0f} s",
            size(one["bytes"]), one["best"],
        ])  # fmt: skip
        if _on_two(one) > SECONDS:
            wrong.append(f"{name}: two idle cores take longer than {SECONDS:.0f} s")
        if one["bytes"] > BYTES:
            wrong.append(f"{name}: more than {size(BYTES)}")
        print(*rows[-1], sep="  ", flush=True)
    head = [
        "search", "candidates", "priced", "traced layers", "dry runs", "time", "processors", "other load",
        "on two idle cores", "memory", "best",
    ]  # fmt: skip
    said = (
        "The time of a search, from the command to its end, and that of all processors together. `other load` is how many "
        "cores other processes used meanwhile. The time on two idle cores is the measured one where they used less than "
        f"{IDLE}; elsewhere it is the processor time of the search itself and half of that of its children, which run in pairs. "
        "Memory is that of all processes of the search, shared pages once."
    )
    return Table("Time", said, head, rows, wrong)


def _on_two(one: dict[str, Any]) -> float:
    """The seconds on two idle cores, as the table says."""
    alone: float = one["own"] + (one["processor"] - one["own"]) / 2
    return float(one["wall"]) if one["load"] < IDLE else alone


@contextlib.contextmanager
def search_words(words: Sequence[str]) -> Iterator[tuple[list[str], list[str], int | None]]:
    """The overrides, the limits and the bytes of memory of a case, while the folder of its model is there."""
    with _with_folder(words) as every:
        parser = argparse.ArgumentParser()
        add_options(parser)
        asked = parser.parse_args(every)
        yield asked.overrides, asked.within, asked.memory


@contextlib.contextmanager
def _with_folder(words: Sequence[str]) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN))
        yield [word.replace("QWEN", folder) for word in words]


def _measured(overrides: tuple[str, ...]) -> dict[str, Any]:
    with _with_folder(overrides) as words:
        command = [sys.executable, "-m", "parallelizer", "search", "--json", *words]
        before, started = _processor_times(), time.monotonic()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak = _Peak(child.pid)
        assert child.stdout is not None  # noqa: S101
        text = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        wall, after = time.monotonic() - started, _processor_times()
        child.returncode = os.waitstatus_to_exitcode(status)
    peak.end()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {child.returncode}")
    found = json.loads(text)
    best = found["results"][0]
    mesh = " x ".join(f"{axis}={count}" for axis, count in best["mesh"].items() if count > 1)
    processor = used.ru_utime + used.ru_stime
    return {
        "candidates": found["candidates"],
        "priced": found["priced"],
        "classes": found["classes"],
        "traced": len(found["results"]) + len(found["too_large"]) + len(found["refused"]),
        "best": f"{mesh} ({best['options']}), {duration(best['seconds'])}",
        "wall": wall,
        "processor": processor,
        "own": min(peak.own, processor),
        "load": max(after - before - processor, 0.0) / wall,
        "bytes": peak.bytes,
    }


def _processor_times() -> float:
    """The seconds that the processors of this machine have worked."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = (float(word) for word in words[:3])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class _Peak:
    """The most memory that a process and its children hold together, looked at twice a second, and its own processor time."""

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes, self.own, self.ended = pid, 0, 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(0.5):
            self.bytes = max(self.bytes, sum(map(_proportional, _family(self.pid))))
            self.own = max(self.own, _own_seconds(self.pid))

    def end(self) -> None:
        """Look no more."""
        self.ended.set()
        self.thread.join()


def _own_seconds(pid: int) -> float:
    """The processor time of a process without its children."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (float(words[11]) + float(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _family(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _proportional(pid: int) -> int:
    """The bytes of a process; of pages that several share its part."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
