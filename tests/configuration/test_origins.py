"""Where keys were written, against what Hydra composes: the text at a key's place is the key's value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, read_text
from tests.chosen import marks_at

PRESETS = ["single", "tp8_cp2", "fsdp1024_cp2_tp8"]

USERS: dict[str, str] = {
    "mine.yaml": "defaults:\n  - train\n  - override parallel: deep\n  - _self_\ntrain: {seq_len: 64}\n",
    "self_first.yaml": "defaults:\n  - _self_\n  - train\nparallel: {mesh: {tp: 7}}\ntrain: {seq_len: 64}\n",
    "parallel/deep.yaml": "defaults: [middle]\nmesh: {tp: 2}\nrules:\n  - layers.*: checkpoint\n  - 'norm: fsdp'\n",
    "parallel/middle.yaml": "defaults: [base, _self_]\nmesh: {tp: 4, cp: 2}\nlayouts: {stream: shard(1), b: partial}\n",
    "parallel/under.yaml": "defaults: [_self_, middle]\nmesh: {tp: 8, ep: 2}\n",
    "parallel/global.yaml": "# @package _global_\n# A comment.\nparallel: {mesh: {tp: 3}}\ntrain: {seq_len: 32}\n",
    "parallel/absolute.yaml": "defaults: [/parallel/middle, _self_]\nmesh: {cp: 4}\n",
    "parallel/nested/inner.yaml": "mesh: {tp: 5}\n",
    "parallel/anchored.yaml": "defaults: [base]\nmesh: {tp: &n 2, cp: *n}\nstyles: {fsdp: !!map {min_size: 4}}\n",
    "parallel/optional.yaml": "defaults: [base, {optional nested: nope}, _self_]\nmesh: {tp: 6}\n",
}


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of somebody's own configuration."""
    for name, text in USERS.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def cut(span: Span | None) -> str:
    """The text at a place."""
    assert span is not None
    if span.file.startswith("<override "):
        text = span.file.removeprefix("<override ").removesuffix(">")
    else:
        text = read_text(span.file, span.file).split("\n")[span.line - 1]
    return text[span.column - 1 : span.end_column - 1]


def leaves(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            leaf
            for name, below in value.items()
            for leaf in leaves(below, f"{key}.{name}" if key else str(name))
        ]
    return [(key, value)]


def unlike_its_text(key: str, value: Any, origins: Origins) -> str | None:
    """Why the text at a key's place is not the key's value, if it is not."""
    text = cut(origins.span(key)).strip("\"'")
    if text.startswith("&"):
        text = text.split()[1]
    if isinstance(value, list):
        return None
    # An interpolation was followed to what it names.
    said = OmegaConf.to_container(OmegaConf.create(f"a: {text}"))["a"] if ":" not in text else text  # type: ignore[call-overload,index]
    return None if said == value or str(said) == str(value) else f"{key}: {value!r} is written as {text!r}"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *(pytest.param("train", [f"parallel={p}"], marks=marks_at(i)) for i, p in enumerate(PRESETS)),
        ("train", ["parallel=tp8_cp2", "parallel.mesh.cp=4", "++train.seq_len=8", "model.dim=64"]),
        ("train", ["parallel=deep"]),
        ("train", ["parallel=under"]),
        ("train", ["parallel=global"]),
        ("train", ["parallel=absolute"]),
        ("train", ["parallel=optional"]),
        ("train", ["parallel=anchored"]),
        ("train", ["parallel=[middle,deep]"]),
        ("train", ["parallel=[deep,middle]"]),
        ("train", ["train.seq_len=1", "train.seq_len=2"]),
        ("train", ["train={seq_len: 5, steps: 3}"]),
        ("mine", []),
        ("mine", ["parallel=tp2"]),
        ("self_first", []),
    ],
    ids=str,
)
def test_the_text_at_the_place_of_a_key_is_its_value(users: Path, name: str, overrides: list[str]) -> None:
    config, origins = compose_config(overrides, str(users), name)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    wrong = []
    for group in ("parallel", "train", "model", "plan", "device"):
        for key, value in leaves({group: resolved[group]}):
            if (
                isinstance(value, list | dict)
                or "=" in cut(origins.span(key))
                or "{" in cut(origins.span(key))
            ):
                continue
            if key == "parallel.mesh.cp" and "parallel=anchored" in overrides:
                assert cut(origins.span(key)) == "*n"
                continue
            wrong.append(unlike_its_text(key, value, origins))
    assert [reason for reason in wrong if reason] == []
    assert len(wrong) > 20


@pytest.mark.parametrize(
    ("overrides", "key", "text", "file"),
    [
        (["parallel=deep"], "parallel.mesh.tp", "2", "conf/parallel/deep.yaml"),
        (["parallel=deep"], "parallel.mesh.cp", "2", "conf/parallel/middle.yaml"),
        (["parallel=deep"], "parallel.mesh.ep", "1", str(config_folder() / "parallel" / "base.yaml")),
        (["parallel=under"], "parallel.mesh.tp", "4", "conf/parallel/middle.yaml"),
        (["parallel=under"], "parallel.mesh.ep", "1", str(config_folder() / "parallel" / "base.yaml")),
        (["parallel=deep"], "parallel.rules.1", "'norm: fsdp'", "conf/parallel/deep.yaml"),
        (["parallel=global"], "train.seq_len", "256", str(config_folder() / "train.yaml")),  # _self_ comes last
        (["parallel=deep"], "plan", "llama", str(config_folder() / "model" / "llama_debug.yaml")),
        (["parallel=deep"], "parallel", "deep", "<override parallel=deep>"),
        (["parallel=deep", "plan=x"], "plan", "x", "<override plan=x>"),
        (["model.plan=x"], "plan", "x", "<override model.plan=x>"),
        (["train.dtype=bfloat16"], "parallel.styles.fsdp.param_dtype", "bfloat16", "<override train.dtype=bfloat16>"),
        (["++parallel.layouts.a='b(1)'"], "parallel.layouts.a", "'b(1)'", "<override ++parallel.layouts.a='b(1)'>"),
        (["plan="], "plan", "", "<override plan=>"),
        (["parallel.mesh={tp: 2}"], "parallel.mesh.tp", "2", "<override parallel.mesh={tp: 2}>"),
        (["parallel=deep", "parallel.mesh={ep: 2}"], "parallel.mesh.tp", "2", "conf/parallel/deep.yaml"),
        (["parallel.mesh={tp: 2}", "parallel.mesh={tp: 8}"], "parallel.mesh.tp", "8", "<override parallel.mesh={tp: 8}>"),
        (["parallel.mesh.tp=4", "parallel.mesh={cp: 4}"], "parallel.mesh.tp", "4", "<override parallel.mesh.tp=4>"),
        (["parallel={mesh: {cp: 4, tp: 16}}"], "parallel.mesh.tp", "16", "<override parallel={mesh: {cp: 4, tp: 16}}>"),
        (["~parallel.mesh.tp"], "parallel.mesh.tp", "tp", "<override ~parallel.mesh.tp>"),
        (["~parallel.mesh.tp=1"], "parallel.mesh.tp", "tp", "<override ~parallel.mesh.tp=1>"),
        (["~parallel.mesh"], "parallel.mesh.tp", "mesh", "<override ~parallel.mesh>"),
    ],
)  # fmt: skip
def test_the_narrowest_place_wins(users: Path, overrides: list[str], key: str, text: str, file: str) -> None:
    _, origins = compose_config(overrides, str(users))
    span = origins.span(key)
    assert span is not None and span.file == file
    assert cut(span) == text


# --- an oracle: what is written anew at a key's place is the key's value -----------------------------

SCENARIOS: list[tuple[str, list[str]]] = [
    ("train", ["parallel=deep", "++parallel.layouts={x: 5, y: {}}"]),
    ("train", ["parallel=[middle,deep]"]),
    ("train", ["parallel=under", "parallel.mesh={ep: 4, cp: 4}", "parallel.mesh.ep=8"]),
    ("train", ["parallel=nested/inner", "+exp=global"]),
    ("train", ["+exp=relocated", "parallel=absolute"]),
    ("train", ["+exp=sweeping", "++train.seq_len=9", "+train.new=4"]),
    ("mine", ["~parallel.rules", "~parallel.mesh.pp"]),
    ("self_first", ["parallel=optional"]),
    ("nesting", []),
    ("nesting", ["exp=relocated", "parallel=middle"]),
    ("nesting", ["train={seq_len: 3, eval_every: 4}", "train.seq_len=11"]),
]

MORE_USERS = {
    "nesting.yaml": "defaults: [self_first, {exp: global}, {override parallel: under}, _self_]\ntrain: {steps: 41}\n",
    "exp/global.yaml": "# @package _global_\ndefaults: [override /parallel: deep]\nparallel: {mesh: {cp: 6}}\ntrain: {seed: 3}\n",
    "exp/relocated.yaml": "# @package parallel.mesh\ndp_shard: 12\nep: 14\n",
    "exp/sweeping.yaml": "# @package _global_\ndefaults: [/exp/relocated@parallel.mesh, /exp/inner@train, _self_]\n"
    "parallel: {mesh: {ep: 15}}\n",
    "exp/inner.yaml": "seed: 77\nsteps: 78\n",
}  # fmt: skip


def written_anew(span: Span, text: str, overrides: list[str]) -> tuple[list[str], Callable[[], None]]:
    """The overrides, or a file, with another text at a place; and how to undo it."""
    if span.file.startswith("<override "):
        old = span.file.removeprefix("<override ").removesuffix(">")
        new = old[: span.column - 1] + text + old[span.end_column - 1 :]
        at = len(overrides) - 1 - overrides[::-1].index(old)
        return [*overrides[:at], new, *overrides[at + 1 :]], lambda: None
    path = Path(span.file)
    before = path.read_text()
    lines = before.split("\n")
    line = lines[span.line - 1]
    lines[span.line - 1] = line[: span.column - 1] + text + line[span.end_column - 1 :]
    path.write_text("\n".join(lines))
    return overrides, lambda: path.write_text(before) and None


@pytest.mark.parametrize(
    ("name", "overrides"), [pytest.param(*s, marks=marks_at(i)) for i, s in enumerate(SCENARIOS)], ids=str
)
def test_what_is_written_anew_at_the_place_of_a_key_becomes_its_value(
    users: Path, name: str, overrides: list[str]
) -> None:
    for file, text in MORE_USERS.items():
        (users / file).parent.mkdir(exist_ok=True)
        (users / file).write_text(text)
    config, origins = compose_config(overrides, str(users), name)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    tried = 0
    for key, value in leaves({group: plain[group] for group in ("parallel", "train")}):
        span = origins.span(key)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        assert span is not None, key
        if not span.file.startswith(("conf/", "<override ")):
            continue
        changed, undo = written_anew(span, "977", overrides)
        again, _ = compose_config(changed, str(users), name)
        undo()
        assert OmegaConf.select(again, key) == 977, (key, span)
        tried += 1
    assert tried


def test_packages_on_the_search_path(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = users.parent / "package_of_origins_test" / "conf"
    (package / "parallel").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "parallel" / "theirs.yaml").write_text("defaults: [base]\nmesh: {tp: 4}\n")
    monkeypatch.syspath_prepend(str(users.parent))
    path = "hydra.searchpath=[pkg://package_of_origins_test.conf]"
    _, origins = compose_config([path, "parallel=theirs"])
    span = origins.span("parallel.mesh.tp")
    assert span is not None and span.file.endswith("conf/parallel/theirs.yaml") and cut(span) == "4"


def test_an_interpolation_may_be_relative(users: Path) -> None:
    (users / "parallel" / "own.yaml").write_text(
        "defaults: [base]\nmesh: {tp: 4, cp: '${.tp}', ep: '${..mesh.tp}'}\n"
    )
    _, origins = compose_config(["parallel=own"], str(users))
    assert cut(origins.span("parallel.mesh.cp")) == cut(origins.span("parallel.mesh.ep")) == "4"


@pytest.mark.parametrize("key", ["nothing", "train.nothing", "parallel.rules.9", "model.dim.x", "", "."])
def test_what_was_written_nowhere_has_no_place(users: Path, key: str) -> None:
    origins = Origins(["train.steps=3"], [("train", "")], [users, config_folder()])
    assert origins.span(key) is None and origins.key_span(key) is None


def test_a_key_that_its_group_does_not_have_is_placed_at_the_choice(users: Path) -> None:
    _, origins = compose_config(["parallel=deep"], str(users))
    assert origins.span("parallel.nothing") == Span("<override parallel=deep>", 1, 10, 14)
    _, origins = compose_config([], str(users))
    assert origins.span("parallel.nothing") == Span(str(config_folder() / "parallel" / "single.yaml"))


def test_keys_have_places_of_their_own(users: Path) -> None:
    _, origins = compose_config(["parallel=deep", "++parallel.styles.fsdp.min_size=3"], str(users))
    assert cut(origins.key_span("parallel.layouts.stream")) == "stream"
    assert cut(origins.key_span("parallel.styles.fsdp.min_size")) == "min_size"
    _, origins = compose_config(["++parallel.styles={fsdp: null}"], str(users))
    assert cut(origins.key_span("parallel.styles.fsdp")) == "fsdp"


# --- values as nodes -----------------------------------------------------------------------------


def places(node: Node) -> list[str]:
    """The text at the place of every scalar, keys too."""
    if isinstance(node, Scalar):
        return [cut(node.span)]
    if isinstance(node, SequenceNode):
        return [text for item in node.items for text in places(item)]
    return [text for key, value in node for text in (cut(key.span), *places(value))]


def node_of(origins: Origins, config: Any, key: str) -> Node:
    value = OmegaConf.select(config, key)
    return origins.node(
        key, OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
    )


@pytest.mark.parametrize(
    ("overrides", "key", "texts"),
    [
        (["parallel=deep"], "parallel.rules", ["layers.*", "checkpoint", "'norm: fsdp'"]),
        (["parallel=deep"], "parallel.layouts", ["stream", "shard(1)", "b", "partial"]),
        (["parallel=deep"], "parallel.mesh",
         ["pp", "1", "dp_replicate", "1", "dp_shard", "1", "cp", "2", "ep", "1", "tp_outer", "1", "tp", "2"]),
        (["++parallel.layouts={a: replicate, b: partial}"], "parallel.layouts", ["a", "replicate", "b", "partial"]),
        (["rules=[a: fsdp, 'b: fsdp']"], "rules", ["a: fsdp", "b: fsdp"]),
        (['rules=["a.b: fsdp", "b: fsdp"]'], "rules", ["a.b: fsdp", "b: fsdp"]),
        (["rules=[{a: {style: fsdp, cpu_offload: true}}]"], "rules", ["a", "style", "fsdp", "cpu_offload", "true"]),
        (["rules=[3]"], "rules", ["3"]),
        (["rules=['a: \\'b\\'']"], "rules", ["['a: \\'b\\'']"]),
        (["rules=[]"], "rules", []),
        (["parallel=deep", "++parallel.layouts.b=c"], "parallel.layouts", ["stream", "shard(1)", "b", "c"]),
    ],
)  # fmt: skip
def test_the_parts_of_a_value_keep_their_places(
    users: Path, overrides: list[str], key: str, texts: list[str]
) -> None:
    config, origins = compose_config(overrides, str(users))
    assert places(node_of(origins, config, key)) == texts


def test_equal_rules_in_an_override_have_different_places(users: Path) -> None:
    config, origins = compose_config(["rules=['a: fsdp', 'a: fsdp']"], str(users))
    node = node_of(origins, config, "rules")
    assert isinstance(node, SequenceNode)
    assert [item.span.column for item in node.items] == [9, 20]


def test_without_any_origin_a_value_is_a_node_all_the_same() -> None:
    node = Origins().node("parallel.layouts", {"a": "replicate", "b": [1, True, None]})
    assert isinstance(node, MappingNode)
    [(_, a), (_, b)] = node
    assert isinstance(a, Scalar) and isinstance(b, SequenceNode)
    assert [item.text for item in b.items if isinstance(item, Scalar)] == ["1", "true", "null"]
    assert a.span == Span("<configuration>")


def test_files_that_cannot_be_read_have_no_places(users: Path) -> None:
    (users / "parallel" / "bad.yaml").write_bytes(b"mesh: {tp: \xff}")
    (users / "parallel" / "list.yaml").write_text("- a\n")
    for option in ("bad", "list", "missing"):
        assert Origins([], [(f"parallel/{option}", "parallel")], [users]).key_span("parallel.mesh.tp") is None


def test_interpolations_that_name_one_another_end(users: Path) -> None:
    (users / "loop.yaml").write_text("a: ${b}\nb: ${a}\n")
    assert cut(Origins([], [("loop", "")], [users]).span("a")) in ("${a}", "${b}")


def test_a_file_is_read_once(users: Path) -> None:
    origins = Origins([], [("parallel/deep", "parallel")], [users])
    assert cut(origins.span("parallel.mesh.tp")) == "2"
    (users / "parallel" / "deep.yaml").unlink()
    assert origins.span("parallel.rules") is not None
