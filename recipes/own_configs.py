"""Where one's own configuration lies: `--config-dir`, and the folder `conf` beside this copy of the recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

BESIDE = Path(__file__).resolve().parents[1] / "conf"


def own_folders(argv: Sequence[str]) -> list[str]:
    """The folders that are searched before the shipped one, the first first."""
    given = own_words(argv).config_dir
    return [*([given] if given else []), *([str(BESIDE)] if BESIDE.is_dir() else [])]


def own_words(argv: Sequence[str]) -> argparse.Namespace:
    """Of Hydra's options `config_dir` and `config_name`; `rest` are the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="train")
    known = argparse.Namespace()
    _, known.rest = parser.parse_known_args(argv[1:], known)
    return known
