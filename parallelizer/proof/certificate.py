"""What a proof leaves behind: a small file that says what was proven, and is found again as long as nothing has changed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from torch import nn

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.fingerprint import PARTS, fingerprint, parts_of
from parallelizer.proof.proof import Proof

FOLDER = Path(".parallelizer/proofs")
"""Where certificates lie, in the directory that a command runs in."""

SHORT = 12
"""Digits of a fingerprint that a message shows and that a file is named by."""

FORMAT = 1


@dataclass(frozen=True)
class Certificate:
    """A proof that passed. `parts` are the digests of what it depends on, `mesh` is what it was asked for and `ran` what
    it ran on. `worst` is the largest error as a share of its bound, of the parameter `of`. `changes` says how the run was
    made small; `date` is UTC, ISO 8601.
    """

    parts: Mapping[str, str]
    plan: str
    model: str
    mesh: Mapping[str, int]
    ran: Mapping[str, int]
    worst: float
    of: str
    losses: tuple[float, float]
    date: str
    changes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of what the proof depends on."""
        return fingerprint(self.parts)

    @property
    def name(self) -> str:
        """The fingerprint as messages show it."""
        return self.fingerprint[:SHORT]


@dataclass(frozen=True)
class Found:
    """What is known of a setup: its certificate, or None, and then in `changed` which parts differ from the newest
    certificate of the same plan, model and axes, in words.
    """

    parts: Mapping[str, str]
    certificate: Certificate | None = None
    changed: tuple[str, ...] = ()
    before: Certificate | None = field(default=None, compare=False)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of what a proof of the setup depends on."""
        return fingerprint(self.parts)


def certificate_of(proof: Proof, setup: Setup, parts: Mapping[str, str]) -> Certificate:
    """The certificate of a proof of `setup` that passed; `parts` are what it depends on. Raises ValueError for any other."""
    if not proof.is_verdict or not proof.passed:
        raise ValueError("only a proof that passed has a certificate")
    worst = max(proof.verdict.differences, key=lambda d: d.share)
    return Certificate(
        parts=parts,
        plan=setup.plan.name,
        model=str(setup.model.get("_target_")),
        mesh={axis: size for axis, size in setup.mesh.every.items() if size > 1},
        ran={axis: size for axis, size in proof.mesh.every.items() if size > 1},
        worst=float(worst.share),
        of=worst.name,
        losses=proof.losses,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        changes=proof.changes,
    )


def write(certificate: Certificate, folder: Path = FOLDER) -> Path:
    """Write a certificate and return its file, which is whole or not there. Raises PlanError where it cannot be written."""
    file = folder / f"{certificate.name}.json"
    document = {"format": FORMAT, "fingerprint": certificate.fingerprint, **asdict(certificate)}
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{file.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)
            stream.write("\n")
        temporary.replace(file)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        message = f"the certificate {file} cannot be written: {error.strerror or type(error).__name__}"
        help_text = "name a folder that you may write to: --proofs FOLDER"
        raise PlanError([Diagnostic("certificate-not-written", message, None, help_text)]) from None
    return file


def find(setup: Setup, model: nn.Module, folder: Path = FOLDER) -> Found:
    """The certificate of a setup in a folder. A file that cannot be read, or that another version wrote, is none."""
    parts = parts_of(setup, model)
    asked = fingerprint(parts)
    related = []
    for one in _all(folder):
        if one.fingerprint == asked:
            return Found(parts, one)
        same = one.plan == setup.plan.name and one.model == str(setup.model.get("_target_"))
        if same and one.parts.get("axes") == parts["axes"]:
            related.append(one)
    if not related:
        return Found(parts)
    last = max(related, key=lambda one: one.date)
    changed = tuple(PARTS[name] for name in PARTS if last.parts.get(name) != parts[name])
    return Found(parts, None, changed, last)


def _all(folder: Path) -> Iterator[Certificate]:
    for file in sorted(folder.glob("*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if document.pop("format") != FORMAT:
                continue
            claimed = document.pop("fingerprint")
            document.update(losses=tuple(document["losses"]), changes=tuple(document["changes"]))
            one = Certificate(**document)
            if one.fingerprint == claimed:
                yield one
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue


def told(found: Found) -> str:
    """What is known of a setup, in a line."""
    if (one := found.certificate) is not None:
        return f"proven on {one.date[:10]} (certificate {one.name}, worst error {one.worst:.2f} of its bound)"
    if found.before is not None:
        return f"not proven since {' and '.join(found.changed)} changed ({found.before.date[:10]})"
    return "not proven"


def missing(found: Found) -> Diagnostic:
    """The finding that a run has no certificate where one is demanded."""
    return Diagnostic(
        "not-proven",
        "this run has no certificate" + (f": it is {told(found)}" if found.before is not None else ""),
        None,
        "prove it: `python -m parallelizer verify` with the same overrides writes the certificate",
    )
