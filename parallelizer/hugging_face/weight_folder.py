"""A folder of pretrained weights: which files it has, and what stands in them. Nothing here needs transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.hugging_face.stored_files import StoredFile, StoredTensor, read_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The names that `from_pretrained` looks for, in this order."""

CONFIG = "config.json"
"""What the model is, in the same folder."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder by key. `index` is the text of its index, None where one file has everything."""

    folder: Path
    files: Mapping[str, StoredFile]
    index: str | None

    @property
    def entries(self) -> dict[str, StoredTensor]:
        """Every tensor by key."""
        return {key: entry for file in self.files.values() for key, entry in file.entries.items()}

    def file_of(self) -> dict[str, StoredFile]:
        """The file of every tensor by key."""
        return {key: file for file in self.files.values() for key in file.entries}

    @property
    def place(self) -> Span:
        """What a finding about the whole folder points at."""
        return Span(str(self.folder / (INDEX if self.index is not None else SINGLE)))


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the headers of a folder's files. Raises PlanError when one of them is missing, cut off, or has not what
    the index says, and for quantized weights.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise _error(
            "weights-not-found", f"there is no folder {folder}", folder, "name a folder of a saved model"
        )
    single = (folder / SINGLE).is_file()
    if not single and not (folder / INDEX).is_file():
        others = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors", ".pt", ".pth", ".gguf")
        )
        there = f"; it has {', '.join(others[:3])}" if others else ""
        raise _error(
            "weights-not-found",
            f"{folder} has neither {SINGLE} nor {INDEX}{there}",
            folder,
            "save the model with save_pretrained() of transformers, which writes safetensors",
        )
    text, placed = (None, {}) if single else _read_index(folder)
    missing = sorted({name for name in placed.values() if not (folder / name).is_file()})
    if missing:
        keys = [key for key, name in placed.items() if name == missing[0]]
        message = f"{', '.join(missing)} is not there, which {INDEX} names for {_some(keys)}"
        raise _error("weights-not-found", message, folder / INDEX, "copy or download the folder again, whole")
    _refuse_quantized(folder / CONFIG)
    files = {name: read_file(folder / name) for name in sorted({SINGLE} if single else {*placed.values()})}
    for key, name in placed.items():
        if key not in files[name].entries:
            message = f"{name} has no {key}, which {INDEX} says it has"
            raise _error("weights-unreadable", message, folder / INDEX, "copy or download it again")
    return Checkpoint(folder, files, text)


def _refuse_quantized(path: Path) -> None:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # the model was built from it, or from another
    quantized = config.get("quantization_config") if isinstance(config, dict) else None
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
        message = f"the weights are quantized ({method}), and only plain ones can be sharded"
        raise _error("weights-dtype", message, path, "dequantize them first, with transformers' own tools")


def _read_index(folder: Path) -> tuple[str, dict[str, str]]:
    path = folder / INDEX
    try:
        text = path.read_text()
        placed = {str(key): str(name) for key, name in json.loads(text)["weight_map"].items()}
        if any(Path(name).name != name for name in placed.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        message = f"{INDEX} is no index of safetensors files: it should be JSON with a weight_map"
        raise _error("weights-unreadable", message, path, "copy or download it again") from None
    return text, placed


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _error(code: str, message: str, path: Path, help_text: str) -> PlanError:
    return PlanError([Diagnostic(code, message, Span(str(path)), help_text)])
