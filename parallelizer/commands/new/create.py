"""What `new` writes: the recipes, a small model and its configuration, copied to start from.

They are copied because a recipe is read and changed by those who train with it. What it stands on, `parallelizer.training`,
stays in the package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import ROOT, config_folder

MODEL = "my_gpt"
"""The model of the copy, which its root configuration chooses."""


def create(folder: str | Path) -> list[str]:
    """Write the files into `folder`, which may be there; the paths below it that were written, sorted.

    Raises PlanError `file-unwritable` where that is impossible, and for each of them that is there already; nothing is left then.
    """
    root, texts = Path(folder), dict(_files())
    found = sorted(name for name in texts if os.path.lexists(root / name))
    if found:
        help_text = "rename it, or name another folder; nothing was written"
        raise PlanError(
            [Diagnostic("file-unwritable", f"{root / name} exists already", help=help_text) for name in found]
        )
    made: list[Path] = []
    try:
        for name, text in sorted(texts.items()):
            _make_folder((root / name).parent, made)
            made.append(root / name)
            (root / name).write_text(text, encoding="utf-8")
    except OSError as error:
        _remove(made)
        message = f"cannot write {error.filename or folder}: {error.strerror or error}"
        help_text = "name a folder that can be made and written to; nothing is left of what was begun"
        raise PlanError([Diagnostic("file-unwritable", message, help=help_text)]) from None
    except BaseException:
        _remove(made)
        raise
    return sorted(texts)


def _files() -> Iterator[tuple[str, str]]:
    """Paths below the new folder, with slashes, and texts."""
    for folder, prefix in ((ROOT / "commands/new/starter", ""), (ROOT / "training/recipes", "recipes/")):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in (".py", ".yaml", ".md"):
                yield prefix + path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
    yield "conf/train.yaml", _root((config_folder() / "train.yaml").read_text(encoding="utf-8"))


def _root(shipped: str) -> str:
    """The shipped root configuration, with the model of the copy."""
    return shipped.replace("  - model: llama_debug\n", f"  - model: {MODEL}\n")


def _make_folder(folder: Path, made: list[Path]) -> None:
    """The folder with its parents; those that were not there are added to `made`."""
    if not folder.is_dir():
        _make_folder(folder.parent, made)
        folder.mkdir()
        made.append(folder)


def _remove(made: list[Path]) -> None:
    for path in reversed(made):
        with suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
