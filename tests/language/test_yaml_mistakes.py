"""What is said of texts that are not YAML: `text` with the wrong part in angle quotes."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.yaml_nodes import read


@pytest.mark.parametrize(
    ("marked", "read_as"),
    [
        ("rules:\n  «*.wq»: colwise\n", "an alias"),
        ("rules:\n  «**»: fsdp\n", "an alias"),
        ("rules:\n  «*»: fsdp\n", "an alias"),
        ("rules:\n  «*_norm»: {style: sequence}\n", "an alias"),
        ("rules:\n  «**.{a,b}.c»: fsdp\n", "an alias"),
        ("rules: {«*.wq»: colwise, a: b}\n", "an alias"),
        ("rules:\n  a: [fsdp, «*b.c»]\n", "an alias"),
        ("rules:\n  a: «*b»\n", "an alias"),
        ("rules:\n  «[qk]v»: colwise\n", "a list"),
        ("rules:\n  «[ab]»: colwise\n", "a list"),
        ("rules:\n  «[!q]k»: colwise\n", "a list"),
        ("rules: {«[qk]v»: colwise}\n", "a list"),
        ("rules:\n  «{a,b}.wq»: colwise\n", "a map"),
        ("rules:\n  «{a, b}»: {style: fsdp}\n", "a map"),
        ("rules:\n  «{0..3}.x»: fsdp\n", "a map"),
        ("rules:\n  «{*.a,b}»: fsdp\n", "a map"),
        ("rules:\n  «{a,b}.w[qk]»: {style: colwise, divide: [b]}\n", "a map"),
        ("rules:\n  «&x»: fsdp\n", "an anchor"),
        ("rules:\n  «&x.y»: fsdp\n", "an anchor"),
        ("rules:\n  «!x.y»: fsdp\n", "a tag"),
        ("«%x»: fsdp\n", "a directive"),
        ("rules:\n  «@x»: fsdp\n", "a reserved character"),
        ("rules:\n  «`x»: fsdp\n", "a reserved character"),
    ],
)
def test_a_glob_without_quotes_is_named_and_shown_in_quotes(marked: str, read_as: str) -> None:
    glob = check(marked, "unquoted-glob", f" as {read_as}, not as text", "needs quotes")
    text = marked.replace("«", "").replace("»", "")
    quoted = text.replace(glob, f'"{glob}"')
    assert quoted != text
    read(quoted, "f")  # the advice is good


@pytest.mark.parametrize(
    ("marked", "message", "advice"),
    [
        ("rules:\n«\t»a: b\n", "a tab", "blanks"),
        ("rules:\n  a:«\t»b\n", "a tab", "blanks"),
        ("rules:\n  a: b\n «\t»c: d\n", "a tab", "blanks"),
        ("rules:\n  «layers.*:fsdp»\n  norm: x\n", "no `: `", "blank behind the colon"),
        ("rules:\n  norm: fsdp\n  «layers.*:fsdp»\n  norm: x\n", "no `: `", "blank behind the colon"),
        ("rules:\n  a: b«:» c\n", "a second `:`", "quotes"),
        ("rules:\n  a: fsdp\n   «b»: fsdp\n", "indented deeper than the one above", "same column"),
        ("rules:\n    a: fsdp\n  «b»: fsdp\n", "not indented like those above", "same column"),
        ("- a\n«b»: c\n", "not indented like those above", "same column"),
        ("rules:\n  a: «{»style: colwise\n", "this `{` is never closed", "close it"),
        ("rules:\n  a: «[»b\n", "this `[` is never closed", "close it"),
        ("rules:\n  a: [b,\n«»", "the text ends inside `[` or `{`", "close what was opened"),
        ("rules:\n  a: {style: colwise input«:» x}\n", "a `,` or the closing `}` is missing", "put it here"),
        ("rules:\n  a: {b: [c«}»\n", "a `,` or the closing `]` is missing", "put it here"),
        ("rules:\n  a: {b: c}«}»\n", "this `}` has no opening bracket", "remove it"),
        ("a: «]»\n", "this `]` has no opening bracket", "remove it"),
        ('rules:\n  a: «"»b\n', "this quote is never closed", "same line"),
        ("a: «'»b", "this quote is never closed", "same line"),
        ('a: "b\\«o»"', "`\\o` is not an escape", "single quotes"),
        ('a: "«\\U»FFFFFFFF"', None, None),
        ("a: b\n«---»\nc: d\n", "a second document", "one document"),
        ("a: b\n...\n«c»\n", "the document has ended", "one document"),
        ("a: «\x07»", "U+0007", "remove it"),
        ("a: b\nc: «\x1b»[31m", "U+001B", "remove it"),
        ("«:» fsdp\n", "no key before the colon", '""'),
    ],
)
def test_other_mistakes_are_named_where_they_are(
    marked: str, message: str | None, advice: str | None
) -> None:
    if message is None:
        with pytest.raises(PlanError, match="too large"):
            read(marked.replace("«", "").replace("»", ""), "f")
        return
    code = "yaml-retyped" if "no key" in message else "yaml-syntax"
    check(marked, code, message, advice)


@pytest.mark.parametrize(
    "marked", ["a: «!!str» b", "a: «!foo» {b: c}", "rules:\n  a: [«!q»]\n", "«!!python/none»"]
)
def test_tags_are_refused(marked: str) -> None:
    check(marked, "yaml-tag", "is not allowed", "a plan is data")


def test_an_interpolation_without_quotes_is_called_one() -> None:
    check(
        "rules:\n  a: {style: «${x}»}\n", "interpolation", "an interpolation", "plans have no interpolations"
    )


def check(marked: str, code: str, message: str, advice: str | None) -> str:
    """One finding, whose place is the part in angle quotes. Returns that part."""
    before, rest = marked.split("«")
    wrong, after = rest.split("»")
    with pytest.raises(PlanError) as caught:
        read(before + wrong + after, "f")
    [found] = caught.value.diagnostics
    assert found.code == code
    assert message in found.message
    assert found.help and (advice or "") in found.help
    assert found.span is not None
    line = before.count("\n") + 1
    column = len(before.rpartition("\n")[2]) + 1
    width = max(len(wrong), 1)
    assert (found.span.line, found.span.column, found.span.end_column) == (line, column, column + width)
    return wrong
