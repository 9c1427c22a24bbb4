"""YAML nodes against PyYAML's own reading; places against the text; limits against what strangers may
send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.yaml_nodes import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    MappingNode,
    Node,
    Scalar,
    SequenceNode,
    kind,
    read,
    read_file,
    read_inside,
    read_text,
    shown_path,
)

CONFIGS = Path(__file__).parents[2] / "configs"


def plain(node: Node | None) -> Any:
    """A node's text alone, in Python's containers."""
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return {key.text: plain(value) for key, value in node} if node is not None else None


def scalars(node: Node | None) -> list[Scalar]:
    """Every scalar of a tree, keys too."""
    if node is None or isinstance(node, Scalar):
        return [node] if node is not None else []
    if isinstance(node, SequenceNode):
        return [found for item in node.items for found in scalars(item)]
    return [found for key, value in node for found in (key, *scalars(value))]


def cut(text: str, span: Span) -> str:
    return text.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1]


def refused(read_it: Callable[[], object]) -> Diagnostic:
    """The one finding with which a text is refused."""
    with pytest.raises(PlanError) as caught:
        read_it()
    [found] = caught.value.diagnostics
    assert found.span is not None
    return found


# --- the tree ------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.text(alphabet="ab *{}[]:,'\"\\#-1.é漢\n", max_size=8),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text("abc.*[", max_size=5), below, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.booleans())
def test_the_tree_is_what_pyyaml_reads(value: Any, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True, sort_keys=False, width=1000)
    node = read(text, "f")
    assert plain(node) == yaml.load(text, Loader=yaml.BaseLoader)
    for scalar in scalars(node):
        if scalar.verbatim:
            assert cut(text, scalar.part(0, len(scalar.text))) == (
                scalar.text or cut(text, scalar.part(0, 1))
            )
            assert all(cut(text, scalar.part(i, i + 1)) == char for i, char in enumerate(scalar.text))


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_files_are_read_as_pyyaml_reads_them(path: Path) -> None:
    text = path.read_text()
    expected = yaml.load(text, Loader=yaml.BaseLoader)
    assert plain(read(text, str(path))) == expected


def test_every_scalar_knows_its_text_and_its_place() -> None:
    text = 'rules:\n  layers.*: {style: rowwise, \'input\': "shard(1)"}\n  "": [a,  b c ]\n'
    node = read(text, "p.yaml")
    assert [(s.text, cut(text, s.span)) for s in scalars(node)] == [
        ("rules", "rules"),
        ("layers.*", "layers.*"),
        ("style", "style"),
        ("rowwise", "rowwise"),
        ("input", "'input'"),
        ("shard(1)", '"shard(1)"'),
        ("", '""'),
        ("a", "a"),
        ("b c", "b c"),
    ]
    assert all(s.span.file == "p.yaml" for s in scalars(node))


def test_flow_collections_span_all_they_hold_and_block_ones_their_beginning() -> None:
    text = "a: {b: 1}\nc: [d, {e: f}]\ng:\n  h: i\nj: {k: l,\n  m: n}\n"
    node = read(text, "f")
    assert isinstance(node, MappingNode)
    places = {key.text: cut(text, value.span) for key, value in node}
    assert places == {"a": "{b: 1}", "c": "[d, {e: f}]", "g": "h", "j": "{"}


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n", "---\n", "--- \n...\n", "\ufeff"])
def test_nothing_is_read_from_an_empty_document(text: str) -> None:
    assert read(text, "f") is None


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("0", "int"),
        ("0.10", "float"),
        ("on", "bool"),
        ("Yes", "bool"),
        ("null", "null"),
        ("~", "null"),
        ("2001-01-01", "timestamp"),
        ("<<", "merge"),
        ("1:30", "int"),
        ("layers.0", "str"),
        ("0a", "str"),
        ("y", "str"),
        ('"on"', "str"),
        ("'0'", "str"),
    ],
)
def test_a_scalar_knows_the_type_that_yaml_would_give_it(text: str, type_: str) -> None:
    node = read(text, "f")
    assert isinstance(node, Scalar)
    assert node.yaml_type == type_
    assert node.text == text.strip("\"'")


@pytest.mark.parametrize("text", ['"a\\x41"', "'it''s'", "|\n  a", ">-\n  a b", "a\n  b", '"a\n  b"'])
def test_what_is_written_in_other_characters_has_one_place(text: str) -> None:
    node = read("k: " + text, "f")
    assert isinstance(node, MappingNode)
    [(_, value)] = node
    assert isinstance(value, Scalar)
    assert not value.verbatim
    assert value.part(0, 1) == value.part(1, 2) == value.span


def test_the_parts_of_a_scalar_begin_behind_its_quote() -> None:
    text = "[abc, 'abc', \"abc\", '']"
    node = read(text, "f")
    assert [cut(text, s.part(1, 3)) for s in scalars(node)[:3]] == ["bc", "bc", "bc"]
    assert scalars(node)[3].part(0, 0) == Span("f", 1, 22, 23)


def test_what_is_read_inside_a_scalar_keeps_the_places_of_the_file() -> None:
    text = 'rules:\n  - "layers.*: {style: colwise}"\n  - norm: fsdp\n  - norm: fsdp\n'
    node = read('a: "b: {c: d}"', "f")
    assert isinstance(node, MappingNode)
    [(_, value)] = node
    assert isinstance(value, Scalar)
    inside = read_inside(value)
    assert [cut('a: "b: {c: d}"', s.span) for s in scalars(inside)] == ["b", "c", "d"]
    rules = read(text, "f")
    assert isinstance(rules, MappingNode)


def test_what_is_read_inside_escapes_has_the_place_of_the_whole() -> None:
    text = 'a: "b\\x3a {c: d}"'
    node = read(text, "f")
    assert isinstance(node, MappingNode)
    [(_, value)] = node
    assert isinstance(value, Scalar)
    inside = read_inside(value)
    assert plain(inside) == {"b": {"c": "d"}}
    assert {s.span for s in scalars(inside)} == {value.span}
    found = refused(lambda: read_inside(Scalar("a: *b", True, Span("f", 3, 5, 10), verbatim=True)))
    assert found.span == Span("f", 3, 8, 10)


def test_a_mapping_is_looked_up_by_text() -> None:
    node = read("{a: 1, 'b': [2]}", "f")
    assert isinstance(node, MappingNode)
    assert plain(node.get("b")) == ["2"] and node.get("c") is None
    key = node.key("b")
    assert key is not None and key.span == Span("f", 1, 8, 11) and node.key("c") is None


def test_nodes_are_named_in_words() -> None:
    node = read("[a, '', [], {}]", "f")
    assert isinstance(node, SequenceNode)
    assert [kind(item) for item in node.items] == ["'a'", "''", "a list", "a map"]
    empty = read("a:", "f")
    assert isinstance(empty, MappingNode)
    assert kind(empty.entries[0][1]) == "nothing"
    assert len(kind(Scalar("x" * 1000, True, Span("f")))) < 70


# --- what is refused -----------------------------------------------------------------------------

BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BOMB, "unquoted-glob"),
        ("[" * 500, "yaml-limit"),
        ("{a: " * 500, "yaml-limit"),
        ("[" * 240_000, "yaml-limit"),
        ("- " * 120_000, "yaml-limit"),
        ("? " * 120_000, "yaml-limit"),
        ("a: [" + "b," * 120_000 + "]", "yaml-limit"),
        ("a: [[[" + "b," * 120_000, "yaml-limit"),
        ("a" * (MAX_BYTES + 1), "yaml-limit"),
        ("漢" * (MAX_BYTES + 1), "yaml-limit"),
        ("&a " * 80_000, "unquoted-glob"),
        ("---\n" * 60_000, "yaml-syntax"),
        ("a\n" + "\n" * 240_000 + "b: c: d", "yaml-syntax"),
        ("{}" * 120_000, "unquoted-glob"),
        ("!a " * 80_000, "yaml-tag"),
    ],
    ids=lambda value: value[:12] if len(value) > 20 else value,
)
def test_what_would_blow_up_is_refused_at_once(text: str, code: str) -> None:
    start = time.process_time()  # not the wall's: other tests keep the cores busy
    found = refused(lambda: read(text, "f"))
    assert found.code == code and len(found.message) < 200
    assert time.process_time() - start < 5.0  # 0.3 s on an idle machine


def test_the_limits_themselves_are_allowed() -> None:
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f") is not None
    assert refused(lambda: read("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "f")).span == Span(
        "f", 1, 33, 34
    )
    node = read("[" + "a," * (MAX_NODES - 1) + "]", "f")
    assert isinstance(node, SequenceNode) and len(node.items) == MAX_NODES - 1
    assert read("a" * MAX_BYTES, "f") is not None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: 1\nb: 2\na: 3\n", "a"),
        ("{x: 1, 'x': 2}", "'x'"),
        ("a:\n  b: {c: 1, d: 2, c: 3}\n", "c"),
        ("0: a\n'0': b\n", "'0'"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_places(text: str, wrong: str) -> None:
    found = refused(lambda: read(text, "f"))
    assert found.code == "duplicate-key" and found.span is not None
    assert cut(text, found.span) == wrong
    [first] = found.related
    assert (first.span.line, first.span.column) < (found.span.line, found.span.column)
    assert cut(text, first.span).strip("'") == wrong.strip("'")


def test_equal_keys_in_different_maps_are_fine() -> None:
    assert plain(read("a: {b: 1}\nb: {b: 2}\n", "f")) == {"a": {"b": "1"}, "b": {"b": "2"}}


def test_trusted_files_may_have_tags_and_anchors() -> None:
    text = "a: &x 3\nb: *x\nc: !!str 4\n<<: {d: e}\n"
    assert plain(read(text, "f", trusted=True)) == {"a": "3", "b": "*x", "c": "4", "<<": {"d": "e"}}
    assert refused(lambda: read(text, "f")).code == "unquoted-glob"


# --- files ---------------------------------------------------------------------------------------


def test_files_are_read_as_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    for data in ("é: 漢".encode(), "é: 漢".encode("utf-8-sig")):
        (tmp_path / "f.yaml").write_bytes(data)
        assert plain(read_file(str(tmp_path / "f.yaml"), "f.yaml")) == {"é": "漢"}


@pytest.mark.parametrize(
    ("data", "line", "column"),
    [
        (b"a: 1\nb: \xff\n", 2, 4),
        ("a: é".encode("latin-1"), 1, 4),
        (b"\xef\xbb\xbf \xb9", 1, 2),  # an incomplete character behind a byte order mark
        ("a: 1".encode("utf-16"), 1, 1),
        ("é: é".encode() + b"\x80", 1, 5),
    ],
)
def test_what_is_not_utf8_is_refused_at_its_place(
    tmp_path: Path, data: bytes, line: int, column: int
) -> None:
    (tmp_path / "f.yaml").write_bytes(data)
    found = refused(lambda: read_text(str(tmp_path / "f.yaml"), "f.yaml"))
    assert found.code == "yaml-syntax" and found.span == Span("f.yaml", line, column, column + 1)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "directory"), (tmp_path / "none.yaml", "No such file"), ("a\0b", "null")):
        found = refused(lambda path=path: read_file(str(path), "shown.yaml"))  # type: ignore[misc]
        assert found.code == "file-unreadable" and reason in found.message and "shown.yaml" in found.message


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "f.yaml").open("wb") as stream:
        stream.truncate(10**10)  # sparse: takes no room
    assert refused(lambda: read_file(str(tmp_path / "f.yaml"), "f.yaml")).code == "yaml-limit"


def test_paths_are_shown_as_somebody_here_would_type_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here" / "plans" / "a.yaml") == "plans/a.yaml"
    assert shown_path("plans/a.yaml") == "plans/a.yaml"
    assert shown_path(tmp_path / "other.yaml") == str(tmp_path / "other.yaml")


# --- any text ------------------------------------------------------------------------------------

CHARACTERS = "ab*&!{}[]:#|>%@`\\0~\"' \n\té漢\x07\x85\u2028\ufeff"
WORDS = [
    ".*",
    "&a",
    ": ",
    ", ",
    "- ",
    "? ",
    "\n  ",
    " #",
    "on",
    "---\n",
    "...\n",
    "<<: ",
    "${x}",
    "\r\n",
    '"\\U',
    "F" * 8,
]
PIECES = st.sampled_from([*CHARACTERS, *WORDS])


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=20).map("".join))
def test_any_text_is_a_tree_or_one_finding_inside_it(text: str) -> None:
    try:
        node = read(text, "f")
    except PlanError as error:
        [found] = error.diagnostics
        assert found.span is not None and found.message
        lines = len(text.splitlines()) + 1
        assert 1 <= found.span.line <= lines
        assert 1 <= found.span.column <= found.span.end_column <= len(text) + 3
    else:
        assert plain(node) == plain(read(text, "f", trusted=True))
