"""Nothing asks for a GPU before a run is told to use one: an import must not start CUDA in a process that may fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.recipes.runs import ROOT

REFUSED = """
import sys, torch

def refuse(name):
    def refused(*arguments, **more):
        raise SystemExit(f"torch.{name} was called at import")
    return refused

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "set_device",
             "get_device_name", "get_device_capability", "get_device_properties", "mem_get_info"):
    setattr(torch.cuda, name, refuse(f"cuda.{name}"))
torch.accelerator.is_available = refuse("accelerator.is_available")
torch.accelerator.current_accelerator = refuse("accelerator.current_accelerator")
"""

# Every module of ours but the one that stands on Trainer: transformers' asks when it is imported.
EVERYTHING = """
import importlib, pkgutil
import parallelizer, recipes
for package in (parallelizer, recipes):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "hugging_face.trainer")):
            importlib.import_module(module.name)
print("imported", len([name for name in sys.modules if name.startswith(("parallelizer", "recipes"))]))
"""


def imported(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", REFUSED + text], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_no_module_of_ours_asks_for_a_gpu_when_it_is_imported() -> None:
    pytest.importorskip("transformers")
    ended = imported(EVERYTHING)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > 200


def test_a_module_that_did_would_be_found() -> None:
    ended = imported("torch.cuda.is_available()")
    assert ended.returncode == 1
    assert ended.stderr.strip() == "torch.cuda.is_available was called at import"
