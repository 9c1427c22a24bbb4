"""The keys of a run stand in one table: the shipped configuration and docs/settings.md say what it says.

After a change that is meant:  python -m tests.docs.test_settings
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallelizer.training import settings
from parallelizer.training.keys import Key
from parallelizer.training.sampling import settings as sampling_settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "settings.md"
SAMPLING = sampling_settings.KEYS
FILES: tuple[tuple[str, str, Sequence[Key]], ...] = (
    ("configs/train.yaml", "", [k for k in settings.KEYS if k.section != "optim"]),
    ("configs/optim/adamw.yaml", "optim", [k for k in settings.KEYS if k.section == "optim"]),
    ("configs/generate.yaml", "", SAMPLING),
)


def comments(text: str, section: str) -> Iterator[tuple[str, str]]:
    """The keys of a shipped file with the comments behind their values, in their order."""
    for line in text.splitlines():
        below, name, rest = re.fullmatch(r"( *)(?:([a-z_]+):)?(.*)", line).groups()  # type: ignore[union-attr]
        if name and not rest.strip():
            section = name
        elif name:
            section = section if below or section == "optim" else ""
            value = re.sub(r'"[^"]*"', "", rest)
            yield (
                f"{section}.{name}" if section else name,
                value.partition("# ")[2] and rest.partition("# ")[2],
            )


def value(config: Mapping[str, Any], key: Key, section: str) -> Any:
    """What a file has for a key."""
    for name in key.name.removeprefix(f"{section}." if section else "").split("."):
        config = config[name]
    return config


@pytest.mark.parametrize(("file", "section", "keys"), FILES)
def test_the_shipped_configuration_has_the_table_s_defaults_and_words(
    file: str, section: str, keys: Sequence[Key]
) -> None:
    text = (ROOT / file).read_text()
    config, said = yaml.safe_load(text), dict(comments(text, section))
    for key in keys:
        found = value(config, key, section)
        assert (tuple(found) if isinstance(key.default, tuple) else found) == key.default, key.name
        assert said[key.name] == key.words, key.name


def test_the_page_is_written_from_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.docs.test_settings writes it"


INTRODUCTION = """# The keys of a run

What `python -m recipes.train` and `python -m recipes.generate` read of the configuration, beside the groups `model`, `parallel`,
`data` and `hardware`. Set a key on the command line (`train.steps=100`), or in a root configuration of your own. A wrong value
and a misspelt key are errors before a rank starts; `parallelizer validate` finds them too.

This page is written from the table in `parallelizer/training/settings.py`, from which the recipe reads them.
"""


def page() -> str:
    """docs/settings.md."""
    order = [name for file, section, _ in FILES for name, _ in comments((ROOT / file).read_text(), section)]
    keys = sorted(settings.KEYS, key=lambda key: order.index(key.name))
    parts = [
        INTRODUCTION,
        "## The root\n", *_table(k for k in keys if not k.section),
        "## `train`\n", *_table(k for k in keys if k.section == "train"),
        "## `launch`\n", *_table(k for k in keys if k.section == "launch"),
        "## `optim`\n\nThose of the shipped optimizer, `optim=adamw`.\n", *_table(k for k in keys if k.section == "optim"),
        "## Sampling\n\nThe keys of `python -m recipes.generate`, beside those above: [text from a checkpoint](generate.md).\n",
        *_table(SAMPLING),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def _table(keys: Any) -> Iterator[str]:
    yield "| key | default | takes | |"
    yield "|---|---|---|---|"
    for key in keys:
        words = key.words.replace("<", "&lt;")
        yield f"| `{key.name}` | {_shown(key.default)} | {key.takes.words} | {words} |"
    yield ""


def _shown(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return f"`{str(default).lower().replace('none', 'null')}`"
    if isinstance(default, tuple | list):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{default}`" if default != "" else '`""`'


if __name__ == "__main__":
    PAGE.write_text(page())
