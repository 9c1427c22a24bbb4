"""Nearest names against textbook distances; suggested globs against the paths they say they match."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parallelizer.diagnostics.nearest as nearest_module
from parallelizer.diagnostics.nearest import nearest
from parallelizer.language.glob import GlobError, parse_glob
from parallelizer.language.suggest import suggest
from tests.module_paths import BERT, PATHS, llama

STYLES = [
    "colwise",
    "rowwise",
    "sequence",
    "shard-params",
    "replicate",
    "prepare-input",
    "prepare-output",
    "prepare-io",
    "context-parallel",
    "fsdp",
    "checkpoint",
    "compile",
]


def misspellings(word: str) -> set[str]:
    """Every single typo with `z`: a character too few, too many, another, or two neighbours swapped."""
    cuts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    typos = {left + right[1:] for left, right in cuts if right}
    typos |= {left + "z" + right for left, right in cuts}
    typos |= {left + "z" + right[1:] for left, right in cuts if right}
    typos |= {left + right[1] + right[0] + right[2:] for left, right in cuts if len(right) > 1}
    return typos - {word}


@pytest.mark.parametrize("style", STYLES)
def test_a_single_typo_finds_the_name(style: str) -> None:
    for typo in misspellings(style):
        assert nearest(typo, STYLES)[0] == style, typo


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abcw_q0", min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_a_single_typo_in_any_word_finds_it(word: str, rng: random.Random) -> None:
    typo = rng.choice(sorted(misspellings(word)))
    assert nearest(typo, ["?????", word, ""]) == [word]


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("COLWISE", ["colwise"]),
        ("shard_params", ["shard-params"]),
        ("row", ["rowwise"]),
        ("checkpointing", ["checkpoint"]),
        ("prepare-inptu", ["prepare-input"]),
        ("tensor", []),
        ("x", []),
        ("", []),
        ("zzzzzzzzzz", []),
    ],
)
def test_only_near_names_are_found(text: str, near: list[str]) -> None:
    assert nearest(text, STYLES) == near


@pytest.mark.parametrize(
    ("text", "known", "meant"),
    [
        ("learning_rate", ["betas", "lr"], ["lr"]),
        ("wd", ["betas", "weight_decay"], ["weight_decay"]),
        ("cp", ["colwise", "context-parallel"], ["context-parallel"]),
        ("rate", ["lr", "ratio_of_all"], []),
        ("l", ["learning_rate"], []),
    ],
)
def test_a_name_stands_for_the_first_letters_of_its_words(
    text: str, known: list[str], meant: list[str]
) -> None:
    assert nearest(text, known) == meant


def test_the_nearest_come_first_and_no_more_than_asked() -> None:
    assert nearest("wq", ["wk", "wo", "wv", "q", "norm", "wq"]) == ["wq"]
    assert nearest("wx", ["wk", "wo", "wv", "q", "norm", "wq"]) == ["wk", "wo", "wv"]
    assert nearest("wq", ["wk", "wo"], n=1) == ["wk"]
    assert nearest("attenton", ["attend", "attention", "attention_norm"]) == ["attention"]
    assert nearest("wq", iter(["wk", "wk"])) == ["wk"]
    assert nearest("pt", ["pp", "dp_shard", "cp", "tp"])[0] in {"tp", "pp"}


def edit_distance(a: str, b: str) -> int:
    """The restricted Damerau-Levenshtein distance, by its recurrence."""
    if not a or not b:
        return len(a) + len(b)
    best = min(
        edit_distance(a[1:], b) + 1,
        edit_distance(a, b[1:]) + 1,
        edit_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )
    if len(a) > 1 and len(b) > 1 and a[0] == b[1] and a[1] == b[0]:
        best = min(best, edit_distance(a[2:], b[2:]) + 1)
    return best


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abc", max_size=5), st.text(alphabet="abc", max_size=5), st.integers(0, 4))
def test_the_distance_is_the_textbook_one_up_to_its_limit(a: str, b: str, limit: int) -> None:
    assert nearest_module._distance(a, b, limit) == min(edit_distance(a, b), limit + 1)


LLAMA = llama(32)


@pytest.mark.parametrize(
    ("text", "paths", "expected"),
    [
        ("layers.*.atention.wq", LLAMA, [("layers.*.attention.wq", 32)]),
        ("lyers.*.atention.wq", LLAMA, [("layers.*.attention.wq", 32)]),
        ("layers.*.feed_foward.w[13]", LLAMA, [("layers.*.feed_forward.w[13]", 64)]),
        ("layers.{0..3}.atention.{wq,wk}", LLAMA, [("layers.{0..3}.attention.{wq,wk}", 8)]),
        ("layers.*.attention.{qw,kw}", LLAMA, [("layers.*.attention.{wq,wk}", 64)]),
        ("tok_embedding", LLAMA, [("tok_embeddings", 1)]),
        ("layers.99.ffn_norm", LLAMA, [("layers.*.ffn_norm", 32)]),
        ("*self.query", BERT, [("**.self.query", 4)]),
        ("attention.wq", LLAMA, [("**.attention.wq", 32)]),
        ("*.wq", LLAMA, [("**.wq", 32)]),
        ("layers.wq", LLAMA, [("layers.**.wq", 32)]),
        ("layers.*.wq", LLAMA, [("layers.*.attention.wq", 32)]),
        ("layers.attention.wq", LLAMA, [("layers.*.attention.wq", 32)]),
        ("model.layers.*.ffn_norm", LLAMA, [("layers.*.ffn_norm", 32)]),
        ("layers/*/ffn_norm", LLAMA, [("layers.*.ffn_norm", 32)]),
        ("layers.*.attention.zzzz", LLAMA, []),
        ("model.**", LLAMA, []),
        ("zzzz", LLAMA, []),
        ("a", [], []),
        ("layers.*", LLAMA, []),
        ("", LLAMA, []),
        ("wq..", LLAMA, []),
        ("a.[", ["a.["], []),
        ("b*d", ["bad*"], []),
        ("bad.y", ["bad*.y"], [("bad[*].y", 1)]),
    ],
)
def test_a_glob_that_matches_nothing_gets_the_likely_ones(
    text: str, paths: list[str], expected: list[tuple[str, int]]
) -> None:
    assert suggest(text, paths) == expected


def test_suggestions_differ_in_what_they_match_and_are_three_at_most() -> None:
    assert suggest("layers.*.attention.wz", LLAMA) == [
        (f"layers.*.attention.{name}", 32) for name in ("wk", "wo", "wq")
    ]


def test_a_suggestion_may_be_looked_for_among_many_alternatives() -> None:
    start = time.process_time()
    assert suggest("layers.{0..4095}.zzz", LLAMA) == []
    assert suggest("**.*{0..4095}*.zzz", LLAMA) == []
    assert suggest("zzz." * 249 + "zzz", LLAMA) == []
    assert time.process_time() - start < 2.0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LLAMA + BERT), st.randoms(use_true_random=False))
def test_every_suggestion_matches_as_many_paths_as_it_says(path: str, rng: random.Random) -> None:
    paths = LLAMA + BERT
    segments = ["*" if rng.random() < 0.3 else name for name in path.split(".")]
    at = rng.randrange(len(segments))
    segments[at : at + 1] = rng.choice([[], ["zz"], [segments[at] + "x"], [segments[at], "zz"]])
    text = ".".join(segments)
    found = suggest(text, paths)
    assert len(found) <= 3
    for suggestion, count in found:
        assert not parse_glob(text).select(paths)
        assert len(parse_glob(suggestion).select(paths)) == count >= 1


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab.*?[]!{},0123-^\\/ ", max_size=25), st.lists(PATHS, max_size=4))
def test_any_text_may_be_asked_about(text: str, paths: list[str]) -> None:
    found = suggest(text, paths)
    try:
        parsed = parse_glob(text)
    except GlobError:
        assert found == []
    else:
        assert not (found and parsed.select(paths))
