"""The JSON Schema and the parser come to the same verdict, entry by entry; the committed schemas are the
present ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Findings, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.glob import GlobError, parse_glob
from parallelizer.language.load import load
from parallelizer.language.parse_plan import parse_plan
from parallelizer.language.placement import PlacementError, parse_flow, parse_placement
from parallelizer.language.plan import Plan
from parallelizer.language.schema import schema_patterns
from parallelizer.language.schema.schema import plan_schema, preset_schema
from parallelizer.language.styles import STYLES, OptionKind, StyleDeclaration
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, read

ROOT = Path(__file__).resolve().parents[3]
PLANS = ROOT / "tests" / "plans"
CONFIGS = config_folder()

PLAN = jsonschema.Draft7Validator(plan_schema(STYLES))
PRESET = jsonschema.Draft7Validator(preset_schema(STYLES))

UNSEEN = {
    "yaml-retyped": "the types that YAML 1.1 gives to keys: an editor sees texts alone",
    "slot-twice": "two styles for one slot: draft 7 does not count what an array contains",
}
"""Codes of what no schema can tell."""

BEYOND = {
    "j: {style: fsdp, min_params: 1e6}": "to JSON 1e6 is the whole number 1000000",
    "k: {style: fsdp, min_params: 010}": "to YAML 1.2 010 is ten",
    "a: {style: fsdp, min_params: 012}": "as above",
    "f: 1.0": "to JSON 1.0 is the whole number 1",
    "layers.{0..9999}: fsdp": "too many alternatives: a pattern does not count",
}
"""Other wrong entries of the bad plans that the schema lets pass, and why."""


def data(node: Node | None) -> Any:
    """What an editor makes of a node: the core types of YAML 1.2, in which `on` and `1_000` are texts."""
    if isinstance(node, MappingNode):
        return {key.text: data(value) for key, value in node}
    if isinstance(node, SequenceNode):
        return [data(item) for item in node.items]
    if node is None:
        return None
    if not node.plain:
        return node.text
    if node.text in ("", "~", "null", "Null", "NULL"):
        return None
    if node.text.lower() in ("true", "false") and node.text[1:] in ("rue", "alse", "RUE", "ALSE"):
        return node.text.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]+", node.text, re.ASCII):
        return int(node.text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", node.text, re.ASCII):
        return float(node.text)
    return node.text


def entries(path: Path) -> Iterator[tuple[str, MappingNode]]:
    """A file as many plans, each with one entry of its own: its source, and the plan."""
    text = path.read_text()
    node = read(text, str(path))
    assert isinstance(node, MappingNode)
    span = node.span
    whole = MappingNode(((Scalar("a", True, span), Scalar("fsdp", True, span)),), span)
    other = (Scalar("rules", True, span), whole)

    def source(value: Node | Scalar) -> str:
        return text.split("\n")[value.span.line - 1].strip()

    for key, value in node:
        if not isinstance(value, MappingNode) or key.text not in ("layouts", "rules", "buffers"):
            rest = () if key.text == "rules" else (other,)
            yield source(key), MappingNode(((key, value), *rest), span)
            continue
        for name, below in value:
            parts = list(below) if key.text == "buffers" and isinstance(below, MappingNode) else []
            single = [MappingNode(((name, MappingNode((part,), span)),), span) for part in parts] or [
                MappingNode(((name, below),), span)
            ]
            for part, where in zip(single, [p[0] for p in parts] or [name], strict=True):
                rest = () if key.text == "rules" else (other,)
                yield source(where), MappingNode(((key, part), *rest), span)


def parser_finds(node: MappingNode) -> set[str]:
    """The codes of what the parser finds in a plan."""
    findings = Findings()
    extends = node.get("extends")
    parse_plan(node, Plan("p", "p.yaml"), findings)
    named = extends is None or (isinstance(extends, Scalar) and bool(extends.text))
    return {found.code for found in findings.items} | (set() if named else {"wrong-type"})


def bad_plans() -> Iterator[tuple[str, str, MappingNode]]:
    """Each entry of every bad plan that is YAML and a map: its name, its source, and a plan of it alone."""
    for path in sorted((PLANS / "bad").rglob("*.yaml")):
        try:
            node = read(path.read_text(), str(path))
        except (PlanError, UnicodeDecodeError):
            continue
        if isinstance(node, MappingNode) and "presets" not in path.parts:
            for source, single in entries(path):
                yield f"{path.stem}:{source}", source, single


BAD = list(bad_plans())


@pytest.mark.parametrize(("source", "node"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_schema_and_parser_come_to_the_same_verdict(source: str, node: MappingNode) -> None:
    accepted, found = PLAN.is_valid(data(node)), parser_finds(node)
    if source in BEYOND:
        assert accepted and found, "the schema sees this after all: take it off the list"
    elif not found or found - UNSEEN.keys():
        assert accepted == (not found), [e.message for e in PLAN.iter_errors(data(node))]


VALUES = [
    *(
        "maybe",
        "3",
        "0",
        "-1",
        "1_000",
        "x",
        "a b",
        '""',
        "$x",
        '"${x}"',
        "largest",
        "bfloat16",
        "bf16",
        "tp",
        "tpp",
    ),
    *("shard(1)", "shard", "partial", "shard(1) -> replicate", "shard(1) ->", "-> a", "full", "selective"),
    *(
        "[]",
        "[x]",
        "[1]",
        "[1, 2]",
        "[1, 0]",
        "[x, 1_000]",
        "[[1]]",
        "{}",
        "{x: replicate}",
        "{0: replicate}",
    ),
    *("{x: }", "{x: [1]}", "{tp: shard(0)}", "{x: {tp: shard(1)}}", "{x: {foo: shard(1)}}", "{x: {tp: {}}}"),
    *("{tp: shard(0), x: shard(1)}", "{tp: {}}", "{a.b: replicate}"),
    *(
        "a.b",
        "[a.b]",
        "[a.b, c.d.e]",
        "[a..b, c]",
        "[.a, b]",
        "[a., b]",
        "{x: [1, a.b]}",
        "{x: [1, 2], y: [1]}",
    ),
]


@pytest.mark.parametrize(
    ("style", "option"), [(name, option) for name, s in STYLES.items() for option in s.options]
)
def test_schema_and_parser_judge_every_option_alike(style: str, option: str) -> None:
    needed = ", params: shard(0)" if style == "shard-params" and option != "params" else ""
    # To an editor these are no texts, and so no names of layouts or attributes, as to the parser they are.
    typed = ["true", "False"] if "bool" in STYLES[style].options[option].kind else []
    for value in [*VALUES, *typed]:
        text = f"rules: {{a: {{style: {style}, {option}: {value}{needed}}}}}"
        node = read(text, "p.yaml")
        assert isinstance(node, MappingNode)
        found = parser_finds(node)
        assert PLAN.is_valid(data(node)) == (not found - UNSEEN.keys()), text


def test_many_entries_are_wrong_and_some_are_right() -> None:
    wrong = [case for case in BAD if parser_finds(case[2]) - UNSEEN.keys()]
    right = [case for case in BAD if not parser_finds(case[2])]
    assert len(wrong) > 100 and len(right) >= 5


@pytest.mark.parametrize(
    "path",
    [*sorted((PLANS / "good").glob("*.yaml")), *sorted((CONFIGS / "plans").glob("*.yaml"))],
    ids=lambda path: path.stem,
)
def test_good_plans_are_valid(path: Path) -> None:
    def find(name: str, span: Any) -> str:
        beside = path.parent / f"{name}.yaml"
        return (
            str(path) if span is None else str(beside if beside.exists() else CONFIGS / "plans" / beside.name)
        )

    assert load(str(path), find).rules
    PLAN.validate(data(read(path.read_text(), str(path))))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "version: 1", "rules: {}", "layouts: {a: replicate}", "rules: null", "3", "buffers: []\nextends: a"],
)  # fmt: skip
def test_what_is_no_plan_is_none_to_both(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(PlanError):
        load("p", lambda name, span: str(tmp_path / "p.yaml"))
    assert not PLAN.is_valid(data(read(text, "p")))


# --- texts ---------------------------------------------------------------------------------------


@given(st.text(st.sampled_from("ab0.*?[]!{},_-$ \\"), max_size=12))
def test_no_glob_that_parses_is_refused(text: str) -> None:
    """But those that the parser refuses for another reason: interpolations, and Hydra's keys."""
    try:
        parse_glob(text)
    except GlobError:
        return
    if "${" not in text and not re.fullmatch(r"_.+_", text):
        assert re.search(schema_patterns.GLOB, text), text


@given(
    st.text(st.sampled_from("shard()10-> streapl_"), max_size=24) | st.sampled_from(["shard", "shard ->a"])
)
def test_placements_and_flows_are_those_that_parse(text: str) -> None:
    for parse, pattern in (
        (parse_placement, schema_patterns.PLACEMENT),
        (lambda t: parse_flow(t, output=True), schema_patterns.FLOW),
    ):
        try:
            parse(text)
            parses = True
        except PlacementError:
            parses = False
        assert bool(re.search(pattern, text)) == parses, text


WRONG_GLOBS = ["a..b", ".a", "a.", "a b", "w[qk", "{a,b", "a}", "**x", "x**.y", "a\x07", "_target_", "a.${b}"]


@pytest.mark.parametrize("text", WRONG_GLOBS)
def test_globs_that_are_seen_to_be_wrong(text: str) -> None:
    assert not re.search(schema_patterns.GLOB, text)


# --- presets -------------------------------------------------------------------------------------

PRESETS = sorted((CONFIGS / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_shipped_presets_are_valid(path: Path) -> None:
    PRESET.validate(data(read(path.read_text(), str(path), trusted=True)))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("mesh: {tp: 2}", True),
        ("mesh: {tpp: 2}", False),
        ("mesh: {tp: 0}", False),
        ("mesh: {tp: two}", False),
        ("mesh: {tp: 1.5}", False),
        ("mesh: {tp: '${train.accumulate}'}", True),
        ("redistribute: min-cost", True),
        ("redistribute: best", False),
        ("max_unsharded: 0.01", True),
        ("max_unsharded: null", True),
        ("max_unsharded: 2", False),
        ("max_unsharded: few", False),
        ("mesh: {dp_shard: -2}", False),
        ("mehs: {tp: 2}", False),
        ("mesh: [2]", False),
        ("layouts: {stream: replicate}", True),
        ("layouts: {stream: shrd(1)}", False),
        ("layouts: [stream]", False),
        ("rules: ['layers.*: checkpoint']", True),
        ("rules: [{layers.*: checkpoint}]", True),
        ("rules: [{layers.*: chekpoint}]", False),
        ("rules: [3]", False),
        ("rules: ['layers.*:checkpoint']", False),
        ("rules: {layers.*: checkpoint}", False),
        ("styles: {fsdp: null}", True),
        ("styles: {fsdp: {reshard_after_forward: false, min_size: null}}", True),
        ("styles: {fsdp: {reshard_after_forward: never}}", False),
        ("styles: {fsdp: {param_dtype: bf16}}", False),
        ("styles: {fsdp: false}", False),
        ("styles: {fspd: {min_size: 3}}", False),
        ("styles: {fsdp: {min_siz: 3}}", False),
        ("styles: {fsdp: {param_dtype: '${train.dtype}'}}", True),
    ],
)
def test_schema_and_reader_judge_a_preset_alike(text: str, valid: bool, tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text(f"defaults: [base]\n{text}\n")
    assert PRESET.is_valid({"defaults": ["base"], **data(read(text, "mine", trusted=True))}) == valid
    try:
        from_config(*compose_config(["parallel=mine"], str(tmp_path)))
        read_without_findings = True
    except PlanError as error:
        read_without_findings = all(d.code == "unmatched-glob" for d in error.diagnostics)
    assert read_without_findings == valid


def test_an_axis_may_take_what_the_others_leave(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text("defaults: [base]\nmesh: {dp_shard: -1, tp: 2}\n")
    read = from_config(*compose_config(["parallel=mine", "world_size=8"], str(tmp_path)))
    assert read.mesh.sizes["dp_shard"] == 4
    assert PRESET.is_valid({"mesh": {"dp_shard": -1, "tp": 2}})


# --- what is committed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "made"), [("plan", plan_schema), ("preset", preset_schema)])
def test_the_committed_schema_is_the_present_one(name: str, made: Any) -> None:
    """`python -m parallelizer schema > docs/schema/plan.json`, and with `--preset` for the other."""
    assert json.loads((ROOT / "docs" / "schema" / f"{name}.json").read_text()) == made(STYLES)


@pytest.mark.parametrize(
    "path", [*sorted((CONFIGS / "plans").glob("*.yaml")), *PRESETS], ids=lambda path: path.stem
)
def test_shipped_files_name_their_schema(path: Path) -> None:
    first = path.read_text().split("\n")[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert found is not None, first
    wanted = "plan" if path.parent.name == "plans" else "preset"
    assert (path.parent / found[1]).resolve() == ROOT / "docs" / "schema" / f"{wanted}.json"


def test_every_kind_of_option_has_a_schema() -> None:
    """An option of a kind that is not known is not checked, instead of breaking the schema."""
    kinds = {option.kind for style in STYLES.values() for option in style.options.values()}
    for kind in (*kinds, "a kind of somebody's own"):
        declared = StyleDeclaration("x", "io", "tp", "", {"o": OptionKind(kind, "what it does", ("a", "1"))})
        made = plan_schema({"x": declared})["definitions"]["style-x"]["properties"]["o"]
        assert made["description"] == "what it does"
        assert len(made) > 1 or kind not in kinds
