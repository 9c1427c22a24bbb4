"""Hostile inputs: the files of `tests/plans/hostile/`, and what no repository can hold: links, pipes, devices."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).resolve().parents[1] / "plans" / "hostile"

SECRET = "hunter2-5f0c9e"
"""Stands in every file and variable that must not be read, and in nothing else."""


@dataclass(frozen=True)
class Attack:
    """Words of a command line, and the code that the answer must have; `files` may be opened."""

    name: str
    words: tuple[str, ...]
    code: str
    files: tuple[str, ...] = ()


def prepare(folder: Path) -> Path:
    """Copy the files into a folder with secrets around it. Returns the working directory."""
    work = folder / "work"
    shutil.copytree(FILES, work)
    for name in ("secret.txt", "secret.yaml"):
        (folder / name).write_text(f"rules:\n  {SECRET}: {SECRET}\n")
    (work / "link_to_text.yaml").symlink_to("../secret.txt")
    (work / "link_to_yaml.yaml").symlink_to("../secret.yaml")
    (work / "link_to_environ.yaml").symlink_to("/proc/self/environ")
    (work / "link_to_nothing.yaml").symlink_to("nowhere.yaml")
    (work / "link_to_itself.yaml").symlink_to("link_to_itself.yaml")
    (work / "linked_folder").symlink_to("..")
    (work / "folder.yaml").mkdir()
    os.mkfifo(work / "fifo.yaml")
    (work / "huge.yaml").write_bytes(b"rules: {a: fsdp}\n" + b"#" * 50_000_000)
    (work / "evil.py").write_text("open('EXECUTED', 'w').close()\n\ndef run(*_, **__):\n    pass\n")
    return work


def attacks(thorough: bool = True) -> list[Attack]:
    """Every attack, each file as a plan of its own and in a configuration, which takes fifty times as long;
    not `thorough`, only some of the files are tried there too.
    """
    found = []
    for number, path in enumerate(sorted(FILES.glob("*.yaml"))):
        code, plan = _code(path), f"./{path.name}"
        found.append(Attack(path.stem, ("--quick", plan), code, (plan,)))
        if thorough or number % 6 == 0:
            found.append(Attack(f"{path.stem}, configured", (f"plan={plan}",), code, (plan,)))
    for path in sorted((FILES / "parallel").glob("*.yaml")):
        words = ("--config-dir", ".", f"parallel={path.stem}")
        found.append(Attack(f"preset {path.stem}", words, _code(path)))
    for name, code in (
        ("./link_to_text.yaml", "file-unreadable"),
        ("./link_to_environ.yaml", "file-unreadable"),
        ("./link_to_nothing.yaml", "plan-not-found"),
        ("./link_to_itself.yaml", "plan-not-found"),
        ("./folder.yaml", "plan-not-found"),
        ("./fifo.yaml", "plan-not-found"),
        ("/dev/zero", "plan-not-found"),
        ("/dev/stdin", "plan-not-found"),
        ("./huge.yaml", "yaml-limit"),
        ("./" + "a" * 5000 + ".yaml", "plan-not-found"),
        ("~/secret.yaml", "plan-not-found"),
    ):
        opened = (name,) if name == "./huge.yaml" else ()
        found.append(Attack(f"path {name[:40]}", ("--quick", name), code, opened))
        if thorough or "fifo" in name or "environ" in name:
            found.append(Attack(f"path {name[:40]}, configured", (f"plan='{name}'",), code, opened))
    for index, (word, code) in enumerate(
        (
            ("rules=['a: ${oc.env:CANARY}']", "interpolation"),
            ("rules=[\"a: !!python/object/apply:os.system ['touch EXECUTED']\"]", "yaml-tag"),
            ("rules=['{0.__class__}: fsdp']", "unquoted-glob"),
            ("rules=['layers.{0..999999999}: fsdp']", "bad-glob"),
            ("rules=" + "[" * 500 + "]" * 500, "yaml-limit"),
            ("rules=['" + "a" * 100_000 + ": fsdp']", "yaml-limit"),
            ("rules=['a: {b: &b [x], c: [*b, *b]}']", "unquoted-glob"),
            ("rules=[{a: {style: fsdp, _target_: evil.run}}]", "not-data"),
            ("++parallel.layouts.a='{0.__class__}'", "unknown-placement"),
        )
    ):
        found.append(Attack(f"override {index}: {word[:40]!r}", (word,), code))
    return found


CONTROLS = (
    Attack("control executed", ("--quick", "imports=[evil]"), "the canary ran"),
    Attack("control opened", ("--quick", "../secret.yaml"), "secret.yaml"),
    Attack("control leaked", ("--quick", "++parallel.layouts.a=${oc.env:CANARY}"), "the variable CANARY"),
)
"""What the configuration may do and a plan may not. Each must be noticed, as what stands in place of a code, or
the probe is blind.
"""


def _code(path: Path) -> str:
    """The code that the file says it is refused with."""
    first = path.read_bytes()[:200].replace(b"\0", b"").decode(errors="ignore")
    match = re.search(r"refused: ([a-z-]+)", first)
    if match is None:
        raise ValueError(f"{path} does not say what it is refused with")
    return match[1]
