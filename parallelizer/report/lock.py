"""The lock file: what a plan comes to, as text that is committed and compared in review and in CI.

A section is a title in brackets; a line is a subject, a colon, and fields with their values. Paths are
folded, and nothing of the machine or the time is in it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.glob import GlobError, parse_glob
from parallelizer.report.figures import Change, Fields, Figures, FigureSubject, changes, folded
from parallelizer.report.rows.paths import ROOT

FIRST_LINE = "# parallelizer lock 1"
EXPLANATION = (
    "# What one rank holds, sends and needs: `plan ... --lock FILE` writes it, `--locked FILE` compares."
)
MAX_BYTES = 16 << 20
TITLES = {"parameters": 0, "collectives by module": 3}
"""The sections whose subjects end in a path, and the number of words before it."""
_VERSION = re.compile(r"# parallelizer lock \d+")
_ESCAPED = re.compile(r"\[(.)\]")


def write_lock(file: str | Path, figures: Figures) -> None:
    """Write a lock. The file holds the whole lock afterwards, or what it held before: PlanError is raised if
    it cannot be written."""
    path = Path(file)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text(figures))
            mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
            temporary.chmod(mode & 0o777)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PlanError(
            [
                Diagnostic(
                    "lock-not-written",
                    f"{file} cannot be written: {reason}",
                    None,
                    "name a file in a folder that you may write to",
                )
            ]
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def text(figures: Figures) -> str:
    """A lock as text."""
    lines = [FIRST_LINE, EXPLANATION, f"# torch {_torch()}"]
    for name, section in figures.items():
        lines += ["", f"[{name}]"]
        groups: dict[tuple[str, str], list[FigureSubject]] = {}
        for subject, fields in section.items():
            groups.setdefault((subject.title, _fields(fields)), []).append(subject)
        for (_, fields_text), subjects in groups.items():
            lines += [f"{line}: {fields_text}" for line in folded(subjects)]
    return "\n".join(lines) + "\n"


def _fields(fields: Fields) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _torch() -> str:
    """The version of torch that memory may depend on, without what differs by build."""
    return ".".join(torch.__version__.split(".")[:2])


def read_lock(file: str | Path) -> Figures:
    """The figures in a lock. Raises PlanError with one diagnostic when there is none, or it is no lock that
    this version reads."""
    return _parse(_read(file), str(file))


def _read(file: str | Path) -> list[str]:
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "there is no such file" if missing else error.strerror or type(error).__name__
        raise PlanError(
            [
                Diagnostic(
                    "lock-not-found" if missing else "lock-unreadable",
                    f"{file} cannot be read: {reason}",
                    None,
                    f"write it with --lock {file}" if missing else "name a file that --lock wrote",
                )
            ]
        ) from None
    try:
        lines = data.decode("utf-8").splitlines() if len(data) <= MAX_BYTES else []
    except UnicodeDecodeError:
        lines = []
    first = lines[0].strip() if lines else ""
    if first != FIRST_LINE:
        other = bool(_VERSION.fullmatch(first))
        message = (
            f"{file} was locked by another version of parallelizer"
            if other
            else f"{file} is no lock of parallelizer"
        )
        raise PlanError(
            [
                Diagnostic(
                    "lock-unreadable",
                    message,
                    Span(str(file), 1, 1, len(first) + 1) if other else None,
                    f"write it again with --lock {file}" if other else "name a file that --lock wrote",
                )
            ]
        )
    return lines


def _parse(lines: Sequence[str], file: str) -> Figures:
    sections: dict[str, dict[FigureSubject, Fields]] = {}
    section: dict[FigureSubject, Fields] | None = None
    name = ""
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
            section = sections.setdefault(name, {})
            continue
        subjects, colon, rest = line.rpartition(": ")
        fields = dict(part.partition(" ")[::2] for part in rest.split(", "))
        if section is None or not colon or not all(fields.values()):
            raise _malformed(file, number, line)
        try:
            section.update((subject, fields) for subject in _subjects(subjects, TITLES.get(name)))
        except GlobError:
            raise _malformed(file, number, line) from None
    return sections


def _malformed(file: str, number: int, line: str) -> PlanError:
    return PlanError(
        [
            Diagnostic(
                "lock-unreadable",
                "this line of the lock cannot be read",
                Span(file, number, 1, len(line) + 1),
                f"write it again with --lock {file}",
            )
        ]
    )


def _subjects(written: str, words: int | None) -> Iterator[FigureSubject]:
    if words is None:
        yield FigureSubject(written)
        return
    *title, glob = written.split(" ", words)
    if glob == ROOT:
        yield FigureSubject(" ".join(title), "")
        return
    for path in parse_glob(glob).alternatives:
        yield FigureSubject(" ".join(title), _ESCAPED.sub(r"\1", path))


def differences(locked: Figures, now: Figures) -> list[str]:
    """What is different from the lock, in words, a line each; nothing when it holds."""
    return [line for change in changes(locked, now) for line in _words(change)]


def _words(change: Change) -> Iterator[str]:
    for subject in change.subjects:
        what = f"{change.section}: {subject}"
        if change.before is None:
            yield f"{what}: new ({_readable(change.after or {})})"
        elif change.after is None:
            yield f"{what}: gone ({_readable(change.before)})"
        else:
            names = dict.fromkeys([*change.before, *change.after])
            yield f"{what}: {'; '.join(_field(n, change.before.get(n), change.after.get(n)) for n in names)}"


def _field(name: str, before: str | None, after: str | None) -> str:
    return f"{name} {number(after)}, locked {number(before)}"


def _readable(fields: Fields) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in fields.items())


def number(value: str | None) -> str:
    """A value as people read it: thousands apart, `none` where there is none."""
    if value is None:
        return "none"
    return f"{int(value):,}" if value.isdigit() else value


def check_lock(file: str | Path, now: Figures) -> list[str]:
    """What is different from the lock in `file`, in words. Raises PlanError as `read_lock` does."""
    return differences(read_lock(file), now)


def report(file: str | Path, found: Iterable[str]) -> str:
    """Differences as text for people, with the version of torch that the lock was written with if it was
    another."""
    lines = [f"not as locked in {file}:", *(f"  {line}" for line in found)]
    written = next((line.split()[-1] for line in _read(file)[:3] if line.startswith("# torch ")), None)
    if written != _torch():
        lines.append(f"  (locked with torch {written}, this is {_torch()})")
    return "\n".join([*lines, f"if this is meant, write it again with --lock {file}"])
