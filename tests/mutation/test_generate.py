"""What is generated from a plan is what it says it is."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutation.generate import KINDS, Mutant, Source, mutants
from tests.mutation.judge import _facts, _program_of
from tests.mutation.sources import sources
from tests.mutation.tree import read_tree, replaced, write_tree
from tests.simulate.setups import CONFIGS, GPT, setup_of

SOURCES = {source.name: source for source in sources()}
EVERY = {name: list(mutants(source)) for name, source in SOURCES.items()}
COUNTS = {
    "llama": (24, 9, 5, 16, 8, 17, 21, 8, 13, 35, 6, 13, 55, 3, 14, 12, 6),
    "llama_tp": (24, 9, 5, 16, 8, 17, 21, 8, 13, 35, 0, 13, 55, 3, 14, 12, 6),
    "gpt": (5, 2, 3, 6, 0, 6, 4, 4, 4, 12, 0, 2, 18, 2, 0, 0, 3),
}
"""Of every kind, in their order, but for letters."""


@pytest.mark.parametrize("name", SOURCES)
def test_there_are_so_many_of_each_kind(name: str) -> None:
    counts = Counter(m.kind for m in EVERY[name])
    structural = [k for k in KINDS if not k.startswith("a letter")]
    assert tuple(counts[k] for k in structural) == COUNTS[name]


@pytest.mark.parametrize("name", SOURCES)
def test_every_letter_and_sign_of_every_glob_is_left_out(name: str) -> None:
    texts = {m.text for m in EVERY[name]}
    for glob in SOURCES[name].tree["rules"]:
        for shorter in {glob[:i] + glob[i + 1 :] for i in range(len(glob))} - set(
            SOURCES[name].tree["rules"]
        ):
            assert any(f'\n  "{shorter}": ' in text for text in texts), shorter


@pytest.mark.parametrize("name", SOURCES)
def test_a_mutant_differs_from_its_plan_once(name: str) -> None:
    before = write_tree(SOURCES[name].tree).splitlines()
    for mutant in EVERY[name]:
        after = mutant.text.splitlines()
        if mutant.line is None or mutant.preset_text or mutant.kind == "rules in another order":
            continue
        if len(after) == len(before):
            assert [i for i, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [
                mutant.line
            ]
    assert len({(m.text, m.preset, m.overrides, m.preset_text) for m in EVERY[name]}) == len(EVERY[name])


def test_a_written_tree_is_the_plan_it_was_read_from() -> None:
    source = SOURCES["gpt"]
    setup = setup_of(*GPT, "parallel=tp2")
    shipped = setup.compile(setup.build_model())
    assert _facts(_program_of("gpt", write_tree(source.tree), "tp2", source.overrides)) == _facts(shipped)


def test_a_tree_has_what_it_extends() -> None:
    assert SOURCES["llama_tp"].tree == replaced(
        SOURCES["llama"].tree, ("layouts", "stream"), lambda _: "replicate"
    )


def test_the_seed_chooses_letters_and_nothing_else() -> None:
    source = Source("gpt", read_tree(CONFIGS / "plans" / "gpt.yaml"), has_cp=False)

    def of(seed: int, letters: bool) -> set[str]:
        return {m.text + m.preset for m in mutants(source, seed) if _is_letter(m) == letters}

    assert of(0, letters=True) == of(0, letters=True) != of(1, letters=True)
    assert of(0, letters=False) == of(1, letters=False)


def _is_letter(mutant: Mutant) -> bool:
    return mutant.kind.startswith("a letter")
