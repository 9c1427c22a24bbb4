"""What `validate` and `verify` say of a case, asked as a user asks them: by a configuration folder."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import Diagnostic, has_errors
from parallelizer.report.text.proof import text
from tests.silent.case import Case


@dataclass(frozen=True)
class Answer:
    """Whether a command accepts a case, and what it says if not."""

    accepted: bool
    said: str = ""


@contextmanager
def configured(case: Case) -> Iterator[pz.Setup | Answer]:
    """The setup of a folder with the model's configuration and the plan, or why there is none."""
    model = case.model
    keys = {
        "_target_": model.target, **model.arguments, "plan": "mine", "batch": model.entries, "loss": case.loss,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "plans").mkdir()
        (folder / "model" / "mine.yaml").write_text(json.dumps(keys))
        (folder / "plans" / "mine.yaml").write_text(case.plan)
        overrides = [
            "model=mine", f"parallel={case.preset}", "device=cpu", f"train.batch_size={model.rows}",
            f"train.seq_len={model.length}",
        ]  # fmt: skip
        try:
            setup = pz.from_overrides(overrides, config_dir=name)
        except pz.PlanError as error:
            yield Answer(False, _said(error.diagnostics))
            return
        yield setup


def static(setup: pz.Setup | Answer) -> Answer:
    """What `validate` finds without the proof: what it knows of the model API and of setups whose proof takes too long."""
    if isinstance(setup, Answer):
        return setup
    found = pz.validate(setup, prove=False)
    return Answer(not has_errors(found), _said(found))


def validate(setup: pz.Setup | Answer) -> Answer:
    """What the command `validate` finds."""
    if isinstance(setup, Answer):
        return setup
    found = pz.validate(setup)
    return Answer(not has_errors(found), _said(found))


def verify(setup: pz.Setup | Answer) -> Answer:
    """What the command `verify --force` finds: what the proof itself says, also of a plan that is refused."""
    if isinstance(setup, Answer):
        return setup
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            proof = pz.verify(setup, force=True)
    except pz.PlanError as error:
        return Answer(False, _said(error.diagnostics))
    except Exception as error:
        return Answer(False, f"{type(error).__name__}: {_last_line(str(error))}"[:400])
    return Answer(proof.passed, "" if proof.passed else _short(text(proof)))


def _said(found: Iterable[Diagnostic]) -> str:
    return "; ".join(f"{d.code}: {d.message}" for d in found if d.severity == "error")[:600]


def _last_line(message: str) -> str:
    """What a traceback ends with, which names the error."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _short(report: str) -> str:
    lines = [line for line in report.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.startswith("first")), len(lines) - 5)
    return " ".join(lines[start:])[:600]
