"""The attacks in a process of their own, and what came of them in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.hostile.inputs import CONTROLS

ROOT = Path(__file__).resolve().parents[2]

Result = dict[str, Any]

MAX_SECONDS = 1.0


def probed(thorough: bool = True) -> list[Result]:
    """The results of the attacks. Raises RuntimeError when the probe does not notice what it should."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.hostile.probe", folder, *([] if thorough else ["--some"])],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    results: list[Result] = json.loads(ended.stdout)
    for control in CONTROLS:
        [result] = [result for result in results if result["name"] == control.name]
        if not any(control.code in what for what in result[control.name.removeprefix("control ")]):
            raise RuntimeError(f"the probe is blind: {result}")
    return [result for result in results if not result["name"].startswith("control ")]


def faults(result: Result) -> list[str]:
    """What an attack has brought about, or how it was answered wrongly."""
    found = [f"executed: {what}" for what in result["executed"]]
    found += [f"opened: {what}" for what in result["opened"]]
    found += [f"leaked: {what}" for what in result["leaked"]]
    if not result["refused"]:
        found.append(f"ended with {result['status']} and {result['codes']}")
    if result["seconds"] > MAX_SECONDS:
        found.append(f"took {result['seconds']:.2f} s")
    return found


def summary(results: list[Result]) -> tuple[str, bool]:
    """The figures, then every fault by name; and whether there is one."""

    def count(key: str) -> int:
        return sum(bool(result[key]) for result in results)

    slowest = max(results, key=lambda result: result["seconds"])
    lines = [
        f"{len(results)} hostile inputs: {count('executed')} executed anything, {count('opened')} opened another file, "
        f"{count('leaked')} leaked anything, {count('refused')} refused with the right code",
        f"slowest: {slowest['name']}, {slowest['seconds']:.2f} s of processor time",
    ]
    wrong = {result["name"]: faults(result) for result in results if faults(result)}
    lines += [f"  {name}: {'; '.join(found)}"[:600] for name, found in wrong.items()]
    return "\n".join(lines), bool(wrong)
