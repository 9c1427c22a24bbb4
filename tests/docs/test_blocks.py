"""Every code block of README.md and docs/ is run, or read by what would run it.

Plans are loaded as plans, presets are held to their schema, Python is run where it stands on its own and its names are
looked up where it does not, commands of consoles are run, and all others have their words looked at. Pages that a test
of their own follows have their commands run there. A block is left out only where a comment above it says why:
`<!-- not run: it needs a cluster -->`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import json
import shlex
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

import parallelizer
from parallelizer.child.children import in_children
from parallelizer.language.load import load_plan
from parallelizer.language.parse_plan import KEYS
from tests.chosen import chosen
from tests.docs import commands
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.figures import without_figures
from tests.recipes.runs import typed

GENERATED = {"docs/diagnostics.md"}
"""tests/commands/explain/test_page.py makes it anew."""

FOLLOWED = {"README.md": "tests/docs/test_readme.py", "docs/index.md": "tests/docs/test_start.py"}
"""Pages whose commands a test of another name follows; tests/docs/test_NAME.py follows docs/NAME.md."""

PAGES = [
    path
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "parallelizer/styles/context_parallel/README.md",
    )
    if str(path.relative_to(ROOT)) not in GENERATED
]
BLOCKS = [block for path in PAGES for block in blocks_of(path)]
READERS = {"yaml", "python", "console", "commands", "json", "toml", "bash", "sh", "text", ""}
CHEAP = ("validate", "explain", "schema", "--help")
NEEDS_RANKS = ("init_process_group", "DeviceMesh(", "build_mesh(", "init_device_mesh")
WORKFLOW = {"repos", "jobs", "defaults"}
"""Keys of files that other tools read, Hydra among them."""


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and block.reason is None]


def follower(page: str) -> Path | None:
    """The test that follows a page, if there is one."""
    path = ROOT / FOLLOWED.get(page, f"tests/docs/test_{Path(page).stem}.py")
    return path if path.exists() else None


def test_every_block_has_a_reader_and_who_is_left_out_says_why() -> None:
    strange = [f"{block}: {block.language}" for block in BLOCKS if block.language not in READERS]
    assert strange == []
    assert [str(block) for block in BLOCKS if block.reason is not None and len(block.reason) < 10] == []


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_plan_or_a_configuration(block: Block, tmp_path: Path) -> None:
    read = yaml.safe_load(block.text) or {}
    keys = set(read) if isinstance(read, dict) else WORKFLOW
    if "mesh" in keys:
        schema = json.loads((ROOT / "docs/schema/preset.json").read_text())
        jsonschema.validate(read, schema)
    elif "_target_" in keys:
        module, _, name = read.get("loss", "parallelizer.losses.cross_entropy").rpartition(".")
        assert not module.startswith("parallelizer") or hasattr(importlib.import_module(module), name)
    elif not keys & WORKFLOW:
        text = block.text
        if not keys <= set(KEYS):  # some lines of a plan's rules
            text = "rules:\n" + "".join(f"  {line}\n" for line in text.splitlines())
        elif "rules" not in keys and "extends" not in keys:  # some other part of one
            text += "extends: llama\n"
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        load_plan(path)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_runs_or_has_its_names(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = ast.parse(block.text, str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallelizer"):
            for name in node.names:
                assert has(node.module or "", name.name), f"{node.module} has no {name.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pz":
            assert node.attr in parallelizer.__all__ or has("parallelizer", node.attr), f"pz.{node.attr}"
    followed = follower(block.page) is not None  # has files and order, and runs it there
    if not followed and not unbound(tree) and not any(word in block.text for word in NEEDS_RANKS):
        in_children([(executed, block.text, str(block))])


def has(module: str, name: str) -> bool:
    """Whether a name can be imported from a module."""
    if importlib.util.find_spec(module) is None:
        return False
    return (
        hasattr(importlib.import_module(module), name)
        or importlib.util.find_spec(f"{module}.{name}") is not None
    )


def unbound(tree: ast.Module) -> set[str]:
    """Names that the code reads and nowhere binds."""
    bound, read = set(dir(builtins)), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.split(".")[0])
    return read - bound


def executed(text: str, where: str) -> None:
    exec(compile(text, where, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_parses(block: Block) -> None:
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", of("console", "commands", "bash", "sh"), ids=str)
def test_commands_are_such_as_there_are(block: Block) -> None:
    for command in block.commands():
        try:
            commands.check(command)
        except parallelizer.PlanError as error:
            pytest.fail(f"{block}: {command}: {error}")


TO_RUN = [
    pytest.param(command, shown, id=f"{block}: {command}")
    for block in of("console")
    if follower(block.page) is None
    for command, shown in block.shown().items()
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*case.values[0].values, id=case.values[0].id, marks=case.marks)
        for case in chosen(TO_RUN, [c for c in TO_RUN if any(w in str(c.values[0]) for w in CHEAP)])
    ],
)
def test_the_command_says_what_is_shown(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    command, piped, _ = command.partition(" | ")
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    module = words[0]
    more = ["train.steps=1", "train.eval_batches=1"] if module == "recipes.train" else []
    done = typed(*words[1:], *more, cwd=tmp_path, module=module, timeout=300)
    assert done.status == (1 if "\nerror" in f"\n{shown}" else 0), done.out + done.err
    if any(word in command for word in CHEAP) and shown.strip() and "..." not in shown and not piped:
        said = (done.err + done.out).replace(f"{ROOT}/", "")
        assert without_figures(said) == without_figures(shown)


@pytest.mark.parametrize(
    "command",
    [
        "parallelizer validat parallel=tp2",
        "parallelizer validate --quik parallel=tp2",
        "parallelizer validate parallel=tp3",
        "python -m parallelizer plan train.stpes=3",
        "python -m recipes.train train.stpes=3",
        "python -m recipes.generat checkpoint=a",
        "python -m recipes.generate checkpoint=a promt=b",
        "torchrun --nnodes=2 -m recipes.train parallel=nothing",
        "make nothing",
        "python benchmarks/nothing.py",
        "python -m benchmarks.nothing",
        "pip install 'path/to/parallelizer[nothing]'",
    ],
)
def test_a_command_that_there_is_not_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, parallelizer.PlanError)):
        commands.check(command)


def test_blocks_are_found_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```yaml\na: 1\n```\n\n    python -m x \\\n        y=1\n    not this\n\n"
        "<!-- not run: it needs a cluster -->\n```console\n$ one\nout\n$ two\n```\n\n- a list\n    makes more\n"
    )
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    yaml_block, command, console = blocks_of(page)
    assert (yaml_block.language, yaml_block.text, str(yaml_block)) == ("yaml", "a: 1\n", "page.md:4")
    assert [shlex.split(line) for line in command.commands()] == [["python", "-m", "x", "y=1"]]
    assert console.reason == "it needs a cluster" and console.commands() == ["one", "two"]
    assert console.shown() == {"one": "out\n", "two": ""}


def test_names_that_nothing_binds_keep_python_from_being_run() -> None:
    assert unbound(ast.parse("import a.b as c\ndef f(x): return c(x, y)\n")) == {"y"}
    assert unbound(ast.parse("try: pass\nexcept OSError as error: print(error)\n")) == set()
    assert unbound(ast.parse("import torch\nx = [i for i in range(3)]\ntorch.tensor(x)\n")) == set()
