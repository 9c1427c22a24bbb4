"""The overrides, `--config-dir` and `--config-name`, which most commands have, and the setup that they come to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelizer.configuration.setup import Setup


def add_setup_options(
    parser: argparse.ArgumentParser,
    *,
    overrides: str = "Hydra overrides, as for the recipe",
    config_dir: str = "a folder of your own configuration, searched before the shipped one",
    config_name: str = "the root configuration (train)",
) -> None:
    """Add what the setup is read from. The texts are those of `--help`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
    parser.add_argument("--config-dir", metavar="DIR", help=config_dir)
    parser.add_argument("--config-name", metavar="NAME", default="train", help=config_name)


def read_setup(
    arguments: argparse.Namespace, more: Sequence[str] = (), *, planless: bool = False, builds: bool = True
) -> Setup:
    """The setup that the arguments name, with `more` overrides; `planless` and `builds` as in `from_config`. Raises PlanError
    and OverrideSyntaxError.
    """
    from parallelizer.configuration.compose import compose_config
    from parallelizer.configuration.read_setup import from_config

    composed = compose_config([*arguments.overrides, *more], arguments.config_dir, arguments.config_name)
    return from_config(*composed, planless=planless, builds=builds)
