"""What a model config says of a transformers architecture, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TARGET = "parallelizer.hugging_face.causal_lm"


def plan_name(model: Mapping[str, Any]) -> str | None:
    """The name of the plan for a model config's architecture, `hf_<model_type>`; None for other models, and where only
    a hub knows the architecture.
    """
    if model.get("_target_") != TARGET:
        return None
    kind = model_type(model)
    return None if kind is None else f"hf_{kind}"


def model_type(model: Mapping[str, Any]) -> str | None:
    """`model_type` of the config, or of the folder that it names."""
    config = model.get("config")
    if isinstance(config, Mapping) and config.get("model_type"):
        return str(config["model_type"])
    name = model.get("name")
    if not isinstance(name, str):
        return None
    try:
        found = json.loads((Path(name) / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return None if found is None else str(found)
