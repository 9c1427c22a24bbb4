"""Hydra's composition for our own commands, with Hydra's mistakes turned into diagnostics."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from parallelizer.configuration import old_paths
from parallelizer.configuration.compose_mistakes import Attempt, explain
from parallelizer.configuration.limits import check_files, check_overrides
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.override_mistakes import OverrideSyntaxError, explain_override
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder


def compose_config(
    overrides: Sequence[str], config_dir: str | Sequence[str] | None = None, config_name: str = "train"
) -> tuple[DictConfig, Origins]:
    """Compose a configuration as the recipe would: the user's folders are searched first, the shipped one behind them.

    Raises PlanError when it cannot be composed, OverrideSyntaxError when an override does not parse.
    """
    shipped = config_folder()
    own = [config_dir] if isinstance(config_dir, str) else list(config_dir or ())
    folders = [*map(_own_folder, own), shipped]
    check_overrides(overrides)
    check_files(folders, overrides, config_name)

    def attempt(some: Sequence[str]) -> tuple[DictConfig, Origins]:
        with searched_first(own), initialize_config_dir(str(shipped), version_base="1.3"):
            config = compose(config_name, overrides=list(some), return_hydra_config=True)
            return config, _origins(config.hydra, config_name)

    try:
        config, origins = attempt(overrides)
    except OverrideParseException as error:
        raise OverrideSyntaxError(explain_override(error.override, error.message, overrides)) from None
    except Exception as error:  # Hydra lets through what its parts raise: YAML's errors, ValueError
        failed = Attempt(overrides, folders, lambda some: attempt(some)[0])
        raise PlanError([explain(error, failed)]) from None
    with open_dict(config):
        del config["hydra"]
    return config, origins


def running_origins() -> Origins:
    """The origins of the configuration that `@hydra.main` is running with; of none, the shipped folder alone."""
    if not HydraConfig.initialized():
        return Origins(folders=[config_folder()])
    hydra = HydraConfig.get()
    return _origins(hydra, str(hydra.job.config_name))


def _origins(hydra: Any, config_name: str) -> Origins:
    """The origins of a composed configuration, while Hydra is initialised as it was for that."""
    # Unresolved: an override may have an interpolation in its text.
    task: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    own: Any = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    sources = [s for s in hydra.runtime.config_sources if s.path and s.provider != "hydra"]
    folders = [folder for s in sources for folder in _folders(s.schema, s.path)]
    choices = tuple(hydra.runtime.choices.items())
    if folders != [config_folder()]:
        return Origins(task, _merged(config_name, [*own, *task]), folders)
    if (config_name, choices) not in _MERGED:
        _MERGED[config_name, choices] = _merged(config_name, [*own, *task])
    return Origins(task, _MERGED[config_name, choices], folders)


_MERGED: dict[tuple[str, tuple[Any, ...]], list[tuple[str, str]]] = {}
"""The shipped configs that were merged, by what was chosen for each group: Hydra takes a third of a composition to list them."""


def _merged(config_name: str, overrides: list[str]) -> list[tuple[str, str]]:
    """The configs that Hydra merges, in its order, each with the key that its content goes under."""
    loader = GlobalHydra.instance().config_loader()
    merged = loader.compute_defaults_list(config_name, overrides, RunMode.RUN).defaults
    return [(str(m.config_path), m.package or "") for m in merged if m.config_path]


def _folders(schema: str, path: str) -> list[Path]:
    """The folders of a part of the search path: one, or those of a package (`pkg://my_package.conf`)."""
    if schema == "file":
        return [Path(path)]
    try:
        spec = importlib.util.find_spec(path.replace("/", ".")) if schema == "pkg" else None
    except ImportError:
        return []
    return [Path(folder).resolve() for folder in (spec.submodule_search_locations or ())] if spec else []


def _own_folder(config_dir: str) -> Path:
    """Raises PlanError where there is none."""
    folder = Path(config_dir).absolute()
    if not folder.is_dir():
        message, help_text = f"there is no folder {config_dir}", "--config-dir names a folder of YAML files"
        raise PlanError([Diagnostic("config-not-found", message, None, help_text)])
    return folder


class _SearchedFirst(SearchPathPlugin):
    """Puts folders before the application's. Hydra's own `--config-dir` puts one behind, where it changes nothing there."""

    folders: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.prepend("own", f"file://{folder}", "main")


@contextmanager
def searched_first(folders: Sequence[str]) -> Iterator[None]:
    """While it lasts, Hydra searches the user's folders before the application's, in this process alone: a plugin that is
    installed would enter every Hydra application on the machine. Raises PlanError where there is no such folder.
    """
    old_paths.install()
    Plugins.instance().register(_SearchedFirst)
    _SearchedFirst.folders = [_own_folder(folder) for folder in folders]
    try:
        yield
    finally:
        _SearchedFirst.folders = ()
