"""Globs over module paths, against a regular expression, itertools and bash as references."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import re
import subprocess
import sys
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.language import glob
from parallelizer.language.glob import MAX_ALTERNATIVES, MAX_LENGTH, GlobError, outer_braces, parse_glob
from tests.module_paths import PATHS, llama

# --- matching ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        ("", ["", ""], ["a", "a.b"]),
        ("a", ["a"], ["", "a.b", "b.a", "A", "aa"]),  # fnmatch2 alone: `a` matches `a/b`
        ("a.b", ["a.b"], ["a", "a.b.c", "axb"]),
        ("*", ["a", "10"], ["", "a.b"]),
        ("*.*", ["a.b"], ["", "a", "a.b.c"]),
        ("a.*", ["a.b"], ["a", "a.b.c"]),
        ("w*", ["w", "wq"], ["v", "w.q"]),
        ("**", ["", "a", "a.b.c"], []),
        ("**.**", ["", "a", "a.b.c"], []),
        ("**.a.b", ["a.b", "c.a.b", "a.c.a.b", "a.a.b"], ["a", "b", "a.b.c", "a.c.b"]),  # needs backtracking
        ("a.**", ["a", "a.b", "a.b.c"], ["", "b.a"]),
        ("a.**.b", ["a.b", "a.x.b", "a.b.b", "a.x.y.b"], ["a", "b", "a.b.c"]),
        ("**.a.**.a", ["a.a", "a.x.a", "x.a.a"], ["a", "a.x"]),
        ("**.*", ["a", "a.b"], [""]),
        ("w[qk]", ["wq", "wk"], ["wv", "w", "wqk", "w[qk]"]),
        ("w[!qk]", ["wv", "w!"], ["wq", "w"]),
        ("w[1-3]", ["w1", "w3"], ["w4", "w-"]),
        ("w[]a]", ["w]", "wa"], ["w"]),
        ("w?", ["wq"], ["w", "wqk", "w."]),
        ("[*]", ["*"], ["a", "**"]),
        ("[**]", ["*"], ["a", "**"]),
        ("[[]", ["["], ["a"]),
        ("[{]a[}]", ["{a}"], ["a"]),
        ("a,b", ["a,b"], ["a"]),
        ("{,a.*}", ["", "a.b"], ["a"]),
        ("{*,a}{*,b}", ["x", "ab", "a.b.c"], []),  # textual as in a shell: `*` after `*` is `**`
        ("W", ["W"], ["w"]),
        ("W*", ["Wq"], ["wq"]),
        ("a/b.*", ["a/b.c", "a/b.c/d"], ["a.b.c", "a/b"]),
        ("a", ["a"], ["a/b", "a\\b"]),
        ("?", ["/", "\\"], ["a/", "//"]),
        ("*[/]*", ["a/b", "/"], ["ab"]),
    ],
)
def test_a_glob_matches_the_whole_path_and_no_other(text: str, matching: list[str], other: list[str]) -> None:
    parsed = parse_glob(text)
    assert [path for path in matching + other if parsed.matches(path)] == matching
    assert parsed.select(matching + other) == matching


def reference(pattern: str) -> re.Pattern[str]:
    """A pattern without braces as a regular expression over the path with a dot after every segment."""
    regex = ""
    for segment in pattern.split(".") if pattern else []:
        if segment == "**":
            regex += r"(?:[^.]+\.)*"
            continue
        at = 0
        while at < len(segment):
            if segment[at] == "*":
                regex += "[^.]*"
            elif segment[at] == "?":
                regex += "[^.]"
            elif segment[at] == "[":
                end = segment.index("]", at + 1)
                inside = segment[at + 1 : end]
                negated = inside.startswith("!")
                regex += "(?!\\.)[" + ("^" if negated else "") + inside[negated:] + "]"
                at = end
            else:
                regex += re.escape(segment[at])
            at += 1
        regex += r"\."
    return re.compile(regex)


CHARACTERS = st.sampled_from(["a", "b", "w", "q", "1", "0", "?", "[ab]", "[!a]", "[a-c]", "[0-9q]"])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Patterns without braces."""
    segments = []
    for _ in range(draw(st.integers(0, 5))):
        parts = draw(st.lists(CHARACTERS, min_size=1, max_size=3))
        at = draw(st.integers(0, len(parts)))
        starred = "".join(parts[:at]) + "*" + "".join(parts[at:])
        segments.append(draw(st.sampled_from(["*", "**", "**", starred, "".join(parts)])))
    return ".".join(segments)


@settings(max_examples=400, deadline=None)
@given(patterns(), st.lists(PATHS, max_size=12))
def test_matching_agrees_with_a_regular_expression(pattern: str, paths: list[str]) -> None:
    expected = [p for p in paths if reference(pattern).fullmatch(p + "." if p else "")]
    parsed = parse_glob(pattern)
    assert [path for path in paths if parsed.matches(path)] == expected
    assert parsed.select(paths) == expected
    assert parsed.unmatched(paths) == ([] if expected else [pattern])


@settings(max_examples=100, deadline=None)
@given(st.lists(patterns(), min_size=2, max_size=4), st.lists(PATHS, max_size=12))
def test_braces_match_what_one_of_their_alternatives_matches(some: list[str], paths: list[str]) -> None:
    parsed = parse_glob("{" + ",".join(some) + "}")
    each = [parse_glob(pattern) for pattern in some]
    expected = [path for path in paths if any(one.matches(path) for one in each)]
    assert parsed.select(paths) == expected == [path for path in paths if parsed.matches(path)]
    assert parsed.unmatched(paths) == list(
        dict.fromkeys(one.text for one in each if not any(one.matches(path) for path in paths))
    )


def test_selection_keeps_the_order_and_the_repetitions_of_the_paths() -> None:
    paths = ["b.x", "a.x", "c", "b.x", "a.y", "b"]
    assert parse_glob("{a,b}.x").select(paths) == ["b.x", "a.x", "b.x"]
    assert parse_glob("*.x").select(iter(paths)) == ["b.x", "a.x", "b.x"]
    assert parse_glob("**").select(paths) == paths


def test_alternatives_that_match_nothing_are_named_in_full() -> None:
    parsed = parse_glob("layers.*.attention.{wq,wz,w[xy]}")
    assert parsed.unmatched(llama(2)) == ["layers.*.attention.wz", "layers.*.attention.w[xy]"]
    parsed = parse_glob("layers.{0..3}.ffn_norm")
    assert parsed.unmatched(iter(llama(2))) == ["layers.2.ffn_norm", "layers.3.ffn_norm"]


@pytest.mark.parametrize("end", ["a", "b"])
def test_stars_take_polynomial_time(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    honest = glob._segment_matches

    def counted(pattern: str, name: str) -> bool:
        nonlocal calls
        calls += 1
        return honest(pattern, name)

    monkeypatch.setattr(glob, "_segment_matches", counted)
    text = "**.a*." * 100 + end
    path = ".".join(["a"] * 300)
    parsed = parse_glob(text)
    assert parsed.matches(path) is (end == "a")
    assert parsed.select([path]) == ([path] if end == "a" else [])
    assert calls <= 2 * 201 * 301
    assert parse_glob("**." * 300 + "b").select([path, "b"]) == ["b"]
    assert parse_glob("*a" * 200 + "b").matches("a" * 400) is False


def test_twenty_globs_over_the_largest_models_are_quick() -> None:
    paths = llama(200)
    texts = [
        "",
        "**",
        "**.wq",
        "layers.*",
        "layers.*.{attention_norm,ffn_norm}",
        "layers.*.attention",
        "layers.*.attention.w[qkv]",
        "layers.*.{attention.wo,feed_forward.w2}",
        "layers.{0..199}.attention.{wq,wk,wv}",
        "**.layers.{0..199}.feed_forward.w{1,3}",
    ] * 2
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for text in texts:
            parse_glob(text).select(paths)
        best = min(best, time.process_time() - start)
    assert best < 0.2  # 5 ms on an idle machine


# --- braces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "alternatives"),
    [
        ("a", ["a"]),
        ("{a,b}", ["a", "b"]),
        ("x{,_y}", ["x", "x_y"]),
        ("{a.b,c}.d", ["a.b.d", "c.d"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
        ("{0..3}", ["0", "1", "2", "3"]),
        ("{3..0}", ["3", "2", "1", "0"]),
        ("{5..5}", ["5"]),
        ("{0..30..10}", ["0", "10", "20", "30"]),
        ("{0..7..3}", ["0", "3", "6"]),
        ("{7..0..3}", ["7", "4", "1"]),
        ("{08..10}", ["08", "09", "10"]),
        ("{{0..2},7}", ["0", "1", "2", "7"]),
        ("{a,a}", ["a"]),
        ("layers{,.0}", ["layers", "layers.0"]),
        ("{[,],a}", ["[,]", "a"]),
        ("w[{]", ["w[{]"]),
    ],
)
def test_braces_expand_left_to_right_and_each_alternative_once(text: str, alternatives: list[str]) -> None:
    assert parse_glob(text).alternatives == tuple(alternatives)


Tree = list["str | tuple[int, int, int | None] | list[Tree]"]


def random_tree(rng: random.Random, depth: int = 0) -> Tree:
    """A sequence of text, ranges (first, last, step) and choices between sequences."""
    parts: Tree = []
    for _ in range(rng.randint(0 if depth else 1, 3)):
        kind = rng.random()
        if kind < 0.5 or depth == 3:
            parts.append(rng.choice(["a", "b", "_x", "a.b", "w", "7"]))
        elif kind < 0.7:
            step = rng.choice([None, 1, 2, -3])
            parts.append((rng.randint(-2, 12), rng.randint(-2, 12), step))
        else:
            parts.append([random_tree(rng, depth + 1) for _ in range(rng.randint(2, 3))])
    return parts


def written(tree: Tree) -> str:
    text = ""
    for part in tree:
        if isinstance(part, str):
            text += part
        elif isinstance(part, tuple):
            text += "{" + "..".join(str(number) for number in part if number is not None) + "}"
        else:
            text += "{" + ",".join(written(choice) for choice in part) + "}"
    return text


def expanded(tree: Tree) -> list[str]:
    parts: list[list[str]] = []
    for part in tree:
        if isinstance(part, str):
            parts.append([part])
        elif isinstance(part, tuple):
            first, last, step = part[0], part[1], abs(part[2] or 1)
            down = last < first
            parts.append([str(n) for n in range(first, last + (-1 if down else 1), -step if down else step)])
        else:
            parts.append([text for choice in part for text in expanded(choice)])
    return ["".join(choice) for choice in itertools.product(*parts)]


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_braces_agree_with_a_cartesian_product(rng: random.Random) -> None:
    tree: Tree = ["x", *random_tree(rng)]
    expected = expanded(tree)
    if len(expected) > MAX_ALTERNATIVES or len(written(tree)) > MAX_LENGTH:
        with pytest.raises(GlobError):
            parse_glob(written(tree))
    else:
        assert parse_glob(written(tree)).alternatives == tuple(dict.fromkeys(expected))


def test_braces_agree_with_bash() -> None:
    rng = random.Random(0)
    samples = [f"x{written(random_tree(rng))}" for _ in range(150)]
    samples += [
        "x{01..3}",
        "x{1..003}",
        "x{-01..2}",
        "x{-1..1}",
        "x{10..0..-4}",
        "x{0..10..-4}",
        "x{3..1..02}",
    ]
    samples = [sample for sample in samples if len(sample) < 200]
    command = "set -f\n" + "".join(f"echo {sample}\n" for sample in samples)
    try:
        shell = subprocess.run(["bash", "--norc", "-c", command], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("no bash on this machine")
    lines = shell.stdout.splitlines()
    assert len(lines) == len(samples) > 100
    for sample, line in zip(samples, lines, strict=True):
        if len(line.split()) <= MAX_ALTERNATIVES:
            assert parse_glob(sample).alternatives == tuple(dict.fromkeys(line.split())), sample


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong", "offset", "message"),
    [
        ("a..b", ".", 2, "empty segment"),
        (".a", ".", 0, "empty segment"),
        ("a.", ".", 1, "empty segment"),
        (".", ".", 0, "empty segment"),
        ("layers.{,a}.b", ".", 11, "`layers..b`"),
        ("{a,}.b", ".", 4, "`.b`"),
        ("a.{0..3,7}", ".", 5, "empty segment"),
        ("a**", "**", 1, "`a**`"),
        ("x.**self.query", "**", 2, "`**self`"),
        ("***", "***", 0, "`***`"),
        ("x.a{b,*}*", "*}*", 6, "`a**`"),
        ("a.{b", "{", 2, "never closed"),
        ("{a,{b,c}", "{", 0, "never closed"),
        ("a.b}", "}", 3, "has no opening"),
        ("w]", "]", 1, "has no opening"),
        ("w[qk", "[qk", 1, "not closed"),
        ("w[q.k]", "[q", 1, "not closed"),
        ("w[]", "[]", 1, "not closed"),
        ("w[!]", "[!]", 1, "not closed"),
        ("w[^q]", "^", 2, "`^`"),
        ("layers.{i}.wq", "{i}", 7, "no alternatives"),
        ("{}", "{}", 0, "no alternatives"),
        ("a{b..d}", "{b..d}", 1, "no alternatives"),
        ("{{a,b}}", "{{a,b}}", 0, "no alternatives"),
        ("{0..3..0}", "0", 7, "step"),
        ("{0..3..00}", "00", 7, "step"),
        (r"layers\.0", "\\", 6, "escape"),
        ("{a, b}", " ", 3, "blank"),
        ("a.{0..4096}", "{0..4096}", 2, "4096"),
        ("{1..64}.{1..65}", "{1..65}", 8, "4096"),
        ("a.{0..99999999999999999999999999}", "{0..99999999999999999999999999}", 2, "4096"),
        ("{{1..4000},{1..97}}", "{{1..4000},{1..97}}", 0, "4096"),
        ("a" * 1001, "a", 1000, "1001"),
    ],
)
def test_a_malformed_glob_is_refused_at_its_narrowest_place(
    text: str, wrong: str, offset: int, message: str
) -> None:
    with pytest.raises(GlobError) as caught:
        parse_glob(text)
    error = caught.value
    assert text[error.offset : error.offset + error.length] == wrong
    assert error.offset == offset
    assert message in error.message == str(error)
    assert error.help
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert vars(twin) == vars(error)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("{0..3,7}", "`{0..3}`"),
        ("layers.0..3", "`{0..3}`"),
        ("{a..c}", "`[a-c]`"),
        ("{i}", "`[{]`"),
        ("[^ab]", "`[!ab]`"),
        ("**self", "`**.name`"),
    ],
)
def test_the_help_says_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(GlobError) as caught:
        parse_glob(text)
    assert advice in caught.value.help


def test_the_limits_themselves_are_allowed() -> None:
    assert len(parse_glob("{1..4096}").alternatives) == MAX_ALTERNATIVES
    assert len(parse_glob("{1..64}.{1..64}").alternatives) == MAX_ALTERNATIVES
    assert parse_glob("a" * 1000).matches("a" * 1000)
    assert parse_glob("{" * 240 + "a,b" + ",c}" * 240).alternatives == ("a", "b", "c")


@pytest.mark.parametrize(
    "text", ["{a,b}" * 200, "{0..4095}" * 100, "{" * 1000, "{{0..4095}" + ",{0..4095}" * 90]
)
def test_a_glob_that_would_blow_up_is_refused_at_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(GlobError):
        parse_glob(text)
    assert time.process_time() - start < 1.0


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="ab.*?[]!{},0123-^\\/ ", max_size=25), st.lists(PATHS, max_size=4))
def test_any_text_is_a_glob_or_a_glob_error_inside_it(text: str, paths: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            parsed = parse_glob(text)
        except GlobError as error:
            assert 0 <= error.offset < error.offset + error.length <= len(text)
        else:
            assert parsed.select(paths) == [path for path in paths if parsed.matches(path)]
            assert all(parse_glob(a).alternatives == (a,) for a in parsed.alternatives)
            parsed.idle_characters(paths)


@settings(max_examples=200)
@given(st.text("ab^!.*?,-", min_size=1, max_size=5))
def test_characters_of_any_set_are_idle_or_not_and_never_an_error(inside: str) -> None:
    """A character of a set need not be a set by itself."""
    try:
        found = parse_glob(f"w[{inside}]")
    except GlobError:
        return
    idle = {character for character, _ in found.idle_characters(["wa", "w^"])}
    assert not idle & {"a", "^"} or len(set(inside)) < len(inside)


def test_the_caret_in_a_set_is_a_character_like_any() -> None:
    assert parse_glob("w[qk^v]").idle_characters(["wq", "wk", "wv"]) == [("^", "[qk^v]")]


def test_the_module_does_not_import_torch() -> None:
    command = "import sys, parallelizer.language.glob; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("a.b", []),
        ("a.{b,c}", [["b", "c"]]),
        ("{a,b{c,d}}.e.{f,g,h}", [["a", "b{c,d}"], ["f", "g", "h"]]),
        ("{0..3}.{a,}", [["a", ""]]),
        ("[{,}].{a,b}", [["a", "b"]]),
    ],
)
def test_the_choices_of_outer_braces_are_found_in_the_text(text: str, choices: list[list[str]]) -> None:
    found = list(outer_braces(text))
    assert [[text[start:end] for start, end in spans] for _, _, spans in found] == choices
    assert all((text[opening], text[closing - 1]) == ("{", "}") for opening, closing, _ in found)
