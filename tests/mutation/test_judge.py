"""A handful of mutants from end to end: what is said of them, and what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.generate import Mutant, mutants
from tests.mutation.judge import Harm, Judge, Verdict
from tests.mutation.sources import sources
from tests.mutation.table import markdown, wrong
from tests.mutation.tree import write_tree

SOURCES = {source.name: source for source in sources()}


def judged(plan: str, kind: str, name: str, preset: str, cache: Path | None = None) -> Verdict:
    source = SOURCES[plan]
    every = [m for m in mutants(source) if (m.kind, m.name, m.preset) == (kind, name, preset)]
    (mutant,) = every
    return Judge(cache).judge(mutant, write_tree(source.tree))


@pytest.mark.parametrize(
    ("plan", "kind", "name", "preset", "codes", "how"),
    [
        ("llama", "a rule deleted", "norm deleted", "tp2", ["varying-gradient"], "proof"),
        ("llama", "a rule on the first layer only", "layers.*.attention.inner -> layers.0.attention.inner", "cp2",
         ["attention-left-out"], "proof"),
        ("gpt", "a letter off in a glob", "blocks.*.mlp.up -> block.*.mlp.up", "tp2", ["unmatched-glob"], "text"),
    ],
)  # fmt: skip
def test_a_harmful_mutant_is_refused(
    plan: str, kind: str, name: str, preset: str, codes: list[str], how: str
) -> None:
    verdict = judged(plan, kind, name, preset)
    assert (verdict.codes, verdict.harm.how) == (codes, how)
    assert verdict.harmful and verdict.refused


def test_a_harmless_mutant_is_accepted_and_its_proof_kept(tmp_path: Path) -> None:
    case = ("gpt", "`local` set", "blocks.*.mlp.up: local: true", "tp2")
    verdict = judged(*case, tmp_path)
    assert not verdict.harmful and not verdict.refused
    assert judged(*case, tmp_path) == verdict
    proof, said = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    proof.write_text('{"wrong": "as it was kept", "how": "proof"}')
    said.unlink()  # as when the sources have changed
    assert judged(*case, tmp_path).harm == Harm("as it was kept", "proof")


def test_a_plan_that_compiles_to_the_same_is_not_run() -> None:
    verdict = judged("gpt", "rules in another order", "blocks.*.mlp.up last", "tp2")
    assert verdict.harm == Harm("", "program")


def test_the_page_names_what_was_judged_wrongly() -> None:
    mutant = Mutant("gpt", "a rule deleted", "norm deleted", "rules:\n  norm: fsdp\n", 2, "tp2")
    right = Verdict(mutant, (("unmatched-glob", "error", 2),), Harm("no program", "text"))
    missed = Verdict(mutant, (("shadowed-rule", "warning", 2),), Harm("loss off by 1", "proof"))
    refused = Verdict(mutant, (("replicated-sum", "error", 1),), Harm("", "proof"))
    assert wrong([right, missed, refused]) == [missed, refused]
    page = markdown([right, missed, refused], "python -m tests.mutation", 1)
    assert "| a rule deleted | 3 | 1 | 1 | 0 | 1 | 1 of 2 |" in page
    assert (
        "### Harmful and missed: 1\n- gpt on tp2, a rule deleted: norm deleted: `norm: fsdp`: loss off by 1"
        in page
    )
