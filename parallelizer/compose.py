"""Hydra's composition for our own commands, with Hydra's mistakes turned into diagnostics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from parallelizer.config import config_folder
from parallelizer.diagnostics import Diagnostic, PlanError, Span
from parallelizer.origins import Origins
from parallelizer.suggest import nearest


class OverrideSyntaxError(Exception):
    """An override that Hydra's grammar cannot read: the command line does not parse."""


def compose_config(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str = "train"
) -> tuple[DictConfig, Origins]:
    """Compose a configuration as the recipe would, the user's folder first and the shipped one behind it.

    Raises PlanError when it cannot be composed, OverrideSyntaxError when an override does not parse.
    """
    shipped = config_folder()
    folder = Path(config_dir).resolve() if config_dir else shipped
    if not folder.is_dir():
        raise PlanError([Diagnostic("config-not-found", f"there is no folder {config_dir}", None, "--config-dir names a folder of YAML files")])
    behind = [] if folder == shipped else [f"hydra.searchpath=[file://{shipped}]"]
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(config_name, overrides=[*behind, *overrides], return_hydra_config=True)
    except OverrideParseException as error:
        raise OverrideSyntaxError(" ".join(str(error).split())) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise PlanError([_diagnostic(error, overrides, [folder, shipped])]) from None
    origins = Origins(
        list(overrides), {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if "/" not in str(k)},
        list(dict.fromkeys([folder, shipped])), config_name,
    )
    with open_dict(config):
        del config["hydra"]
    return config, origins


def running_origins() -> Origins:
    """The origins of the configuration that `@hydra.main` is running with."""
    hydra = HydraConfig.get()
    folders = [Path(s.path) for s in hydra.runtime.config_sources if s.schema == "file" and s.path]
    choices = {str(k): str(v) for k, v in hydra.runtime.choices.items() if "/" not in str(k)}
    overrides = list(OmegaConf.to_container(hydra.overrides.task) or [])  # type: ignore[arg-type]
    return Origins([str(o) for o in overrides], choices, folders, str(hydra.job.config_name))


def _diagnostic(error: Exception, overrides: Sequence[str], folders: Sequence[Path]) -> Diagnostic:
    """Hydra's message, at the override that it speaks of."""
    text = str(error)
    first = text.strip().split("\n")[0].strip()
    for override in overrides:
        name, _, value = override.partition("=")
        group = name.lstrip("+~")
        if f"'{group}/{value}'" in first and "Could not find" in first:
            known = sorted({p.stem for f in folders for p in (f / group).glob("*.yaml")})
            near = nearest(value, known, 1)
            hint = (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(known)}"
            column = len(name) + 2
            return Diagnostic("unknown-preset", f"there is no {group} {value!r}",
                              Span(f"<override {override}>", 1, column, column + len(value)), hint)
        if f"'{group}'" in first:
            return Diagnostic("unknown-key", f"there is no key {group!r}", Span(f"<override {override}>", 1, 1, len(name) + 1),
                              f"prefix it with ++ to add it to an open map: ++{override.lstrip('+')}")
    return Diagnostic("config-invalid", first, None, f"see the configuration in {os.path.relpath(folders[0])}")
