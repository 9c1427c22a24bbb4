"""Writes signatures and docstrings into docs/api/: `python docs/api_pages.py`. So the pages can be read where no site is built.

A name stands in a comment, `<!-- ::: parallelizer.apply -->`, with the options of mkdocstrings below it; what follows, up to
`<!-- end -->`, is written here. For the site docs/site.py takes the comment's content instead.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

API = Path(__file__).resolve().parent / "api"

DIRECTIVE = re.compile(r"<!-- (?P<said>::: (?P<name>[\w.]+)\n?(?P<options>.*?)) -->\n.*?<!-- end -->", re.S)


def written(text: str) -> str:
    """The page with every name's signature and docstring as they are now."""

    def made(match: re.Match[str]) -> str:
        options = (yaml.safe_load(match["options"]) or {}).get("options", {})
        body = "\n\n".join(_told(match["name"], options))
        return f"<!-- {match['said']} -->\n{body}\n<!-- end -->"

    return DIRECTIVE.sub(made, text)


def _told(path: str, options: dict[str, Any]) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    level = options.get("heading_level", 2)
    yield f"{'#' * level} {name}"
    yield from _of(name, found)
    if inspect.isclass(found):
        members = options.get("members") or [] if "members" in options else _public(found)
        for member in members:
            one = inspect.getattr_static(found, member, None)
            one = one.__func__ if isinstance(one, classmethod | staticmethod) else one
            if inspect.isfunction(one) or isinstance(one, property):
                yield f"{'#' * (level + 1)} {name}.{member}"
                yield from _of(member, one.fget if isinstance(one, property) else one)


def _public(found: type) -> list[str]:
    return [
        n
        for n, v in vars(found).items()
        if n[0] != "_" and (callable(v) or isinstance(v, property | classmethod))
    ]


def _of(name: str, found: Any) -> Iterator[str]:
    if callable(found):
        try:
            given = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(found)))
        except (TypeError, ValueError):
            given = "(...)"
        if inspect.isclass(found):
            given = given.removesuffix(" -> None")
        yield f"```text\n{name}{given}\n```"
        yield inspect.getdoc(found) or ""
    else:
        yield f"```text\n{name} = {found!r}\n```"


def main() -> None:
    for page in sorted(API.glob("*.md")):
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
