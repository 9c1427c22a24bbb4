"""What is known of a diagnostic's code: data, read without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallelizer.diagnostics import Severity


@dataclass(frozen=True)
class Example:
    """The smallest thing that triggers a code.

    `plan` is the text of `plan.yaml`; without one the model's own plan stands. `overrides` are the command's,
    `files` lie beside the plan by path; a folder `conf` among them is given as `--config-dir`. `followed` says that
    only a followed step shows it, `traced` that only a traced one does, which `plan` makes and `validate` does
    not.

    What no file can trigger has a `command` that may instead, and the reason in `because`.
    """

    plan: str = ""
    overrides: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    followed: bool = False
    traced: bool = False
    command: str = ""
    because: str = ""

    @property
    def runs(self) -> bool:
        """Whether it can be run here and now, from files and overrides alone."""
        return not self.because

    @property
    def shown_command(self) -> str:
        """What a person types to see it."""
        if self.command:
            return self.command
        words = ["python -m parallelizer", "plan" if self.traced else "validate"]
        words += ["--config-dir conf"] if self.config_dir else []
        words += ["plan=plan.yaml"] if self.plan else []
        return " ".join([*words, *(quoted_word(override) for override in self.overrides)])

    @property
    def config_dir(self) -> str | None:
        """The folder of one's own configuration, if the example has one."""
        return "conf" if any(path.startswith("conf/") for path in self.files) else None

    @property
    def laid_out(self) -> dict[str, str]:
        """Every file by path, the plan first."""
        own = {"plan.yaml": self.plan} if self.plan else {}
        return {path: unindented(text) for path, text in {**own, **self.files}.items()}


@dataclass(frozen=True)
class Code:
    """A diagnostic's code. It never changes its name and its meaning.

    `summary` is one line, what is the case; `why` a paragraph: why that is a mistake, and what goes wrong
    otherwise. `severity` is what it has unless a place says otherwise.
    """

    name: str
    summary: str
    why: str
    example: Example
    severity: Severity = "error"

    @property
    def paragraph(self) -> str:
        """`why` on one line, for whoever wraps it."""
        return " ".join(self.why.split())


@dataclass(frozen=True)
class Family:
    """Codes that have to do with the same thing, in alphabetical order."""

    name: str
    about: str
    codes: tuple[Code, ...]


def unindented(text: str) -> str:
    """A text as it lies in a file: without the indentation it has in a source, with one newline at the end."""
    return textwrap.dedent(text).strip("\n") + "\n" if text.strip() else text


def quoted_word(text: str) -> str:
    """An override as a shell takes it."""
    return f"'{text}'" if any(c in text for c in ' []{}()*?$"&;|<>') else text
