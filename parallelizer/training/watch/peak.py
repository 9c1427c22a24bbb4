"""The peak rate of a GPU by the name that its driver gives it."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from parallelizer.diagnostics.package_folder import config_folder

_HARDWARE = {
    "a100": r"\bA100\b",
    "h100": r"\bH100 80GB HBM3\b",
    "h200": r"\bH200$",
    "b200": r"\bB200$",
}
"""The files of configs/hardware by the devices that they describe. Those of the same name for PCIe slots are slower, but for
the A100.
"""


def peak_of(device: str) -> float | None:
    """Dense products of matrices in bfloat16 that a device of this name can do in a second, as the datasheet has them; None
    if it is not known.
    """
    file = next((file for file, name in _HARDWARE.items() if re.search(name, device)), None)
    if file is None:
        return None
    hardware: Any = OmegaConf.load(config_folder() / "hardware" / f"{file}.yaml")
    return float(hardware.bf16_tflops) * 1e12
