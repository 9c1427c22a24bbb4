"""Measuring this machine: products of matrices, attention, memory, the host's own time, collectives and messages.

It takes less than a minute, and what it finds is kept in a file. On a machine without GPUs, ranks are processes with one thread
each, as the recipe starts them, and collectives are gloo's; on a machine with several, each rank has a GPU, and they are NCCL's.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from parallelizer.child.children import Children, in_children
from parallelizer.simulate.time.wrappers import RATES, gather_function, wrapper_rates

FILE = Path(".parallelizer") / "machine.json"
FORM = 6
"""The form of the file; one of another form is measured again."""
SIZES = (32, 128, 512, 2048)
"""The grid of products on a CPU; on a GPU, each is eight times as large."""
LENGTHS = (128, 512, 2048)
PAYLOADS = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
RANKS = {2: 3, 4: 3, 8: 1}
"""Numbers of ranks that are measured, and how often on CPUs: each time by new processes, of which the median counts, because how
long ranks wait for each other is another from start to start.
"""
TURNS = 3
"""How often a processor is measured alone and with the others."""
SECONDS = 0.05
"""How long one thing is repeated, at least once."""
HELD = 1 << 26
"""Bytes of results that are kept, and of operands that are read in turn, on a CPU: in a step, operands have left the caches, and
results lie in memory that the system has to hand out.
"""


def kept(folder: Path | None = None) -> dict[str, Any]:
    """What was measured of this machine, from the file; measured and written now where the file is of another machine."""
    file = (folder or Path()) / FILE
    name = _name()
    try:
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if found.get("name") == name and found.get("form") == FORM:
            return found
    except (OSError, ValueError):
        pass
    found = measure()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n", "utf-8")
    except OSError:
        pass  # it is measured again next time
    return found


def measure() -> dict[str, Any]:
    """Everything, in children of this process, which must have no process group."""
    others = cores_in_use()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    [found] = in_children([(_device, "cuda" if gpu else "cpu")], sees_gpus=gpu)
    cores = 0 if gpu else (os.cpu_count() or 1)
    found["rates"]["busy"] = _busy(cores)
    collectives: dict[str, dict[str, list[float]]] = {}
    rates = {}
    devices = torch.cuda.device_count() if gpu else max(RANKS)
    for ranks in (r for r in RANKS if r <= devices):
        rounds = [_slowest(ranks, gpu) for _ in range(1 if gpu else RANKS[ranks])]
        for kind in rounds[0]["microseconds"]:
            each = zip(*(one["microseconds"][kind] for one in rounds), strict=True)
            collectives.setdefault(kind, {})[str(ranks)] = [statistics.median(times) for times in each]
        if ranks == 2:
            rates = {key: statistics.median(one[key] for one in rounds) for key in RATES}
    payloads = _payloads(gpu)
    found["collectives"] = {"bytes": payloads, "microseconds": collectives}
    if "send" in collectives:
        found["rates"]["node"] = payloads[-1] / (collectives["send"]["2"][-1] * 1e-6)
    found["rates"] = {**dict.fromkeys(RATES, 0.0), **found["rates"], **rates}
    took = round(time.monotonic() - began, 1)
    about = {"name": _name(), "form": FORM, "seconds": took, "others": others, "cores": cores, "streams": gpu}
    return {**about, **found}


def cores_in_use(seconds: float = 0.5, stat: Path = Path("/proc/stat")) -> float:
    """How many processors other processes use, while this one sleeps; 0 where the system does not tell."""

    def used() -> float:
        user, nice, system = stat.read_text().split("\n", 1)[0].split()[1:4]
        return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")

    try:
        before, began = used(), time.monotonic()
        time.sleep(seconds)
        return round((used() - before) / (time.monotonic() - began), 2)
    except (OSError, ValueError):
        return 0.0


def _slowest(ranks: int, gpu: bool) -> dict[str, Any]:
    """What `_collectives` finds on the slowest of so many new ranks, thing by thing."""
    with tempfile.TemporaryDirectory() as folder:
        kind = "cuda" if gpu else "cpu"
        calls = [(_collectives, rank, ranks, f"{folder}/store", kind) for rank in range(ranks)]
        with Children(calls, sees_gpus=gpu) as children:
            times = children.results()
    slowest = {
        kind: [max(each) for each in zip(*(one["microseconds"][kind] for one in times), strict=True)]
        for kind in times[0]["microseconds"]
    }
    rates = {key: max(one[key] for one in times) for key in RATES} if ranks == 2 else {}
    return {"microseconds": slowest, **rates}


def _payloads(gpu: bool) -> list[int]:
    """The bytes of the collectives that are measured; those of GPUs have more."""
    return [16 * size for size in PAYLOADS] if gpu else list(PAYLOADS)


def _name() -> str:
    """What tells this machine and its torch from others."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return f"{platform.node()}, {device}, {os.cpu_count()} cores, torch {torch.__version__}"


def _timed(function: Callable[[], object], wait: Callable[[], object], *, held: int = 0) -> float:
    """Seconds of one call, the median of some groups of calls. Up to `held` bytes of results are kept while others are made."""
    made = function()
    size = made.nbytes if isinstance(made, torch.Tensor) else 0
    wait()
    started = time.perf_counter()
    function()
    wait()
    calls = max(1, int(SECONDS / 3 / max(time.perf_counter() - started, 1e-7)))
    every = max(1, held // max(size, 1)) if held else 1
    times = []
    for _ in range(3):
        results: list[object] = []
        started = time.perf_counter()
        for call in range(calls):
            results.append(function())
            if call % every == every - 1:
                results.clear()
        results.clear()
        wait()
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def _in_turn(tensor: torch.Tensor, held: int) -> Callable[[], torch.Tensor]:
    """Copies of a tensor, of `held` bytes together, one after the other."""
    copies = itertools.cycle([tensor, *(tensor.clone() for _ in range(held // tensor.nbytes - 1))])
    return lambda: next(copies)


def _device(device: str) -> dict[str, Any]:
    """One device by itself, in a child of one thread."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    larger, held = (8, 0) if device == "cuda" else (1, HELD)
    sizes = [larger * n for n in SIZES]
    gemm: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        values: list[list[list[float]]] = []
        for m, n in itertools.product(sizes, sizes):
            if n == sizes[0]:
                values.append([])
            row = []
            for k in sizes:
                # The largest products of a CPU would take a minute: they run at the rate of smaller ones.
                if device == "cpu" and m * n * k > (1 << 28 if dtype == torch.float32 else 1 << 25):
                    row.append(0.0)
                    continue
                a, b = (
                    torch.ones(m, k, dtype=dtype, device=device),
                    torch.ones(k, n, dtype=dtype, device=device),
                )
                left = _in_turn(a, held)
                seconds = _timed(lambda a=left, b=b: a() @ b, wait, held=held)  # type: ignore[misc]
                row.append(2 * m * n * k / seconds / 1e12)
            values[-1].append(row)
        gemm[str(dtype).removeprefix("torch.")] = {"m": sizes, "n": sizes, "k": sizes, "tflops": values}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    attention: dict[str, list[float]] = {}
    for size in (16, 64):
        for length in LENGTHS:
            q = torch.ones(1, 8, length, size, dtype=dtype, device=device)
            seconds = _timed(lambda q=q: F.scaled_dot_product_attention(q, q, q, is_causal=True), wait)  # type: ignore[misc]
            attention.setdefault(str(size), []).append(2 * 8 * length**2 * size / seconds / 1e12)
    return {
        "source": "measured on this machine",
        "gemm": gemm,
        "attention": {"length": list(LENGTHS), "tflops": attention},
        "rates": {"memory": _bandwidth(device, wait, held), **_overheads(device, wait)},
    }


def _busy(cores: int) -> float:
    """What a processor takes for products and operators while all others do the same, by what it takes alone."""
    if cores < 2:
        return 1.0
    ratios = []
    for _ in range(TURNS):
        [alone] = in_children([(_mixture,)])
        ratios.append(statistics.mean(in_children([(_mixture,)] * cores)) / alone)
    return max(1.0, statistics.median(ratios))


def _mixture() -> float:
    """Seconds of a product and some operators, in a child of one thread."""
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    left = _in_turn(a, HELD)
    rates = [
        (_timed(lambda: left() @ b, lambda: None, held=HELD), _bandwidth("cpu", lambda: None, HELD))
        for _ in range(3)
    ]
    return sum(product + (1 << 24) / bandwidth for product, bandwidth in rates)


def _bandwidth(device: str, wait: Callable[[], object], held: int) -> float:
    """Bytes a second of typical operators between products: the mean time of some over the bytes they read and write."""
    one = torch.rand(64, 1 << 12 if device == "cpu" else 1 << 20, device=device)
    moved = one.nbytes
    x, y = _in_turn(one, held), torch.rand_like(one)
    operators: Mapping[Callable[[], object], int] = {
        lambda: x() + y: 3,
        lambda: x() * y: 3,
        lambda: F.silu(x()): 2,
        lambda: x().t().contiguous(): 2,
        lambda: x().pow(2).mean(-1): 1,
        lambda: x().add_(y, alpha=0.0): 3,
    }
    return sum(operators.values()) * moved / sum(_timed(call, wait, held=held) for call in operators)


def _overheads(device: str, wait: Callable[[], object]) -> dict[str, float]:
    """What the host takes for an operator with its backward, and for calling a module."""
    x = torch.ones(8, device=device, requires_grad=True)
    chain = 20

    def operators() -> None:
        y = x
        for _ in range(chain):
            y = y * 1.5
        y.sum().backward()

    layers = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(chain)))
    operator = _timed(operators, wait) / (2 * chain + 4)
    module = _timed(lambda: layers(x), wait) / (2 * chain)
    return {"host": operator, "module": module, "kernel": 2.5e-6 if device == "cuda" else 0.0}


def _collectives(rank: int, ranks: int, store: str, device: str = "cpu") -> dict[str, Any]:
    """Collectives and messages as one of so many ranks, which begin each together, and what DTensor and FSDP take besides."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    gather, scatter = (
        gather_function(),
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    )
    try:
        found: dict[str, list[float]] = {
            "all_gather": [],
            "reduce_scatter": [],
            "all_reduce": [],
            "all_to_all": [],
            **({"send": []} if ranks == 2 else {}),
        }
        for payload in _payloads(device == "cuda"):
            whole = torch.ones(payload // 4, device=device)
            part = torch.ones(payload // 4 // ranks, device=device)
            calls: Mapping[str, Callable[[], object]] = {
                "all_gather": lambda w=whole, p=part: gather(w, p),  # type: ignore[misc]
                "reduce_scatter": lambda w=whole, p=part: scatter(p, w),  # type: ignore[misc]
                "all_reduce": lambda w=whole: dist.all_reduce(w),  # type: ignore[misc]
                "all_to_all": lambda w=whole: dist.all_to_all_single(torch.empty_like(w), w),  # type: ignore[misc]
            }
            for kind, call in calls.items():
                calls_each = 2 if payload > 1 << 20 else 4
                seconds = statistics.median(_together(call, calls_each, wait) for _ in range(3))
                found[kind].append(round(seconds * 1e6, 1))
            if ranks == 2:  # there and back are two messages
                turn = _together(lambda w=whole: _there_and_back(rank, w), 4, wait)  # type: ignore[misc]
                found["send"].append(round(turn / 2 * 1e6, 1))
        rates = {}
        if ranks == 2:
            rates = wrapper_rates(
                device,
                lambda call, calls: statistics.median(_together(call, calls // 2, wait) for _ in range(5)),
            )
    finally:
        dist.destroy_process_group()
    return {"microseconds": found, **rates}


def _there_and_back(rank: int, tensor: torch.Tensor) -> None:
    """A message from rank 0 to rank 1, and one back behind it."""
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _together(call: Callable[[], object], calls: int, wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of one call, where all ranks make the same number of calls."""
    call()
    dist.barrier()
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - started) / calls
