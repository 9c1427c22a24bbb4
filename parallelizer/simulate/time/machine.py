"""The machine that a step is priced for: a hardware configuration with its table of kernels, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.time.constants import (
    DTENSOR_SECONDS,
    FP32_BY_BF16,
    HOST_SECONDS,
    KERNEL_SECONDS,
    MODULE_SECONDS,
    Constants,
)
from parallelizer.simulate.time.kernel_table import LIKE, GemmGrid, KernelTable, load_table, parse_table

HALF = ("bfloat16", "float16")

QUIET = 0.3
"""Processors that others may use while this machine is measured without a note."""

SET_IT = "set it in the hardware configuration; `parallelizer explain time-assumed` says what each key means"

REFERENCE = ("h100", 989.0, 450.0)
"""The table that gives the efficiency of shapes and the collectives inside a node on a device without one, its peak in bfloat16,
and GB/s of its links inside a node.
"""


@dataclass(frozen=True)
class Machine:
    """A device and its neighbourhood.

    `peaks` are dense TFLOP/s by dtype, as in datasheets; `scale` turns the table's rates into this device's, and `power` is
    its power limit by that of the measured device, and `links` the bandwidth of its links inside a node by that of the
    measured device's. Bandwidths are in bytes a second, each way: `memory`, `node` a device inside a node, `network` a device
    between nodes. `streams` is false where collectives run on the processors that compute. `kernel_seconds` and
    `host_seconds` are what an operator takes at least, on the device and on the host; `module_seconds` what calling a module
    takes and `dtensor_seconds` dispatching an operator on DTensors. Beyond the collective itself, `unit_seconds` is what one
    of FSDP's takes, `redistribute_seconds` one that moves a DTensor, and `exchange_seconds` one of an autograd function;
    `skew_seconds` is the wait for ranks that come late to it. `cores` is the number of processors that all ranks share, 0
    where each has a device, and `busy` what a processor takes while all of them are at work, by what it takes alone.
    `flash_2` is the rate of FlashAttention 2 by that of the table's attention.
    """

    name: str
    table: KernelTable
    peaks: Mapping[str, float]
    memory: float
    node: float
    network: float
    per_node: int
    scale: float = 1.0
    power: float = 1.0
    links: float = 1.0
    streams: bool = True
    measured: bool = False
    flash_2: float = 1.0
    kernel_seconds: float = KERNEL_SECONDS
    host_seconds: float = HOST_SECONDS
    module_seconds: float = MODULE_SECONDS
    dtensor_seconds: float = DTENSOR_SECONDS
    unit_seconds: float = 0.0
    redistribute_seconds: float = 0.0
    exchange_seconds: float = 0.0
    skew_seconds: float = 0.0
    cores: int = 0
    busy: float = 1.0
    assumed: tuple[Diagnostic, ...] = field(default=())
    guessed: Mapping[str, str] = field(default_factory=dict)
    """What is assumed of a dtype, which matters only where a step computes in it."""

    def crowd(self, ranks: float) -> float:
        """What a rank's computation takes while so many ranks are at work, by what it takes alone: those that share a processor
        take turns, and all share the memory.
        """
        if not self.cores:
            return 1.0
        others = min(1.0, (ranks - 1) / (self.cores - 1)) if self.cores > 1 else 0.0
        return max(1.0, ranks / self.cores) * (1 + (self.busy - 1) * max(0.0, others))

    def sustained(self, constants: Constants) -> float:
        """The share of a kernel's measured rate that a training reaches. What was measured here has all of it."""
        return 1.0 if self.measured else constants.sustained * self.power**constants.power

    def attention_rate(self, dtype: str) -> float | None:
        """The rate of attention in a dtype by that of the table, which is of 16 bits; None where no rate is known."""
        if self.measured or dtype in HALF:
            return 1.0
        base, peak = self.peaks.get("bfloat16"), self.peaks.get(dtype)
        return peak / base if base and peak else None

    def grid(self, dtype: str) -> tuple[GemmGrid, float] | None:
        """The grid for products in a dtype, and what its rates are multiplied by; None where no rate is known.

        A dtype without measurements has bfloat16's times the ratio of the datasheet's peaks.
        """
        name = LIKE.get(dtype, dtype)
        if name in self.table.gemm:
            return self.table.gemm[name], self.scale
        base, peak = self.peaks.get("bfloat16"), self.peaks.get(name)
        if "bfloat16" in self.table.gemm and base and peak:
            return self.table.gemm["bfloat16"], self.scale * peak / base
        if name == "float64" and "float32" in self.table.gemm:
            return self.table.gemm["float32"], self.scale / 2
        return None

    def collective_seconds(self, kind: str, ranks: int, size: int) -> float | None:
        """A collective inside a node by the table, None where it has none. Links of another bandwidth than the measured ones take
        as long as these for so many more bytes.
        """
        return self.table.collective_seconds(kind, ranks, round(size / self.links))


def machine_of(hardware: Mapping[str, Any]) -> Machine | None:
    """The machine that a hardware configuration describes; None where it has neither a table nor a peak rate."""
    name = str(hardware.get("name") or "")
    if hardware.get("kernels") == "this":
        return this_machine()
    kernels, peak = hardware.get("kernels"), hardware.get("bf16_tflops")
    assumed: list[Diagnostic] = []
    scale = 1.0
    if kernels:
        try:
            table = load_table(str(kernels))
        except (OSError, ValueError, ImportError) as error:
            assumed.append(assumption(f"hardware.kernels={kernels} is no table of kernels: {error}"))
            kernels = None
    if not kernels:
        if not peak:
            return None
        file, its, _ = REFERENCE
        table, scale = load_table(file), float(peak) / its
        assumed.append(
            assumption(
                f"{name or 'the hardware'} has no table of measured kernels: sizes cost as on {file.upper()}, by peak rate"
            )
        )
    peaks = {
        "bfloat16": float(peak or 0),
        "float8": float(hardware.get("fp8_tflops") or 0),
        "float8_rowwise": float(hardware.get("fp8_tflops") or 0),
        "float4": float(hardware.get("fp4_tflops") or 0),
        "float32": float(hardware.get("fp32_tflops") or (peak or 0) * FP32_BY_BF16),
    }
    peaks["float64"] = float(hardware.get("fp64_tflops") or peaks["float32"] / 2)
    guessed = {}
    if not hardware.get("fp32_tflops"):
        guessed["float32"] = (
            f"{name or 'the hardware'} has no fp32_tflops: a fifteenth of bf16_tflops is assumed"
        )
    if not hardware.get("fp64_tflops"):
        guessed["float64"] = f"{name or 'the hardware'} has no fp64_tflops: half of float32's rate is assumed"
    if not hardware.get("devices_per_node"):
        assumed.append(assumption(f"{name or 'the hardware'} has no devices_per_node: 8 are assumed"))
    memory = _rate(hardware, "memory_gb_per_s", 2000.0, assumed, name)
    node = _rate(hardware, "node_gb_per_s", 100.0, assumed, name)
    network = _rate(hardware, "network_gb_per_s", 25.0, assumed, name)
    limit, of_table = hardware.get("power_w"), hardware.get("kernels_power_w")
    if kernels and limit and not of_table:
        assumed.append(assumption(f"{name or 'the hardware'} has a power_w and no kernels_power_w: its table is assumed to be "
                                "of a device with the same limit"))  # fmt: skip
    of_links = float(hardware.get("kernels_node_gb_per_s") or 0) if kernels else REFERENCE[2]
    if table.collectives and hardware.get("node_gb_per_s") and not of_links:
        assumed.append(assumption(f"{name or 'the hardware'} has a node_gb_per_s and no kernels_node_gb_per_s: its table is "
                                "assumed to be of a device with the same links"))  # fmt: skip
    return Machine(
        name or "the hardware",
        table,
        peaks,
        memory,
        node,
        network,
        int(hardware.get("devices_per_node") or 8),
        scale,
        float(limit) / float(of_table) if limit and of_table else 1.0,
        node / 1e9 / of_links if of_links else 1.0,
        streams=bool(hardware.get("streams", True)),
        measured=bool(hardware.get("measured", False)),
        flash_2=float(hardware.get("flash_attention_2") or 1.0),
        assumed=tuple(assumed),
        guessed=guessed,
    )


def without_time(hardware: Mapping[str, Any]) -> Diagnostic | None:
    """A note for a device whose memory is known and whose rates are not, so that no time is predicted; None for all others."""
    if not hardware.get("memory_gib") or machine_of(hardware) is not None:
        return None
    return assumption(
        f"{hardware.get('name') or 'the hardware'} has neither bf16_tflops nor a table of kernels: no time of a step is predicted"
    )


def this_machine(folder: Path | None = None) -> Machine:
    """The machine that this process runs on, as it was measured; measured now where it has not been."""
    from parallelizer.simulate.time.measure import kept

    found = kept(folder)
    rates = found["rates"]
    assumed = []
    if "node" not in rates:
        assumed.append(
            assumption("links between devices were not measured, because there is one: 100 GB/s are assumed")
        )
    if float(found.get("others", 0.0)) > QUIET:
        assumed.append(
            assumption(
                f"other processes used {found['others']:.1f} processors when this machine was measured, so that it seems slower "
                "than it is",
                "let them end, delete .parallelizer/machine.json, and it is measured again",
            )
        )
    node = float(rates.get("node", 100e9))
    return Machine(
        str(found["name"]),
        parse_table(found),
        {},
        rates["memory"],
        node,
        node,
        1 << 30,
        streams=bool(found["streams"]),
        measured=True,
        kernel_seconds=rates["kernel"],
        host_seconds=rates["host"],
        module_seconds=rates["module"],
        dtensor_seconds=rates["dtensor"],
        unit_seconds=rates["unit"],
        redistribute_seconds=rates["redistribute"],
        exchange_seconds=rates["exchange"],
        skew_seconds=0.0 if found["streams"] else rates["skew"],
        cores=int(found["cores"]),
        busy=float(rates["busy"]),
        assumed=tuple(assumed),
        guessed={"float64": "float64 was not measured: half of float32's rate is assumed"},
    )


def _rate(
    hardware: Mapping[str, Any], key: str, otherwise: float, assumed: list[Diagnostic], name: str
) -> float:
    value = hardware.get(key)
    if value is None:
        assumed.append(assumption(f"{name or 'the hardware'} has no {key}: {otherwise:g} is assumed"))
    return float(otherwise if value is None else value) * 1e9


def assumption(message: str, help_text: str = SET_IT) -> Diagnostic:
    """A note of what the prediction of a time stands on."""
    return Diagnostic("time-assumed", message, None, help_text, severity="note")
