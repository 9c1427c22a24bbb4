"""The recipe as a user starts it: trained, killed, resumed, compiled, sampled from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.cases import Case, Row, Where

STEPS = 12


def trained(where: Where, *words: str) -> Iterator[Row]:
    """One run to its end: what it printed of its first step and its end, and its losses."""
    yield (row := row_of(where, "run", ("parallel=single", *words)))
    if row["status"]:
        raise RuntimeError("the run failed")


def resumed(where: Where) -> Iterator[Row]:
    """A run whose rank is killed after its checkpoint, beside one that is left alone: it goes on, and its losses are the same."""
    words = ("parallel=single", "train.checkpoint_every=4", "train.dtype=bfloat16")
    yield (first := row_of(where, "alone", words))
    yield (second := row_of(where, "killed", words, kill_after=6))
    alone, killed = (losses_of(where.folder / name) for name in ("alone", "killed"))
    apart = [abs(a - b) / abs(a) for a, b in zip(alone, killed, strict=False)]
    yield {
        "steps": len(killed),
        "losses that are the same": sum(a == 0 for a in apart),
        "worst relative": f"{max(apart):.1e}",
    }
    told = _run(
        [
            sys.executable,
            "-m",
            "recipes.generate",
            f"checkpoint={where.folder / 'killed'}",
            f"device={where.device}",
        ]
    )
    said = told.stdout if told.returncode == 0 else told.stderr
    yield {"generate": told.returncode, "said": " ".join(said.split())[-200:]}
    if first["status"] or second["status"] or told.returncode or any(apart):
        raise RuntimeError("a command failed, or the resumed run is another one")


def row_of(where: Where, name: str, words: Sequence[str], kill_after: int = 0, ranks: int = 1) -> Row:
    """One run as a row. The recipe starts one rank itself, and torchrun starts several."""
    folder = where.folder / name
    # A CPU may have no fast products in 16 bits.
    size = ("train.seq_len=64", "train.batch_size=8", "train.dtype=float32") if where.small else ()
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}") if ranks > 1 else ()
    command = [
        *(sys.executable, *start, "-m", "recipes.train", f"device={where.device}", f"train.steps={STEPS}"),
        *(f"hydra.run.dir={folder}", *words, *size),
    ]
    started = time.perf_counter()
    told = _run(command, folder / "metrics.jsonl", kill_after)
    seconds = time.perf_counter() - started
    text = told.stdout + told.stderr
    (where.folder / f"{name}.txt").write_text(text)
    losses = losses_of(folder)
    wanted = ("step 1:", "warning", "error", "not compared", "tokens, ")
    said = [line.strip() for line in text.splitlines() if any(w in line for w in wanted)]
    return {
        "run": name if not words else f"{name}: {' '.join(words)}",
        "status": told.returncode,
        "seconds": round(seconds, 1),
        "losses": f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)}" if losses else "none",
        "said": " // ".join(said)[:900],
    }


def _run(
    command: Sequence[str], metrics: Path | None = None, kill_after: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command; once its metrics have so many lines, kill the process that trains."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    while kill_after and process.poll() is None and metrics is not None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= kill_after:
            ranks = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
            ).stdout.split()
            for rank in ranks:
                os.kill(int(rank), signal.SIGKILL)
            break
        time.sleep(0.05)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def losses_of(folder: Path) -> list[float]:
    """The losses by step; of a step that was trained again, the last."""
    found: dict[int, float] = {}
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        one = json.loads(line)
        if "loss" in one and "step" in one:
            found[one["step"]] = one["loss"]
    return [found[step] for step in sorted(found)]


CASES = (
    Case("recipe float32", trained, ("train.dtype=float32",), limit=150),
    Case("recipe bfloat16", trained, ("train.dtype=bfloat16", "train.profile=4:5"), limit=150),
    Case("recipe killed and resumed", resumed, limit=240),
    Case("recipe compiled", trained, ("train.dtype=bfloat16", 'rules=["layers.*: compile"]'), limit=200),
    Case(
        "recipe checkpointed",
        trained,
        ("train.dtype=bfloat16", 'rules=["layers.*: {style: checkpoint, mode: selective}"]'),
        limit=120,
    ),
)
