"""The text of a proposal: read back, it says what was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from parallelizer.language.load import load_plan
from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.from_forward.rules import Choice, units
from parallelizer.propose.from_forward.write_plan import WIDTH, write_plan
from tests.init import models
from tests.propose.from_forward.test_roles import found


def read(facts: Facts, choice: Choice, tmp_path: Path, *said: str) -> str:
    text = write_plan(facts, choice, "a title", said)
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    load_plan(path)
    return text


def test_every_line_is_a_rule_that_parses_and_fits_the_page(tmp_path: Path) -> None:
    facts = found(models.Qwen)
    choice = Choice(frozenset(units(facts)), buffers={"stack.0.core.turn.c": 0, "stack.1.core.turn.c": 0})
    text = read(facts, choice, tmp_path, "something is left whole: " + "word " * 40)
    assert '"stack.*.core.turn.c": 0' in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "stack.*.core.{ask,tell,give}: colwise" in text
    assert "divide: [n, groups]" in text


def test_a_plan_without_tensor_parallelism_has_no_stream(tmp_path: Path) -> None:
    facts = found(models.Qwen)
    text = read(facts, Choice(context=False), tmp_path)
    assert "stream" not in text
    assert "tp" not in text.replace("http", "")
    assert "context-parallel" not in text


def test_a_block_that_is_styled_itself_has_fsdp_and_stage_in_the_same_rule(tmp_path: Path) -> None:
    facts = found(models.Flat)
    text = read(facts, Choice(frozenset(units(facts))), tmp_path)
    assert "[context-parallel, fsdp, stage]" in text
    assert sum(line.strip().startswith("hs.*:") for line in text.splitlines()) == 1


def test_the_embedding_and_the_head_are_fsdp_units_of_their_own(tmp_path: Path) -> None:
    facts = found(models.Qwen)
    choice = Choice(frozenset(units(facts)))
    text = read(facts, choice, tmp_path)
    [table], [head] = facts.tables, facts.heads
    rules = {name: yaml.safe_load(text)["rules"][name] for name in (table.module, head)}
    assert rules[table.module][-1] == "fsdp"
    assert rules[head][-1] == {"style": "fsdp", "reshard_after_forward": False}
    inside = yaml.safe_load(read(facts, replace(choice, apart=False), tmp_path))["rules"]
    assert "fsdp" not in str([inside[table.module], inside[head]])


def test_a_table_that_is_the_head_too_stays_in_the_unit_of_the_root(tmp_path: Path) -> None:
    facts = found(models.Gpt)
    assert facts.tied
    rules = yaml.safe_load(read(facts, Choice(frozenset(units(facts))), tmp_path))["rules"]
    assert [glob for glob, styles in rules.items() if "fsdp" in str(styles)][-1] == ""
    assert "fsdp" not in str([rules[table.module] for table in facts.tables if table.tokens])
