"""The texts a program was compiled from, with an anchor on every line, so that whatever is shown can point at
its rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.report.html.markup import Markup, join, tag

WHOLE = 300
"""A plan of more lines is shown as other files are: around the lines that something points at, so that the
page stays small.
"""

AROUND = 4
MAX_BYTES = 1_000_000
MAX_COLUMNS = 400


@dataclass(frozen=True)
class SourceFile:
    """A file or an override, by line number. `lines` is None where it cannot be read any more."""

    name: str
    lines: tuple[str, ...] | None


class Sources:
    """The files that spans point into, in order of first mention."""

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}
        self.pointed: dict[str, set[int]] = defaultdict(set)

    def anchor(self, span: Span) -> str:
        """The id of the line of a span."""
        if span.file not in self.files:
            self.files[span.file] = SourceFile(_name(span.file), _lines(span.file))
        self.pointed[span.file].add(span.line)
        return f"s{list(self.files).index(span.file)}-{span.line}"

    def link(self, span: Span | None, *, text: str | None = None, title: str | None = None) -> Markup | None:
        """`llama.yaml:8`, or another text, as a link to that line; plain where the line is not there."""
        if span is None:
            return None
        href = f"#{self.anchor(span)}" if self.has(span) else None
        kind = None if text else "place"
        return tag(
            "a" if href else "span", text or _place(span), href=href, class_=kind, title=title or _place(span)
        )

    def links(self, spans: Iterable[tuple[Span, str]]) -> list[Markup]:
        """Links to several lines, each with its title; `:9` where the file is that of the link before."""
        found, before = [], ""
        for span, title in spans:
            place = _place(span)
            text = place.removeprefix(span.file.rpartition("/")[2]) if span.file == before else place
            before = span.file
            link = self.link(span, text=text, title=title)
            found.append(tag("span", link, " ", class_="place"))
        return found

    def has(self, span: Span) -> bool:
        """Whether the line of a span is there to be pointed at."""
        self.anchor(span)
        lines = self.files[span.file].lines
        return lines is not None and 1 <= span.line <= len(lines)

    def listing(self, notes: Mapping[tuple[str, int], str], plans: Container[str]) -> Markup:
        """Every file that was pointed at; `plans` are shown whole. `notes` by file and line say what a line
        did.
        """
        return join([
            self._file(index, file, source, notes, WHOLE if file in plans else 2 * AROUND)
            for index, (file, source) in enumerate(self.files.items())
        ])  # fmt: skip

    def _file(
        self, index: int, file: str, source: SourceFile, notes: Mapping[tuple[str, int], str], most: int
    ) -> Markup:
        head = tag("figcaption", tag("code", source.name))
        if source.lines is None:
            return tag("figure", head, tag("p", "This text cannot be read.", class_="quiet"), class_="source")
        shown = _shown(len(source.lines), self.pointed[file], most)
        rows: list[Markup] = []
        last = 0
        for number in shown:
            if number != last + 1:
                rows.append(_gap(number - last - 1))
            note = notes.get((file, number))
            rows.append(
                tag(
                    "tr",
                    tag("td", number, class_="number"),
                    tag("td", tag("code", _colored(source.lines[number - 1][:MAX_COLUMNS])), class_="text"),
                    tag("td", note, class_="note"),
                    id=f"s{index}-{number}",
                )
            )
            last = number
        if last < len(source.lines):
            rows.append(_gap(len(source.lines) - last))
        table = tag("table", rows, role="presentation")
        return tag(
            "figure",
            head,
            tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=source.name),
            class_="source",
        )


def _gap(count: int) -> Markup:
    return tag(
        "tr", tag("td", "⋮", class_="number"), tag("td", f"{count:,} lines", class_="quiet", colspan=2)
    )


def _shown(count: int, pointed: Iterable[int], most: int) -> list[int]:
    if count <= most:
        return list(range(1, count + 1))
    near = {n for line in pointed for n in range(line - AROUND, line + AROUND + 1)}
    return sorted(n for n in near if 1 <= n <= count)


def _colored(line: str) -> Markup:
    """A line of YAML with its comment set apart: what follows a `#` at a word's start, outside quotes."""
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1] in " \t"):
            return join(line[:at], tag("i", line[at:]))
    return join(line)


def _place(span: Span) -> str:
    if span.file.startswith("<override "):
        return "command line"
    return span.file if span.file.startswith("<") else f"{span.file.rpartition('/')[2]}:{span.line}"


def _name(file: str) -> str:
    return "command line" if file.startswith("<override ") else file


def _lines(file: str) -> tuple[str, ...] | None:
    if file.startswith("<override "):
        return (file[len("<override ") : -1],)
    if file.startswith("<"):
        return None
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            lines = stream.read(MAX_BYTES).split("\n")
    except (OSError, ValueError):
        return None
    return tuple(line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines))
