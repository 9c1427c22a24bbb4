"""The rows of a file of published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

OURS = Path(__file__).parent / "runs.yaml"
"""The runs that the constants were fitted on. Each has its source."""


@dataclass(frozen=True)
class Row:
    """One published run, with the entries of its GPU and its model."""

    run: Mapping[str, Any]
    gpu: Mapping[str, Any]
    model: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.run.get("id", "a row without an id"))

    @property
    def mesh(self) -> dict[str, int]:
        """The axes that the row gives a size."""
        return {axis: int(size) for axis, size in self.run["mesh"].items() if size}

    @property
    def source(self) -> str:
        """The name of the repository or the paper that the run comes from."""
        source = self.run.get("source") or {}
        if not isinstance(source, Mapping):
            return str(source)
        if source.get("repo"):
            return str(source["repo"]).rpartition("/")[2]
        url = str(source.get("url", "unknown"))
        return "Korthikanti et al." if "2205.05198" in url else url.split("//")[-1].split("?")[0]

    @property
    def techniques(self) -> str:
        return str(self.run.get("techniques") or "")

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second on each GPU; from the published MFU where nothing else is there."""
        measured = self.run.get("measured") or {}
        if measured.get("tokens_per_second_per_gpu"):
            return float(measured["tokens_per_second_per_gpu"])
        tflops = measured.get("model_tflops_per_gpu_reported")
        return float(tflops) * 1e12 / self.flops_per_token if tflops and self.model else None

    @property
    def flops_per_token(self) -> float:
        """6 P + 12 L d S, without a discount for the causal mask (Chowdhery et al. 2022, appendix B)."""
        layers, hidden = int(self.model["layers"]), int(self.model["hidden"])
        return 6.0 * float(self.model["params"]) + 12.0 * layers * hidden * int(self.run["seq_len"])

    @property
    def peak_memory(self) -> float | None:
        """The published peak in GiB."""
        measured = self.run.get("measured") or {}
        for key, value in measured.items():
            if key.startswith("peak_memory") and value and key.endswith(("_gib", "_gb")):
                return float(value) * (1.0 if key.endswith("_gib") else 1e9 / 2**30)
        return None

    @property
    def peak_is_in_use(self) -> bool:
        """Whether the row says that its peak is of what was allocated, and not of what the allocator had reserved."""
        keys = (key for key in self.run.get("measured") or {} if key.startswith("peak_memory"))
        words = " ".join([*keys, str(self.run.get("note") or "")]).lower()
        return "allocated" in words and "reserved" not in words


def read(path: Path = OURS) -> list[Row]:
    """The rows of a file of the form of runs.yaml; what is no row has no more than an id."""
    document = yaml.safe_load(path.read_text())
    gpus, models = document.get("gpus") or {}, document.get("models") or {}
    runs = [
        run if isinstance(run, Mapping) else {"id": f"row {at}, which is no map"}
        for at, run in enumerate(document["runs"])
    ]
    return [Row(run, gpus.get(run.get("gpu")) or {}, models.get(run.get("model")) or {}) for run in runs]
