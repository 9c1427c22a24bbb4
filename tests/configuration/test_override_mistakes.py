"""Overrides that do not parse: which part is marked, and that what is advised does parse."""

from __future__ import annotations

import shlex

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.override_mistakes import OverrideSyntaxError
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError, Span


def cut(span: Span | None) -> str:
    assert span is not None
    return span.file.removeprefix("<override ").removesuffix(">")[span.column - 1 : span.end_column - 1]


@pytest.mark.parametrize(
    ("overrides", "wrong", "message", "advice"),
    [
        (["++parallel.layouts.stream=shard(1)"], "shard(1)", "a function call", "\"++parallel.layouts.stream='shard(1)'\""),
        (["plan=a=b"], "a=b", "Hydra cannot read 'a=b'", "\"plan='a=b'\""),
        (["plan=a'b"], "a'b", "Hydra cannot read", "'plan=\"a'\"'\"'b\"'"),
        (["train.steps=${"], "${", "Hydra cannot read '${'", "\"train.steps='${'\""),
        (["rules=[a.w[qk]: fsdp]"], "[a.w[qk]: fsdp]", "these rules without quotes", "'rules=[\"a.w[qk]: fsdp\"]'"),
        (["rules=[a: {style: fsdp}]"], "[a: {style: fsdp}]", "without quotes", "'rules=[\"a: {style: fsdp}\"]'"),
        (["rules=[a.{b,c}: fsdp]"], "[a.{b,c}: fsdp]", "without quotes", "'rules=[\"a.{b,c}: fsdp\"]'"),
        (["rules=[a:", "fsdp]"], "[a:", "without quotes", "'rules=[\"a: fsdp\"]'"),
        (["rules=[a:", "{style:", "fsdp}]", "train.steps=3"], "[a:", "without quotes", "'rules=[\"a: {style: fsdp}\"]'"),
        (["++parallel.rules=[a: [fsdp]]"], "[a: [fsdp]]", "without quotes", "'++parallel.rules=[\"a: [fsdp]\"]'"),
        (['rules=["a: b]'], '["a: b]', "without quotes", "'rules=[\"layers.*: checkpoint\"]'"),
        (["rules=["], "[", "without quotes", "'rules=[\"layers.*: checkpoint\"]'"),
    ],
)  # fmt: skip
def test_an_override_that_does_not_parse_is_shown_in_the_right_quotes(
    overrides: list[str], wrong: str, message: str, advice: str
) -> None:
    with pytest.raises(OverrideSyntaxError) as caught:
        compose_config(overrides)
    found = caught.value.diagnostic
    assert found.code == "override-syntax" and cut(found.span) == wrong
    assert message in found.message
    assert found.help is not None and found.help.endswith(advice)
    assert "hydra.cc" not in found.message
    [word] = shlex.split(advice)  # what the shell makes of the advice parses
    try:
        from_config(*compose_config([word]))
    except PlanError as error:
        assert all(found.code != "override-syntax" for found in error.diagnostics)


@pytest.mark.parametrize("word", ["plan", "fsdp]", "--", "a b"])
def test_a_word_that_is_no_override_is_marked_whole(word: str) -> None:
    with pytest.raises(OverrideSyntaxError) as caught:
        compose_config([word])
    assert cut(caught.value.diagnostic.span) == word
    assert caught.value.diagnostic.help == "write an override as key=value"
    with pytest.raises(OverrideSyntaxError) as caught:
        compose_config([word, "rules=[a"])
    assert "'rules=[" in (caught.value.diagnostic.help or "")
