"""The text of one diagnostic code: a section of a Markdown file, in a form that is the same for all.

    ## a-code

    *error, family*: one line that says what is wrong

    One or more paragraphs that say why it is a mistake.

    `plan.yaml`:

    ```yaml
    the smallest input that triggers the code; other files follow in the same way
    ```

    ```console
    $ python -m parallelizer validate plan=plan.yaml
    error[a-code]: what the command prints of this code
    ```

    **Fix:** what to do.

A code that is reported in several severities names all of them, the usual one first: `*error or warning, family*`.
Where no files can trigger a code, a paragraph `No file triggers it: REASON.` stands before the command, and nothing
is printed below it. Between two lines of a file that differ in one number, `# ...` stands for all lines between them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, cast, get_args

from parallelizer.diagnostics.diagnostic import Severity

REASON = "No file triggers it: "
FIX = "**Fix:** "

_BLOCK = re.compile(r"```(?P<language>\w+)\n(?P<fenced>(?:(?!```).*\n)*)```\n|(?P<prose>(?:(?!```).+\n)+)|\n")
_NAME = re.compile(r"## ([a-z]+(?:-[a-z]+)*)")
_HEAD = re.compile(r"\*(?P<severities>[a-z]+(?: or [a-z]+)*), (?P<family>[a-z ]+)\*: (?P<summary>.+)")
_LABEL = re.compile(r"`([\w./]+)`:")
_ELIDED = re.compile(
    r"(?P<head>.*?)(?P<first>\d+)(?P<tail>.*)\n *# \.\.\.\n(?P=head)(?P<last>\d+)(?P=tail)\n"
)
_LANGUAGES = {"yaml": "yaml", "py": "python", "csv": "csv", "json": "json"}


class MalformedSection(ValueError):
    """A section does not have this form; the message begins with its file and line."""


@dataclass(frozen=True)
class Example:
    """The smallest input that triggers a code.

    `files` holds texts by path. `command` is what a person types, and `output` what it prints of the code. Where no files
    can trigger it, `because` says why, and `output` is empty.
    """

    command: str
    output: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    because: str = ""

    @property
    def runs(self) -> bool:
        """Whether a test can run it from its files and its command."""
        return not self.because

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command, behind `python -m parallelizer validate --config-dir conf`."""
        return self._words[2:] if self.config_dir else self._words

    @property
    def config_dir(self) -> str | None:
        """The folder of configuration files that the command is given, if it is given one."""
        words = self._words
        return words[1] if words[:1] == ["--config-dir"] else None

    @property
    def _words(self) -> list[str]:
        return shlex.split(self.command)[4:]

    @property
    def written_out(self) -> dict[str, str]:
        """The files with every line that `# ...` stands for."""
        return {path: _ELIDED.sub(_every_line, text) for path, text in self.files.items()}


@dataclass(frozen=True)
class Code:
    """A diagnostic code. Its name and its meaning never change.

    `why` holds paragraphs, each on one line. `text` is the section itself, which begins at `line` of `file`.
    """

    name: str
    family: str
    severities: tuple[Severity, ...]
    summary: str
    why: tuple[str, ...]
    example: Example
    fix: str
    text: str
    file: str
    line: int

    @property
    def severity(self) -> Severity:
        """The usual severity: the one that the example has."""
        return self.severities[0]


def read_sections(text: str, file: str) -> Iterator[Code]:
    """The codes of one Markdown file, which holds sections and nothing else. Raises MalformedSection."""
    reader = _Reader(text, file)
    yield reader.section()
    while reader.next.text:
        yield reader.section()


@dataclass(frozen=True)
class _Block:
    """A paragraph, on one line, or the text of a fenced block, which has a language. It begins at the offset `start`."""

    text: str
    language: str
    start: int


class _Reader:
    """Takes a file apart, block by block; `next` is the block that comes next, without a text at the end of the file."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.blocks = self._blocks()
        self.next = next(self.blocks)

    def section(self) -> Code:
        start = self.next.start
        name = self._match(_NAME, "a section begins with `## code`")[1]
        head_at = self.next.start
        head = self._match(_HEAD, "the next line is `*severity, family*: summary`")
        severities = head["severities"].split(" or ")
        if unknown := set(severities) - set(get_args(Severity)):
            self._refuse(f"there is no severity `{unknown.pop()}`", head_at)
        why = []
        while self._is_prose():
            why.append(self._take(True, "").text)
        if not why:
            self._refuse("a paragraph comes next that says why it is a mistake")
        example = self._example()
        fix = self._take(self._begins(FIX), f"a paragraph comes next that begins with `{FIX.strip()}`").text
        if self.next.text and not self._begins("## "):
            self._refuse("a section ends with its fix")
        own = self.text[start : self.next.start].strip() + "\n"
        line = self._line(start)
        return Code(
            name, head["family"], cast("tuple[Severity, ...]", tuple(severities)), head["summary"], tuple(why), example,
            fix.removeprefix(FIX), own, self.file, line,
        )  # fmt: skip

    def _example(self) -> Example:
        files = {}
        while label := _LABEL.fullmatch(self.next.text):
            path, start = label[1], self._take(True, "").start
            language = _LANGUAGES.get(path.rpartition(".")[2])
            if language is None:
                self._refuse(f"`{path}` ends in none of {', '.join(_LANGUAGES)}", start)
            files[path] = self._take(
                self.next.language == language, f"the text of `{path}` comes next, in {language}"
            ).text
        because = ""
        if self._begins(REASON):
            because = (
                self._take(not files, "what has files needs no reason")
                .text.removeprefix(REASON)
                .removesuffix(".")
            )
        is_command = self.next.language == "console" and self.next.text.startswith("$ ")
        console = self._take(
            is_command, "a block of console comes next that begins with `$ ` and the command"
        )
        command, _, output = console.text.removeprefix("$ ").removesuffix("\n").partition("\n")
        if bool(output) == bool(because):
            self._refuse(
                "below a command stands what it prints, unless no file triggers the code", console.start
            )
        return Example(command, output, files, because)

    def _is_prose(self) -> bool:
        special = self.next.language or self._begins(REASON, FIX, "## ") or _LABEL.fullmatch(self.next.text)
        return bool(self.next.text and not special)

    def _begins(self, *words: str) -> bool:
        return not self.next.language and self.next.text.startswith(words)

    def _match(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        found = None if self.next.language else pattern.fullmatch(self.next.text)
        self._take(found, wanted)
        return cast("re.Match[str]", found)

    def _take(self, fits: object, wanted: str) -> _Block:
        if not fits:
            self._refuse(wanted)
        taken, self.next = self.next, next(self.blocks)
        return taken

    def _refuse(self, wanted: str, at: int | None = None) -> NoReturn:
        raise MalformedSection(f"{self.file}:{self._line(self.next.start if at is None else at)}: {wanted}")

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def _blocks(self) -> Iterator[_Block]:
        at = 0
        while at < len(self.text):
            found = _BLOCK.match(self.text, at)
            if found is None:
                self._refuse(
                    "a fenced block begins with its language and ends with a line of three backticks", at
                )
            if found["language"]:
                yield _Block(found["fenced"], found["language"], at)
            elif found["prose"]:
                yield _Block(" ".join(found["prose"].splitlines()), "", at)
            at = found.end()
        while True:
            yield _Block("", "", at)


def _every_line(match: re.Match[str]) -> str:
    numbers = range(int(match["first"]), int(match["last"]) + 1)
    return "".join(f"{match['head']}{number}{match['tail']}\n" for number in numbers)
