"""Models as their authors write them, word for word: files beside this one, which a test writes under the author's name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup

FILES = Path(__file__).parent / "as_written"
SIZES = ["train.batch_size=8", "train.seq_len=64"]


@contextmanager
def written(name: str, folder: Path) -> Iterator[None]:
    """The model file `name` and its model config in `folder`, importable."""
    (folder / f"{name}.py").write_text((FILES / f"{name}.txt").read_text())
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / f"{name}.yaml").write_text((FILES / f"{name}.yaml").read_text())
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def setup_of(name: str, folder: Path, *more: str) -> Setup:
    """Its configuration, with a plan that shards nothing."""
    plan = folder / "plan.yaml"
    plan.write_text('rules: {"": fsdp}\n')
    return from_config(*compose_config([f"model={name}", f"plan={plan}", *SIZES, *more], str(folder)))
