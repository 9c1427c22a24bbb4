"""A sequence that is split inside the model: what mixes tokens gets all of it, and the gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallelizer.language.workload import Entry
from parallelizer.propose.from_forward.gathered import ALL, ATTENTION, EXACT, gathered
from parallelizer.propose.from_forward.retreat import Retreat
from parallelizer.propose.from_forward.rules import Choice, units
from parallelizer.propose.from_forward.trial import Trials
from parallelizer.propose.from_forward.write_plan import write_plan
from tests.init import models, survey
from tests.init.architectures import overrides
from tests.propose.from_forward.test_as_written import _of
from tests.propose.from_forward.test_roles import found

SPLIT, WHOLE = "replicate -> shard(1)", "shard(1) -> replicate"


class Mixing(nn.Module):
    """Attention written out, which also takes what is added to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, beside: Tensor, table: Tensor) -> Tensor:
        y = x + table
        return beside + self.out((y @ y.mT).softmax(-1) @ y)


class Moving(nn.Module):
    """No attention: the tokens before add up."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, beside: Tensor, table: Tensor) -> Tensor:
        return beside + self.out((x + table).cumsum(1))


class Block(nn.Module):
    def __init__(self, of: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = nn.LayerNorm(32), of(), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.mix(self.norm(x), x, table)
        return x + self.down(torch.relu(self.up(x)))


class Inside(Block):
    """The same in the code of the block itself."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.norm(x) + table
        x = x + (y @ y.mT).softmax(-1) @ y
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks that are given a table of positions for all tokens."""

    def __init__(self, of: Callable[[], nn.Module] = Mixing, block: type[Block] = Block) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(128, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList(block(of) for _ in range(3))
        self.read = nn.Linear(32, 128)

    def forward(self, input_ids: Tensor) -> Tensor:
        z = self.words(input_ids)
        table = self.places(torch.arange(input_ids.shape[1]))[None].expand_as(z)
        for layer in self.layers:
            z = layer(z, table)
        return self.read(z)


def rules(build: Callable[[], nn.Module], what: str) -> dict[str, str] | None:
    split = gathered(found(build), what)
    return None if split is None else {path: style for paths, style, _ in split.rules for path in paths}


def test_what_mixes_tokens_gets_all_of_them_and_what_comes_from_outside_is_whole_already() -> None:
    split = rules(Stack, ATTENTION)
    assert split is not None
    taken = f"input: {{x: {WHOLE}, beside: {WHOLE}}}"
    for at in range(3):
        assert split.pop(f"layers.{at}.mix") == f"{{style: prepare-io, axis: cp, {taken}, output: {SPLIT}}}"
    assert split == {
        "layers.0": f"{{style: prepare-input, axis: cp, input: {{x: {SPLIT}}}}}",
        "layers.2": f"{{style: prepare-output, axis: cp, output: {WHOLE}}}",
        "read": f"{{style: prepare-input, axis: cp, input: {{input: {SPLIT}}}}}",
    }


def test_a_step_along_the_sequence_is_found_where_all_operators_count() -> None:
    assert rules(lambda: Stack(Moving), ATTENTION) is None
    split = rules(lambda: Stack(Moving), ALL)
    assert split is not None and "layers.1.mix" in split


def test_nothing_is_split_where_blocks_themselves_mix_tokens() -> None:
    for what in (EXACT, ATTENTION, ALL):
        assert rules(lambda: Stack(block=Inside), what) is None


def test_calls_of_attention_are_exact_where_there_is_one_stream() -> None:
    split = rules(models.NanoGpt, EXACT)
    assert split is not None and split["h.0.attn"] == "context-parallel"
    two = found(models.T5, source=Entry(("batch", "sequence"), range=(0, 128)))
    assert gathered(two, EXACT) is None
    assert rules(Stack, EXACT) is None  # its attention is written out


def settle(given: list[str], folder: Path, prove: bool = False) -> tuple[str, tuple[str, ...], Trials]:
    from parallelizer.propose.from_forward.observe import watch
    from parallelizer.propose.from_forward.roles import roles

    setup = _of(given, folder)
    facts = roles(model := setup.build_model(), watch(setup.build_model(), setup.workload))
    trials = Trials(setup, model)
    retreat = Retreat(
        facts, trials, lambda c: write_plan(facts, c, ""), labels={"labels": "1"}, no_context="no reason"
    )
    settled = retreat.settle(Choice(frozenset(units(facts)), context=False), prove=prove)
    return write_plan(facts, settled.choice, "", settled.said), settled.said, trials


@pytest.mark.ranks
def test_a_transformers_model_with_attention_of_its_own_is_proven_over_cp(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="models of transformers are an optional extra")
    text, said, trials = settle(overrides("gptj"), tmp_path)
    assert any("every rank computes transformer.h.*.attn with the whole sequence" in s for s in said)
    assert "every rank" in text.partition("version:")[0] and "labels: 1" in text
    assert survey.share("gptj", text) > 0.95  # its q, k and v are split over tp all the same
    assert trials.refusal(text, {"cp": 2}, proven=True) is None
    assert trials.refusal(text, {"cp": 2, "tp": 2}, proven=True) is None
    # Without the gather a rank's queries see its own keys alone.
    blind = "\n".join(line for line in text.splitlines() if "prepare-io, axis: cp" not in line)
    assert blind != text
    assert trials.refusal(blind, {"cp": 2}, proven=True) is not None
    # Labels of all tokens do not fit the logits of a rank's.
    assert trials.refusal(text.partition("buffers:")[0], {"cp": 2}, proven=True) is not None


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gathers"),
    [
        (
            "bart",
            "model.decoder.layers.*.encoder_attn",
        ),  # its decoder sees what the encoder has made of all tokens
        ("lfm2", "model.layers.*.conv"),
        ("vit", ""),  # exact attention to patches, whose number does not divide
    ],
)
def test_other_kinds_of_models_are_proven_over_cp(name: str, gathers: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="models of transformers are an optional extra")
    text, said, trials = settle(overrides(name), tmp_path, prove=True)
    assert trials.unproven is None
    assert any(s.startswith("over cp ") and gathers in s for s in said)
    assert ("context-parallel" in text) == (name == "vit")
    for mesh in ({"cp": 2}, {"cp": 2, "tp": 2}):
        assert trials.refusal(text, mesh, proven=True) is None
