"""A small selection; `python -m tests.survival` has all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chosen import a_fifth
from tests.runtime.checkpoint.test_saving import mounted
from tests.survival import damage, kills, reshard, soak
from tests.survival.runs import Run, lives, redone, trained_on

pytestmark = pytest.mark.ranks


def test_a_run_whose_ranks_are_killed_ends_as_if_they_had_not_been() -> None:
    [outcome] = kills.sweep([kills.SHORT], steps=10)
    assert not outcome.wrong and outcome.died == len(kills.SHORT.deaths) == len(outcome.recoveries)
    assert max(outcome.recoveries) < 60


def test_damage_of_any_kind_is_found() -> None:
    counts = damage.measure(flips=30, cuts=10)
    assert not damage.missed(counts) and sum(count.tried for count in counts) > 50


@pytest.mark.parametrize("place", a_fifth(range(4)))
def test_presets_go_on_from_each_other(place: int) -> None:
    """Two of the small presets, back and forth."""
    pairs = (
        ("gpt2", ("tp2", "cp2")),
        ("llama", ("replicate2", "tp2")),
        ("gpt2", ("fsdp2", "tp2")),
        ("llama", ("pp4", "tp2")),
    )
    model, presets = pairs[place]
    found = reshard.matrix(model, presets)
    assert len(found) == 4 and all(pair.holds for pair in found), found


def test_a_mixture_goes_on_with_its_experts_in_slices_and_back() -> None:
    found = reshard.matrix("qwen3_moe", ("fsdp2_ep2", "tp2"))
    assert len(found) == 4 and all(pair.holds for pair in found), found


def test_a_full_disk_costs_a_run_its_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        run = Run(
            tmp_path / "run",
            (
                "parallel=tp2",
                "train.steps=4",
                "train.checkpoint_every=2",
                f"train.checkpoint_dir={disk}",
            ),
        )
        run.finish()
        assert run.said().count("warning[checkpoint-unwritable]") == 2
        assert "the checkpoint was not written: No space left on device" in run.said()
        assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4] and [p.name for p in disk.iterdir()] == [
            "lock"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("model", reshard.MODELS)
def test_every_preset_goes_on_from_two_others_and_two_others_from_it(model: str) -> None:
    presets = reshard.presets_of(model)
    found = reshard.matrix(model, behind=(1, 4))
    assert [pair for pair in found if not pair.holds] == []
    assert len({(pair.source, pair.target) for pair in found}) == len(found) == 2 * len(presets)
    assert all(pair.source != pair.target for pair in found)


@pytest.mark.slow
def test_fifty_kills() -> None:
    outcomes = kills.sweep()
    assert sum(o.died for o in outcomes) >= 50 and not [o for o in outcomes if o.wrong]


@pytest.mark.slow
def test_a_soak_under_one_preset_and_under_many() -> None:
    same, mixed = soak.soak(steps=600, kills=6)
    assert same.same and not same.wrong
    assert mixed.apart <= soak.CLOSE and not mixed.wrong


# What looks at runs must see what is wrong with them.


def note(life: str, step: int, *samples: str, rank: int = 0, first: int | None = None) -> dict[str, Any]:
    begins = (step - 1) * 2 if first is None else first
    return {"life": life, "rank": rank, "time": float(step) + 100 * float(life[-1]), "step": step, "first": begins,
            "samples": samples}  # fmt: skip


def test_samples_that_are_skipped_or_differ_between_ranks_are_noticed() -> None:
    assert trained_on([note("1.0", 1, "a", "b"), note("1.0", 2, "c", "d"), note("1.1", 2, "c", "d")]) == list(
        "abcd"
    )
    with pytest.raises(ValueError, match=r"samples \[2, 3\] were skipped"):
        trained_on([note("1.0", 1, "a", "b"), note("1.1", 3, "e", "f")])
    with pytest.raises(ValueError, match="sample 1 is b for one rank and c for another"):
        trained_on([note("1.0", 1, "a", "b"), note("1.0", 1, "a", "c", rank=1)])
    assert trained_on([note("1.0", 1, "a", "b"), note("1.1", 1, "b", "a")]) == ["b", "a"]


def test_going_back_too_far_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path, ())
    taken = [note("1.0", step, "a", "b") for step in range(1, 6)] + [note("1.1", 3, "a", "b")]
    (tmp_path / "samples.0").write_text("".join(json.dumps(n) + "\n" for n in taken) + '{"cut')
    for there, expected in ((["step_2"], (3, 0)), (["step_2", "step_4", "step_5.tmp"], (3, 1))):
        death = {"time": 50.0, "life": "1.0", "there": there}
        (tmp_path / "death.0").write_text(json.dumps(death))
        assert redone(run) == expected
    assert len(lives(run.taken())) == 2


def test_a_difference_of_one_bit_has_another_hash() -> None:
    from tests.survival.runs import hash_of

    one = {"a": torch.zeros(3), "b": torch.ones(2)}
    assert hash_of(one) == hash_of(dict(reversed(one.items())))
    assert hash_of(one) != hash_of(one | {"a": torch.tensor([0.0, -0.0, 0.0])})
    assert hash_of(one) != hash_of({"a": one["a"].double(), "b": one["b"]})
