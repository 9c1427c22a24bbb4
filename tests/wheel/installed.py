"""The wheel, built from this checkout and installed into an environment of its own, and commands that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """`wheel` is the file, `python` the environment's interpreter; commands lie beside it."""

    wheel: Path
    python: Path

    def run(self, *words: str, cwd: Path, timeout: float = 180.0, **variables: str) -> tuple[int, str]:
        """`parallelizer ...` or `python ...` in the folder, knowing nothing of the checkout: exit status, and all output."""
        program = self.python.with_name(words[0])
        done = subprocess.run(
            [program, *words[1:]],
            cwd=cwd,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables of a person's shell in which the environment is active."""
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
        path = os.pathsep.join([str(self.python.parent), *os.environ["PATH"].split(os.pathsep)])
        return {**kept, "PATH": path, "COLUMNS": "100", **variables}


def build(folder: Path, *, isolated: bool = False) -> Path:
    """The wheel, from a copy of what git does not ignore, so that no build before gets into it, and none is left. `isolated`:
    in an environment that pip makes for the build, from a package index.
    """
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, folder / "source" / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    how = [] if isolated else ["--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *how, "--wheel-dir", folder]
    subprocess.run([*pip, folder / "source"], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Installed:
    """A fresh environment with the wheel in it; what the wheel depends on is lent by the environment of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], env=without_path(), check=True, capture_output=True)
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    # A line of a .pth file is a folder behind the others; .pth files in that one (our editable install) do not count.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, python)


def without_path() -> dict[str, str]:
    """This process's variables without PYTHONPATH: a checkout on it is, for pip, the package installed already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
