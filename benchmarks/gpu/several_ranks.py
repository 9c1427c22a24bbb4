"""Several ranks on one device, over gloo, against one process on the CPU, gradient by gradient: `verify device=cuda`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.cases import Case, Row, Where
from benchmarks.gpu.memory import method_rule


def verified(where: Where, *words: str) -> Iterator[Row]:
    """One proof: its verdict, the figures nearest to their bounds, and what it said otherwise; or why it cannot be made."""
    if left := _left_out(where, words):
        yield left
        return
    command = [
        sys.executable,
        "-m",
        "parallelizer",
        "verify",
        f"device={where.device}",
        f"--proofs={where.folder}",
        *words,
    ]
    told = subprocess.run(command, capture_output=True, text=True)
    (where.folder / "said.txt").write_text(told.stdout + told.stderr)
    lines = [line.strip() for line in (told.stdout + told.stderr).splitlines() if line.strip()]
    wanted = ("proven", "error", "NOT", "bound", "fails", "Error")
    said = [line for line in lines if any(w in line for w in wanted)] or lines[-3:]
    yield {"verify": " ".join(words), "status": told.returncode, "said": " // ".join(said)[:500]}
    if told.returncode:
        raise RuntimeError("not proven")


def _left_out(where: Where, words: tuple[str, ...]) -> Row | None:
    # Proofs compute in float64. There the gradient of torch 2.11's compiled attention fails on a CPU: "expected scalar type
    # Double but found Float".
    compiled = any(": compile" in word for word in words)
    if where.device == "cpu" and compiled and torch.__version__.startswith("2.11."):
        return {"not run": f"torch {torch.__version__} cannot compile attention in float64 on a CPU"}
    return None


MESHES = (
    *("tp2", "fsdp2", "cp2", "fsdp2_tp2", "cp2_tp2", "fsdp2_cp2_tp2", "hsdp2x2"),
    *("pp2", "pp2_tp2", "pp2_fsdp2"),
)

CASES = (
    *(Case(f"verify {mesh}", verified, (f"parallel={mesh}",), limit=90) for mesh in MESHES),
    Case(
        "verify cp2 ring",
        verified,
        ("parallel=cp2", method_rule("ring")),
        limit=90,
    ),
    Case(
        "verify cp2 ulysses",
        verified,
        ("parallel=cp2", method_rule("ulysses")),
        limit=90,
    ),
    Case("verify tp2 vocabulary-parallel", verified, ("parallel=tp2", "plan=llama_tp"), limit=90),
    Case("verify experts fsdp2_ep2", verified, ("parallel=fsdp2_ep2", "model=hf_qwen3_moe"), limit=90),
    Case(
        "verify experts fsdp2_ep4_tp2", verified, ("parallel=fsdp2_ep4_tp2", "model=hf_qwen3_moe"), limit=120
    ),
    Case("verify vit tp2", verified, ("parallel=tp2", "model=vit_tiny"), limit=90),
    Case(
        "verify compiled fsdp2_tp2",
        verified,
        ("parallel=fsdp2_tp2", 'rules=["layers.*: compile"]'),
        limit=120,
    ),
    Case(
        "verify checkpointed fsdp2",
        verified,
        ("parallel=fsdp2", 'rules=["layers.*: {style: checkpoint, mode: selective}"]'),
        limit=90,
    ),
)
