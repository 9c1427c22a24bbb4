"""The configuration that a checkpoint contains: its model, its data's tokenizer and its plan become files of
the groups `model`, `data` and `plans`, which a command searches after the shipped ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

NAME = "checkpoint"
"""What these files are called: `model=checkpoint data=checkpoint`."""

GROUPS = ("model", "data")


def overrides_for(record: Mapping[str, Any], folder: Path, given: Sequence[str]) -> list[str]:
    """Write the configuration of a run into `folder`; `record` is what `record_of` made of it.

    Returns the overrides that choose it, but for what the overrides `given` choose themselves.
    """
    config: Any = OmegaConf.create(record["config"])
    chosen = {override.partition("=")[0].lstrip("+~") for override in given}
    words = [f"hydra.searchpath=['file://{folder}']"]
    for group in GROUPS:
        (folder / group).mkdir()
        (folder / group / f"{NAME}.yaml").write_text(OmegaConf.to_yaml(config[group]))
        words += [f"{group}={NAME}"] * (group not in chosen)
    files = _plans(record["plan"]["files"], folder / "plans")
    if "plan" not in chosen and not {"model"} & chosen:
        words += _plan(config, files)
    if config.get("imports") and "imports" not in chosen:
        words.append(f"imports=[{','.join(config.imports)}]")
    return words


def _plans(texts: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Plan files by the path that they had. Presets have rules too, and are no plans."""
    folder.mkdir()
    made = {}
    for path, text in texts.items():
        if Path(path).parent.name != "parallel":
            made[path] = folder / Path(path).name
            made[path].write_text(text)
    return made


def _plan(config: DictConfig, files: Mapping[str, Path]) -> list[str]:
    """The override for a plan that a command had named: by name, or by a path that need not be there any more."""
    written: Any = OmegaConf.to_container(config, resolve=False)
    plan = written.get("plan") if isinstance(written, dict) else None
    if not isinstance(plan, str) or "${" in plan:
        return []
    names = {Path(path).name: made for path, made in files.items()}
    made = names.get(Path(plan).name) if plan.endswith((".yaml", ".yml")) else None
    return [f"plan='{made or plan}'"]
