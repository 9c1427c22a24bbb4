"""Where a configured model's pretrained weights are: a folder, or a hub's copy of one. Imports no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.hugging_face.architecture import TARGET

_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.py", "*.jinja", "README.md", "LICENSE*"]
"""Weights, configurations and what tokenizers consist of; not the same weights in other formats."""


def weights_folder(model: Mapping[str, Any], origins: Origins) -> Path | None:
    """The folder that `model.name` says, downloaded if it is a hub's id; None for a model that has no name.

    Raises PlanError when there is no such folder and no hub gives one.
    """
    name = model.get("name")
    if model.get("_target_") != TARGET or not name:
        return None
    folder = Path(str(name)).expanduser()
    if folder.is_dir():
        return folder
    reason = "there is no such folder"
    if not folder.is_absolute() and str(name).count("/") == 1 and not str(name).startswith("."):
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(str(name), allow_patterns=_WANTED))
        except Exception as error:  # whatever networks and hubs do
            told = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"there is no such folder, and the hub does not give it: {told[0]}"
    message = f"model.name={name} has no weights: {reason}"
    help_text = "name a folder of a saved model, or start from random values: train.pretrained=false"
    raise PlanError([Diagnostic("weights-not-found", message, origins.span("model.name"), help_text)])
