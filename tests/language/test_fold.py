"""Folded globs match exactly the paths that were folded, and are few and short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.language.fold import fold_alternatives, fold_paths
from parallelizer.language.glob import parse_glob
from tests.module_paths import NAMES, llama


@pytest.mark.parametrize(
    ("paths", "globs"),
    [
        ([], []),
        ([""], [""]),
        (
            [f"layers.{i}.attention.{w}" for i in range(32) for w in ("wk", "wq", "wv")],
            ["layers.{0..31}.attention.{wk,wq,wv}"],
        ),
        (["a.wv", "a.wq", "b.wq", "b.wv"], ["{a,b}.{wv,wq}"]),
        ([f"h.{i}" for i in range(0, 31, 2)], ["h.{0..30..2}"]),
        (["h.0", "h.1", "h.2", "h.3", "h.7"], ["h.{{0..3},7}"]),
        (["h.0", "h.1"], ["h.{0,1}"]),
        (["h.2", "h.10", "h.1"], ["h.{1,2,10}"]),
        (["h.00", "h.01", "h.0"], ["h.{00,01,0}"]),
        (["layer1", "layer2", "layer3", "layer4", "fc"], ["{layer{1..4},fc}"]),
        (["x", "x.y"], ["x", "x.y"]),
        (["a.w1", "a.w3", "a.w7"], ["a.w{1,3,7}"]),
        (["w1", "w2", "x", "y1"], ["{w1,w2,x,y1}"]),
        (["norm", "h.0.a", "h.1.a"], ["norm", "h.{0,1}.a"]),
        (["self.q", "self.k", "cross.q"], ["self.{q,k}", "cross.q"]),
        ([f"h.{i}.moe" for i in (1, 3, 5, 7, 9)] + ["norm"], ["h.{1..9..2}.moe", "norm"]),
        (["a.*", "a.{b"], ["a.{[*],[{]b}"]),
        (["a", "a", "b"], ["{a,b}"]),
    ],
)
def test_folding_uses_ranges_and_shares_siblings(paths: list[str], globs: list[str]) -> None:
    assert fold_paths(paths) == globs


def test_layers_that_differ_do_not_pull_their_common_modules_apart() -> None:
    paths = [f"h.{i}{rest}" for i in range(8) for rest in (".attn", ".moe" if i % 2 else ".mlp")]
    assert fold_paths(paths) == ["h.{0..7}.attn", "h.{0..6..2}.mlp", "h.{1..7..2}.moe"]


def test_the_order_of_siblings_within_a_layer_does_not_matter() -> None:
    assert fold_paths(["h.0.a", "h.0.b", "h.1.b", "h.1.a"]) == ["h.{0,1}.{a,b}"]


def test_patterns_keep_their_wildcards_when_folded() -> None:
    unmatched = parse_glob("layers.*.{a,wq}.x{0..9}").unmatched(["layers.0.wq.x1"])
    assert fold_alternatives(unmatched) == ["layers.*.a.x{0..9}", "layers.*.wq.x{0,{2..9}}"]
    assert fold_alternatives(["**.a", "", "**.w[qk]"]) == ["**.{a,w[qk]}", ""]


def test_folded_globs_stay_within_the_limits() -> None:
    for paths in (
        [f"layers.{i}.w{c}" for i in range(5000) for c in "qk"],
        [f"m.{'n' * 30}_{i * i}.x" for i in range(100)],
        ["a" * 999, "b" * 999],
    ):
        globs = fold_paths(paths)
        assert len(globs) < len(paths) / 10 or len(paths) == 2
        assert sorted(a for text in globs for a in parse_glob(text).alternatives) == sorted(paths)


MODULES = st.one_of(
    NAMES,
    st.integers(0, 40).map(str),
    st.sampled_from(["00", "01", "layer1", "layer2", "layer3", "layer01", "layer"]),
    st.text(alphabet="a0*?[]{},!^-\\/ é\n", min_size=1, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(MODULES, max_size=4).map(".".join), max_size=20),
    st.lists(st.lists(MODULES, max_size=4).map(".".join), max_size=10),
)
def test_folded_globs_match_exactly_the_folded_paths(paths: list[str], others: list[str]) -> None:
    parsed = [parse_glob(text) for text in fold_paths(paths)]
    selected = [path for one in parsed for path in one.select(dict.fromkeys(paths + others))]
    assert sorted(selected) == sorted(set(paths))  # every path in exactly one glob
    assert not any(one.unmatched(paths) for one in parsed)
    assert len(parsed) <= len(set(paths))
    assert fold_paths(paths) == [one.text for one in parsed]


@settings(max_examples=150, deadline=None)
@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 3))
def test_sets_of_numbers_fold_into_one_glob_no_longer_than_the_list(numbers: set[int], stem: int) -> None:
    names = [f"{'layer'[:stem]}{n}" for n in sorted(numbers)]
    [text] = fold_paths([f"h.{name}" for name in names])
    assert parse_glob(text).alternatives == tuple(f"h.{name}" for name in names)
    assert len(text) <= len("h.{" + ",".join(names) + "}")


def test_a_model_folds_into_the_lines_of_its_block() -> None:
    assert fold_paths(llama(126)) == [
        "",
        "{tok_embeddings,layers,norm,output}",
        "layers.{0..125}",
        "layers.{0..125}.{attention,attention_norm,feed_forward,ffn_norm}",
        "layers.{0..125}.attention.{wq,wk,wv,wo}",
        "layers.{0..125}.feed_forward.w{1..3}",
    ]
