"""The device and its neighbourhood that `hardware` describes: its keys, their values, and the table that it names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelizer.configuration.reading import Reading, is_whole
from parallelizer.diagnostics.diagnostic import quoted
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.simulate.time.kernel_table import INSTALLED, shipped_tables

TEXTS = ("name", "memory_type", "kernels")
SWITCHES = ("streams", "measured")
COUNTS = ("devices_per_node",)
POSITIVE = (
    "memory_gib", "capability", "bf16_tflops", "fp8_tflops", "fp4_tflops", "fp32_tflops", "fp64_tflops", "memory_gb_per_s",
    "node_gb_per_s", "network_gb_per_s", "power_w", "kernels_power_w", "kernels_node_gb_per_s", "flash_attention_2",
    "price_per_hour",
)  # fmt: skip
HARDWARE_KEYS = (*TEXTS, *POSITIVE, *COUNTS, *SWITCHES)

THIS = "this"
"""What `kernels` names where this machine is measured."""


def read_hardware(reading: Reading) -> Mapping[str, Any]:
    """The values of `hardware`, without those that are null; what is wrong with them is reported."""
    found: dict[str, Any] = {}
    for entry, _ in reading.mapping("hardware", resolve=False):
        name, key = entry.text, f"hardware.{entry.text}"
        if name not in HARDWARE_KEYS:
            help_text = did_you_mean(name, HARDWARE_KEYS, "it has")
            reading.unknown("unknown-key", f"`hardware` has no key {quoted(name)}", key, help_text)
            continue
        value = reading.get(key)
        wanted = None if value is None else _wanted(name, value)
        if wanted is not None:
            shown = quoted(value) if isinstance(value, str) else str(value)
            reading.error("wrong-type", f"{key} is {shown}", key, f"it is {wanted}")
        elif value is not None:
            found[name] = value
    if (table := found.get("kernels")) is not None and not _is_there(table):
        help_text = did_you_mean(table, shipped_tables(), "the shipped tables are")
        message = f"there is no table of kernels {quoted(table)}"
        reading.error("unknown-value", message, "hardware.kernels", help_text)
    return found


def _wanted(name: str, value: Any) -> str | None:
    """What the key takes, if the value is something else."""
    if name in TEXTS:
        return None if isinstance(value, str) else "a text"
    if name in SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name in COUNTS:
        return None if is_whole(value) and value >= 1 else "a whole number from 1"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if number and 0 < value < math.inf else "a number above 0"


def _is_there(table: str) -> bool:
    if table == THIS or table.startswith(INSTALLED):
        return True  # one is measured, the other read, when a time is asked for
    return Path(table).is_file() if table.endswith(".json") else table in shipped_tables()
