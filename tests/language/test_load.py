"""Plans by name and path, and what they extend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.load import MAX_EXTENDS, find_along, load, load_plan
from parallelizer.language.plan import REPLICATE, Plan

GOOD = Path(__file__).parents[1] / "plans" / "good"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a folder `plans`."""
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **plans: str) -> None:
    for name, text in plans.items():
        (folder / "plans" / f"{name}.yaml").write_text(text)


def refused(name: str, *folders: Path) -> list[Diagnostic]:
    with pytest.raises(PlanError) as caught:
        load(name, find_along(folders or [Path.cwd()]), Span("<override plan=x>", 1, 6, 7))
    return list(caught.value.diagnostics)


def styles(plan: Plan) -> list[tuple[str, str]]:
    return [(rule.key, rule.uses[0].style if rule.uses else "none") for rule in plan.rules]


def in_good(name: str, span: Span | None) -> str:
    return str(GOOD / f"{name}.yaml")


# --- extends -------------------------------------------------------------------------------------


def test_a_child_puts_its_rules_last_and_merges_layouts_and_buffers() -> None:
    plan = load("grandchild", in_good)
    assert plan.name == "grandchild" and plan.file.endswith("grandchild.yaml")
    assert styles(plan) == [("layers.*", "fsdp"), ("norm", "sequence"), ("norm", "none")]
    assert plan.layouts == {"stream": REPLICATE, "logits": REPLICATE}
    assert {name: b.make or b.dim for name, b in plan.batch.items()} == {
        "input_ids": 1,
        "labels": "positions",
    }
    assert {name: b.dim for name, b in plan.buffers.items()} == {"rope.*": 2, "alibi": 1}
    assert [Path(rule.span.file).stem for rule in plan.rules] == ["parent", "parent", "child"]


@pytest.mark.parametrize("links", [MAX_EXTENDS, MAX_EXTENDS + 1])
def test_plans_extend_one_another_eight_deep(folder: Path, links: int) -> None:
    write(folder, p0="rules: {m0: fsdp}\n")
    for n in range(1, links + 1):
        write(folder, **{f"p{n}": f"extends: p{n - 1}\nrules: {{m{n}: fsdp}}\n"})
    if links <= MAX_EXTENDS:
        assert [key for key, _ in styles(load(f"p{links}", find_along([folder])))] == [
            f"m{n}" for n in range(links + 1)
        ]
    else:
        [found] = refused(f"p{links}")
        assert found.code == "extends-depth"
        assert found.span == Span("plans/p1.yaml", 1, 10, 12)


@pytest.mark.parametrize(
    ("plans", "file"),
    [
        ({"a": "extends: a\nrules: {x: fsdp}\n"}, "plans/a.yaml"),
        ({"a": "extends: b\n", "b": "extends: a\n"}, "plans/b.yaml"),
        ({"a": "extends: b\n", "b": "extends: c\n", "c": "extends: b\n"}, "plans/c.yaml"),
        ({"a": "extends: ./plans/a.yaml\n"}, "plans/a.yaml"),
        ({"a": "extends: plans/../plans/a.yaml\n"}, "plans/a.yaml"),
    ],
)
def test_a_circle_is_found_where_it_closes(folder: Path, plans: dict[str, str], file: str) -> None:
    write(folder, **plans)
    [found] = refused("a")
    assert found.code == "extends-cycle"
    assert found.span is not None and found.span.file == file and found.span.column == 10


def test_a_circle_through_a_link_is_one_too(folder: Path) -> None:
    write(folder, a="extends: b\n")
    (folder / "plans" / "b.yaml").symlink_to(folder / "plans" / "a.yaml")
    assert [found.code for found in refused("a")] == ["extends-cycle"]


def test_two_children_may_share_a_parent_and_a_plan_be_asked_for_twice(folder: Path) -> None:
    write(folder, a="rules: {x: fsdp}\n", b="extends: a\n", c="extends: a\n")
    find = find_along([folder])
    assert styles(load("b", find)) == styles(load("c", find)) == styles(load("b", find)) == [("x", "fsdp")]


def test_mistakes_of_child_and_parent_come_together(folder: Path) -> None:
    write(folder, parent="rules: {a: fdsp}\nlayrs: 1\n", child="extends: parent\nrules: {b: colwize}\n")
    found = refused("child")
    assert [(d.span.file, d.code) for d in found if d.span] == [
        ("plans/child.yaml", "unknown-style"),
        ("plans/parent.yaml", "unknown-style"),
        ("plans/parent.yaml", "unknown-key"),
    ]


@pytest.mark.parametrize("parent", ["nobody", "./nobody.yaml", "broken"])
def test_a_parent_that_cannot_be_read_does_not_hide_mistakes_of_the_child(folder: Path, parent: str) -> None:
    write(folder, child=f"extends: {parent}\nrules: {{b: colwize}}\n", broken="rules: [\n")
    reason = "yaml-syntax" if parent == "broken" else "plan-not-found"
    assert {found.code for found in refused("child")} == {"unknown-style", reason}


def test_a_missing_parent_is_reported_where_it_is_named(folder: Path) -> None:
    write(folder, child="rules: {b: fsdp}\nextends: paren\n", parent="rules: {a: fsdp}\n")
    [found] = refused("child")
    assert found.code == "plan-not-found" and "did you mean parent?" in (found.help or "")
    assert found.span == Span("plans/child.yaml", 2, 10, 15)


# --- names and paths -----------------------------------------------------------------------------


def test_a_name_is_looked_up_along_the_folders_in_order(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (folder / name / "plans").mkdir(parents=True)
        (folder / name / "plans" / "p.yaml").write_text(f"rules: {{{name}: fsdp}}\n")
    (folder / "two" / "plans" / "q.yaml").write_text("extends: p\n")
    find = find_along([folder / "one", folder / "two"])
    assert styles(load("p", find)) == styles(load("q", find)) == [("one", "fsdp")]
    assert load("q", find).file == "two/plans/q.yaml"


@pytest.mark.parametrize(
    "name", ["./mine.yaml", "mine.yaml", "mine.yml", "sub/mine.yaml", "{folder}/sub/mine.yaml"]
)
def test_what_has_a_slash_or_an_ending_is_a_path(folder: Path, name: str) -> None:
    name = name.format(folder=folder)
    (folder / "sub").mkdir()
    (folder / name).write_text("extends: named\nrules: {mine: fsdp}\n")
    write(folder, named="rules: {named: fsdp}\n")
    plan = load(name, find_along([folder]))
    assert plan.file == name and plan.name == "mine"
    assert styles(plan) == [("named", "fsdp"), ("mine", "fsdp")]


@pytest.mark.parametrize(
    ("name", "message", "advice"),
    [
        ("lama", "there is no plan named 'lama'", "did you mean llama? the plans are llama"),
        ("./nope.yaml", "there is no plan file ./nope.yaml", "looked in "),
        ("plans/llama", "there is no plan file plans/llama", "did you mean plans/llama.yaml?"),
        ("./plans", "./plans is a folder", "name a file in it"),
        ("plans/", "plans/ is a folder", "name a file in it"),
        (".", "there is no plan named '.'", "the plans are llama"),
        ("a" * 300, "there is no plan named 'aaa", "the plans are llama"),
        ("x\0y", "there is no plan named", "the plans are llama"),
        ("./x\0y", "there is no plan file", "looked in"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(folder: Path, name: str, message: str, advice: str) -> None:
    write(folder, llama="rules: {a: fsdp}\n")
    [found] = refused(name)
    assert found.code == "plan-not-found"
    assert message in found.message and advice in (found.help or "")
    assert found.span == Span("<override plan=x>", 1, 6, 7)


def test_without_any_plan_there_are_none(tmp_path: Path) -> None:
    [found] = refused("a", tmp_path)
    assert found.help == "the plans are none"


# --- files that are no plan ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty-file"),
        ("# nothing\n", "empty-file"),
        ("---\n", "empty-file"),
        ("version: 1\n", "no-rules"),
        ("version: 1\nrules:\n", "no-rules"),
        ("rules: {}\nlayouts: {a: replicate}\n", "no-rules"),
        ("extends: empty_rules\n", "no-rules"),
        ("- a: fsdp\n", "wrong-type"),
        ("fsdp\n", "wrong-type"),
        ("null\n", "wrong-type"),
        ("rules:\n  a: fsdp\n---\nrules:\n", "yaml-syntax"),
    ],
)
def test_a_file_without_a_plan_in_it_is_refused(folder: Path, text: str, code: str) -> None:
    write(folder, p=text, empty_rules="version: 1\n")
    [found] = refused("p")
    assert found.code == code and found.help
    assert found.span is not None and found.span.file == "plans/p.yaml"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.write_bytes(b"rules: {\xff: fsdp}\n")])
def test_folders_and_other_encodings_are_refused(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder / "plans" / "p.yaml")
    [found] = refused("p")
    assert found.code in ("plan-not-found", "yaml-syntax")


# --- from Python ---------------------------------------------------------------------------------


def test_plans_are_loaded_from_python_by_name_folder_and_path(folder: Path) -> None:
    write(folder, mine="extends: llama\nrules: {layers.*: checkpoint}\n")
    shipped = load_plan("llama")
    mine = load_plan("mine", [folder])
    assert mine.rules[:-1] == shipped.rules and mine.rules[-1].uses[0].style == "checkpoint"
    assert (
        styles(load_plan(folder / "plans" / "mine.yaml"))
        == styles(load_plan("plans/mine.yaml"))
        == styles(mine)
    )
    assert load_plan("llama_tp").layouts == {"stream": REPLICATE}


def test_reading_a_plan_needs_neither_torch_nor_hydra() -> None:
    command = (
        "import sys\n"
        "from parallelizer import load_plan\n"
        "from parallelizer.language.parse_plan import parse_plan\n"
        "assert load_plan('llama_tp').rules\n"
        "print(sorted(name for name in ('torch', 'hydra', 'numpy') if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
