"""Runs the attacks in this process, records what Python does meanwhile, and prints it as JSON.

    python -m tests.hostile.probe FOLDER

An audit hook stays for as long as the process lives, so this is a process of its own. Python's own machinery
is loaded before by harmless commands; whatever is opened, imported or run after that is an attack's doing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hydra

from parallelizer.commands.main import main
from tests.hostile.inputs import CONTROLS, SECRET, Attack, attacks, prepare

EXECUTING = (
    "exec",
    "compile",
    "import",
    "code.__new__",
    "marshal.loads",
    "pickle.find_class",
    "ctypes.dlopen",
)
EXECUTING += ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile")
EXECUTING += (
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.__new__",
    "pty.spawn",
)
EXECUTING += (
    "urllib.Request",
    "webbrowser.open",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.chmod",
    "os.link",
    "os.symlink",
)
EXECUTING += (
    "os.truncate",
    "os.putenv",
    "os.unsetenv",
    "os.kill",
    "shutil.rmtree",
    "sys.setprofile",
    "cpython.run_command",
)
"""What nobody who reads a plan has reason to do."""

HARMLESS_VARIABLES = (
    "COLUMNS", "LINES", "LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG", "OC_CAUSE", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip
"""Read for the width of the terminal, by argparse for the language of its messages, by OmegaConf for how much of an error it
shows, and by the commands themselves, which set how torch looks for GPUs."""

HYDRA = Path(hydra.__file__).parent / "conf"
"""Hydra's own configuration files."""

events: list[tuple[str, str]] = []
"""What has happened since the recording began: the event, and what it was about."""
recording = False


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Record one of Python's audit events."""
    if not recording:
        return
    if event == "open":
        if not isinstance(arguments[0], int):  # a number is a file that is open already
            events.append(("open", os.path.abspath(os.fsdecode(arguments[0]))))
    elif event in EXECUTING:
        events.append((event, repr(arguments[0])[:200] if arguments else ""))


class RecordedEnvironment(type(os.environ)):  # type: ignore[misc]
    """`os.environ`, which also records what is read from it."""

    def __getitem__(self, key: str) -> str:
        if recording and key not in HARMLESS_VARIABLES:
            events.append(("environment", str(key)))
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Any:
        if recording:
            events.append(("environment", "all of it"))
        return super().__iter__()


def run(words: tuple[str, ...], *more: str) -> tuple[int | None, str, float]:
    """Run `validate`. Returns its status, all that it prints, and its processor time."""
    out, err, status = io.StringIO(), io.StringIO(), None
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["validate", "--no-proof", *more, *words])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else None
    except Exception as error:
        err.write(f"Traceback: {error!r}")
    return status, out.getvalue() + err.getvalue(), time.process_time() - began


def attack(one: Attack, configs: Path, thorough: bool) -> dict[str, Any]:
    """What one attack has brought about; empty lists where it has failed. `thorough`, a configuration is
    checked in full and not quickly, which takes torch.
    """
    global recording
    events.clear()
    recording = True
    quickly = [] if thorough or one.words[0] == "--quick" else ["--quick"]
    status, document, seconds = run(one.words, "--json", *quickly)
    again, text = status, ""
    if one.words[0] == "--quick":  # printed for people too, with the lines that are wrong
        again, text, _ = run(one.words)
    recording = False
    opened = [
        what for event, what in dict.fromkeys(events) if event == "open" and not _may_open(what, one, configs)
    ]
    executed = [
        f"{event} {what}" for event, what in dict.fromkeys(events) if event not in ("open", "environment")
    ]
    if os.path.exists("EXECUTED"):
        executed.append("the canary ran")
        os.remove("EXECUTED")
    leaked = [f"the variable {what}" for event, what in dict.fromkeys(events) if event == "environment"]
    leaked += [line for line in (document + text).splitlines() if SECRET in line or "root:" in line]
    try:
        codes = [found["code"] for found in json.loads(document)["diagnostics"]]
    except ValueError:
        codes = [document[-300:]]
    return {
        "name": one.name,
        "refused": status == again == 1 and one.code in codes,
        "codes": codes,
        "status": status,
        "executed": executed,
        "opened": opened,
        "leaked": leaked,
        "seconds": seconds,
    }


def _may_open(path: str, one: Attack, configs: Path) -> bool:
    """Whether a file is one of those that the command reads: the attack's own, and for a configuration the
    shipped ones, Hydra's, and those of the folder that `--config-dir` names.
    """
    if path in {os.path.abspath(name) for name in one.files}:
        return True
    folders = [] if one.words[0] == "--quick" else [configs, HYDRA]
    if "--config-dir" in one.words:
        folders.append(Path.cwd())
    return not os.path.islink(path) and any(Path(path).is_relative_to(folder) for folder in folders)


def warm_up(thorough: bool) -> None:
    """Load everything that reading and printing need, with plans that are good and bad in harmless ways."""
    Path("good.yaml").write_text("extends: llama\nrules: {layers.*: checkpoint}\n")
    Path("bad.yaml").write_text("extends: lama\nrules: {layers.*: fdsp, a: {b: \n")
    for words in (
        ("--quick", "good.yaml"),
        ("--quick", "./bad.yaml"),
        *([("plan=./bad.yaml",)] if thorough else []),
        (
            "--quick",
            "plan=./good.yaml",
            "--config-dir",
            ".",
            "parallel=tp2",
            "rules=['a: fsdp']",
            "++parallel.layouts.a=${x}",
        ),
        ("--quick", "rules=['a: b c d: e', 3]", "imports=[]"),
        ("--quick", "a=[b"),
        ("--quick", "parallel=tp22"),
    ):
        run(words)
        run(words, "--json")
    Path("good.yaml").unlink()
    Path("bad.yaml").unlink()


def probe(folder: Path, thorough: bool) -> list[dict[str, Any]]:
    """Run the attacks; the working directory is changed."""
    os.environ["CANARY"] = SECRET
    os.environ["CANARY_FILE"] = "../secret.yaml"
    os.environ["HOME"] = f"/home/{SECRET}"
    work = prepare(folder)
    os.chdir(work)
    from parallelizer.diagnostics.package_folder import config_folder

    warm_up(thorough)
    os.environ.__class__ = RecordedEnvironment
    sys.addaudithook(hook)
    return [attack(one, config_folder(), thorough) for one in (*attacks(thorough), *CONTROLS)]


if __name__ == "__main__":
    json.dump(probe(Path(sys.argv[1]), "--some" not in sys.argv), sys.stdout)
