"""What a model, or a model config, says of its architecture in transformers, without importing transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelizer.compiler.observe.families import NoPlan

if TYPE_CHECKING:
    from torch import nn

TARGET = "parallelizer.hugging_face.causal_lm"

LANGUAGE = ("AutoModelForCausalLM", "AutoModelForMaskedLM")
"""The classes of transformers whose models take tokens and return a prediction for each."""

LOSS = "parallelizer.losses.cross_entropy"

NOTHING = "the model config chooses no transformers model: it needs a name, or a config with a model_type"
CHOOSE = "set model.name=<folder or hub id>, or 'model.config={model_type: llama, hidden_size: 64, ...}'"
WRITE = (
    "make one with `python -m parallelizer init model=hf ... --output FILE`, from the model's forward, or with `import-plan`, "
    "from transformers' own plan; plan=FILE names it, and one in plans/hf_{kind}.yaml of the configuration is found without"
)


def is_model(model: nn.Module) -> bool:
    """Whether the model is a `transformers.PreTrainedModel`."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def plan_name(model: Mapping[str, Any]) -> str | None:
    """The name of the plan for a model config's architecture, `hf_<model_type>`; None for other models, and where only
    a hub knows the architecture.
    """
    if model.get("_target_") != TARGET:
        return None
    kind = model_type(model)
    return None if kind is None else f"hf_{kind}"


def takes_tokens(model: Mapping[str, Any]) -> bool | None:
    """Whether the batch of a model config is that of a language model: tokens and the labels of each. None where it is not of
    transformers, or says itself which other entries or loss it has.
    """
    if (
        model.get("_target_") != TARGET
        or model.get("loss") != LOSS
        or not isinstance(model.get("batch"), Mapping)
    ):
        return None
    if set(model["batch"]) != {"input_ids", "labels"}:
        return None
    return str(model.get("auto", LANGUAGE[0])) in LANGUAGE


def model_type(model: Mapping[str, Any]) -> str | None:
    """`model_type` of the config, or of the folder that it names, or of the hub id's copy in the cache; the hub is not asked."""
    config = model.get("config")
    if isinstance(config, Mapping) and config.get("model_type"):
        return str(config["model_type"])
    name = model.get("name")
    if not isinstance(name, str):
        return None
    file = Path(name) / "config.json"
    if not file.parent.is_dir() and missing_folder(name) is None:
        file = _cached(name, file.name) or file
    try:
        found = json.loads(file.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return None if found is None else str(found)


def _cached(name: str, file: str) -> Path | None:
    """A file of a hub id in the cache of this machine, where it is there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, file)
    except (ImportError, ValueError):  # a name that no repository has
        return None
    return Path(found) if isinstance(found, str) else None


def missing_folder(name: str) -> str | None:
    """What is wrong with a name that must be a folder of a model and is none; None where it may be a hub's id."""
    folder = Path(name)
    if folder.is_dir():
        return None if (folder / "config.json").is_file() else f"the folder {name} has no config.json"
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return f"there is no folder {name}" if is_path else None


def why_no_plan(model: Mapping[str, Any]) -> NoPlan | None:
    """Why a model config of transformers has no plan of its own; None for other models."""
    if model.get("_target_") != TARGET:
        return None
    kind, name, config = model_type(model), model.get("name"), model.get("config")
    if kind is None and isinstance(name, str) and (missing := missing_folder(name)) is not None:
        return NoPlan("model-build", f"the model cannot be built: {missing}", CHOOSE, "model.name")
    if kind is None and name and Path(str(name)).is_dir():
        message = f"which plan {name} takes is not known: its config.json has no readable model_type"
        return NoPlan("plan-not-found", message, "set plan=<name or path>, as in plan=hf_llama", "model.name")
    if kind is None and name:
        message = f"which plan {name} takes is not known: its configuration is not on this machine"
        advice = f"download it with `hf download {name} config.json`, or set plan=<name or path>, as in plan=hf_llama"
        return NoPlan("plan-not-found", message, advice, "model.name")
    if kind is None:
        where = "model.config" if isinstance(config, Mapping) else "model"
        return NoPlan("model-build", NOTHING, CHOOSE, where)
    wrong = _unknown(kind)
    if wrong is not None:
        return NoPlan("model-build", wrong[0], wrong[1], "model.name" if name else "model.config.model_type")
    message = f"no plan is shipped for model_type {kind!r} of transformers"
    where = "model.name" if name else "model.config.model_type"
    return NoPlan("plan-not-found", message, WRITE.format(kind=kind), where)


def _unknown(kind: str) -> tuple[str, str] | None:
    """What is wrong with an architecture that transformers does not have, and what it may be; None where nobody knows."""
    from parallelizer.diagnostics.nearest import nearest

    try:
        import transformers
    except ImportError:
        return None
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind in known:
        return None
    near = nearest(kind, known, 1)
    listing = "`python -c 'import transformers; print(*transformers.CONFIG_MAPPING)'` lists them"
    help_text = f"did you mean {near[0]}?" if near else listing
    return f"transformers {transformers.__version__} has no model_type {kind!r}", help_text
