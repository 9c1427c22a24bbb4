"""Every command behind a figure of docs/figures.md runs in its smallest form, measuring next to nothing."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.recipes.runs import COMMANDS, command, typed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/figures.md").read_text()
FIGURES = TEXT.partition("\n## ")[0]

SMALLEST = {
    "benchmarks.memory_truth": "--only 'single gpt checkpoint'",
    "benchmarks.ledger_truth": "--only 'single llama_tp checkpoint'",
    "benchmarks.ledger_truth --only ep=": "--only 'dp_shard=2 ep=2 hf_mixtral checkpoint'",
    "benchmarks.memory_truth --only hf_": "--only 'fsdp2_ep2 hf_mixtral bf16 checkpoint'",
    "benchmarks.memory_truth --only pp2": "--only 'pp2_tp2 1f1b first rank'",
    "benchmarks.ledger_truth --only pp2": "--only 'pp2_tp2 1f1b'",
    "benchmarks.float8_families": "--only vit_tiny",
    "benchmarks.ledger_truth --only float8": "--only 'pp2 llama_tp float8 rowwise-gw-hp'",
    "benchmarks.memory_truth --only float8": "--only 'fsdp2 float8 gathered bf16'",
    "benchmarks/expert_dispatch.py": "--tokens 8 --width 8 --hidden 8 --rounds 2",
    "benchmarks.proofs experts": "--only 'mixtral on ep2 x tp2, stream'",
    "benchmarks/any_size.py": "--layers 2 --ranks 64 --repeats 1",
    "benchmarks/any_size.py --clock": "--layers 2 --ranks 64 --repeats 1",
    "benchmarks.clock": "--presets 1 --steps 2",
    "benchmarks.published": "--only foundry-3b",
    "benchmarks.search": "--only valid --cases 1",
    "benchmarks/step_time.py": "--blocks 2 --steps 1",
    "benchmarks/pipeline_step_time.py": "--blocks 2 --steps 1",
    "benchmarks/startup.py": "--ranks 2 --repeats 1",
    "tests.styles.context_parallel.matrix": "--every 900",
    "benchmarks/context_parallel.py": "--rows 64 --rounds 2",
    "benchmarks/packed_documents.py": "--rows 64 --median 9 --rounds 2",
    "benchmarks/validate_time.py": "--only plans/llama.yaml --repeats 1 --slack 100",
    "tests.init.survey": "'MLP mixer' --mesh fsdp2",
    "tests.hugging_face.survey": "llama",
    "tests.hugging_face.expert_survey": "mixtral",
    "benchmarks/loading.py": "--layers 1 --hidden 512 --dtype float32 --ways tp2 --repeats 1",
    "tests.survival": "damage --small --keep kept",
    "benchmarks/checkpoint.py": "--preset single --dim 64 --layers 1 --rounds 2",
    "benchmarks/live_view.py --overhead": "--draws 2",
    "benchmarks/live_view.py --comparison": "parallel=tp2",
    "tests.proof.faults": "--only 'a norm without its rule'",
    "tests.proof.seeds": "--seeds 1",
    "benchmarks.proofs": "--only 'llama_debug, llama on single'",
    "benchmarks.proofs families": "--only 'vit_tiny on tp2, whole stream'",
    "benchmarks.proofs --full-mesh": "--only 'llama_debug, llama on fsdp4'",
    "tests.mutation": "--plan gpt --kind 'a wrong shard dimension' --cache kept",
    "tests.silent": "lm/mean_of_inputs/fsdp2 --only validate",
    "tests.hostile": "--quick",
    "tests.fuzz": "--cases 3 --apart-every 0",
    "tests.typos": "--plan llama --cases 3",
}
"""By what stands behind a figure, the options that make it small. None needs a GPU."""

SLOW = (
    "benchmarks.published",
    "benchmarks.search",
    "benchmarks.ledger_truth --only pp2",
    "benchmarks.memory_truth --only pp2",
    "benchmarks.ledger_truth --only ep=",
    "benchmarks.memory_truth --only hf_",
    "benchmarks.proofs experts",
)
"""Those that take tens of seconds also in their smallest form."""

APART = (
    "tests.init.survey",
    "tests.hugging_face.survey",
    "tests.hugging_face.expert_survey",
    "tests.styles.context_parallel.matrix",
    "benchmarks/loading.py",
)
"""Those that hand their own classes or functions to other processes, and so must be what a process was started as."""

TESTS = {"make loops": "tests/docs/test_foreign_loops.py", "make parity": "tests/recipes/test_parity.py"}
"""Figures that a test measures: the default run holds some members of it."""

PAGES = {
    "docs/proving.md": [
        "tests.proof.faults",
        "tests.proof.seeds",
        "benchmarks.proofs",
        "benchmarks.proofs --full-mesh",
    ],
    "docs/experts.md": ["benchmarks.proofs experts"],
    "docs/mutations.md": ["tests.mutation"],
}
"""Pages that a figure leads to, with the commands that they name."""


def named(text: str) -> list[str]:
    """Keys of `SMALLEST` and `TESTS` that a cell of the table names, and the pages that it leads to."""
    found = []
    last = ""
    for quoted in re.findall(r"`([^`]+)`", text):
        words = shlex.split(quoted)
        if words[0] == "python":
            last = words[2] if words[1] == "-m" else words[1]
            words = words[2 if words[1] == "-m" else 1 :]
        elif words[0].startswith("--"):  # the command before, with another option
            words = [last, *words]
        found.append(" ".join(words) if words[0] == "make" or " ".join(words) in SMALLEST else words[0])
    return found + [f"docs/{page}" for page in re.findall(r"\]\(([^)#]+)\)", text)]


def test_every_figure_has_its_smallest_form() -> None:
    rows = [
        re.split(r"(?<!\\) \| ", line.strip("| ")) for line in FIGURES.splitlines() if line.startswith("| ")
    ][1:]
    assert len(rows) > 20
    behind: set[str] = {"benchmarks.proofs families"}  # its table stands below
    for what, _, cell in rows:
        assert named(cell), what
        for name in named(cell):
            assert name in SMALLEST or name in TESTS or name in PAGES, f"{what}: {name}"
            behind |= {name, *PAGES.get(name, [])}
    assert set(SMALLEST) == behind - set(TESTS) - set(PAGES)


def test_pages_and_tests_say_the_commands() -> None:
    for page, names in PAGES.items():
        for name in names:
            assert (
                f"`python -m {name}" in (ROOT / page).read_text()
                or f"    python -m {name}" in (ROOT / page).read_text()
            )
    assert "`python -m benchmarks.proofs families --write docs/figures.md`" in TEXT
    for target, path in TESTS.items():
        made = (ROOT / "Makefile").read_text().partition(f"\n{target.removeprefix('make ')}:")[2]
        assert path in made.partition("\n\n")[0]


def main_of(module: str) -> None:
    """What `python -m MODULE` or `python FILE` does, in this process, which has torch already."""
    if "/" in module:
        runpy.run_path(str(ROOT / module), run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SMALLEST]
)
def test_the_command_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(word in name for word in ("survey", "families", "loading", "ep=", "hf_", "proofs experts")):
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    if "float8" in name:
        pytest.importorskip("torchao", reason="float8 needs torchao")
    module, *words = [*name.split(), *shlex.split(SMALLEST[name])]
    if name in APART:
        done = command(
            *(["-m", module] if "/" not in module else [str(ROOT / module)]),
            *words,
            cwd=tmp_path,
            timeout=300,
        )
    else:
        monkeypatch.setitem(COMMANDS, module, lambda: main_of(module))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        done = typed(*words, cwd=tmp_path, module=module, timeout=300)
    assert done.status == 0 and done.out.strip(), done.out + done.err
