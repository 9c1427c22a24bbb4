"""Builds the static site from the Markdown in docs/: `python docs/site.py [FOLDER]`, `site/` unless said.

The pages are read on GitHub too, where they lie. For the site they are copied into a folder of their own, with what
only a checkout has taken care of: links to files outside of docs/ become plain text (or lead to the page that holds
the same), and the package's own page on context parallelism joins them. Zensical does the rest, with `--strict`: a link or
an anchor that leads nowhere ends the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from api_pages import DIRECTIVE

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

FROM_ELSEWHERE = {"context_parallelism.md": ROOT / "parallelizer/styles/context_parallel/README.md"}
"""Pages whose text lies where its subject does."""

MADE = {*FROM_ELSEWHERE}
"""Pages of the site that are no files of docs/."""

COPIED = {".md", ".svg", ".png", ".css", ".js"}
"""What of docs/ belongs to the site."""

WORKER_ON_THE_WEB = "https://unpkg.com/iframe-worker/shim"

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^(?P<fence>```+).*?^(?P=fence)$", re.M | re.S)


def main(target: Path) -> int:
    """Build into `target`, which is replaced once the build has gone well. Returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        stage(project)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        said = re.sub(r"\x1b\[[\d;]*m", "", f"{done.stdout}{done.stderr}")  # without colours
        if done.returncode or "arning" in said:
            print(said, file=sys.stderr)
            return done.returncode or 1
        without_requests(project / "site")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(project / "site", target)
    print(f"{target}: {sum(1 for _ in target.rglob('*.html'))} pages")
    return 0


def stage(project: Path) -> None:
    """Make the folder `project` from which the site is built: `mkdocs.yml`, `pages` and `source`, the package."""
    pages = project / "pages"
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in COPIED:
            copy = pages / path.relative_to(DOCS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                copy.write_text(for_the_site(path.read_text(), path))
            else:
                shutil.copy(path, copy)
    for name, path in FROM_ELSEWHERE.items():
        (pages / name).write_text(for_the_site(path.read_text(), path))
    configuration = yaml.safe_load((DOCS / "mkdocs.yml").read_text())
    (project / "mkdocs.yml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    (project / "source").mkdir()
    (project / "source/parallelizer").symlink_to(ROOT / "parallelizer")


def without_requests(site: Path) -> None:
    """Let pages take `worker.js` of their own where the generator names a copy on the web."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        page.write_text(text.replace(WORKER_ON_THE_WEB, os.path.relpath(site / "worker.js", page.parent)))


def navigation() -> list[str]:
    """The pages that the navigation leads to, in its order."""
    return list(_files(yaml.safe_load((DOCS / "mkdocs.yml").read_text())["nav"]))


def _files(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from _files(child)


def for_the_site(text: str, path: Path) -> str:
    """The page's text with its links as the site needs them; code is left alone. What docs/api_pages.py has written gives way
    to what mkdocstrings makes of the same name.
    """
    text = DIRECTIVE.sub(lambda match: match["said"], text)

    def changed(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            return match[0]
        wanted = (path.parent / target).resolve()
        elsewhere = {source: DOCS / name for name, source in FROM_ELSEWHERE.items()}
        wanted = elsewhere.get(wanted, wanted)
        home = path.parent if path.is_relative_to(DOCS) else DOCS
        if not wanted.is_relative_to(DOCS) or wanted.suffix not in COPIED:
            text = match["text"]
            return text if "`" in text or " " in text else f"`{text}`"
        return f"[{match['text']}]({os.path.relpath(wanted, home)}{_anchor(match['anchor'] or '', wanted)})"

    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(changed, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(changed, text[at:])])


def _anchor(anchor: str, page: Path) -> str:
    """An anchor as the site has it: the heading of a public name, written by docs/api_pages.py, has the dotted name there."""
    names = re.findall(r"<!-- ::: (\S+)", page.read_text()) if anchor and page.suffix == ".md" else []
    return next((f"#{name}" for name in names if f"#{name.rpartition('.')[2].lower()}" == anchor), anchor)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")))
