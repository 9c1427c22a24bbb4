"""Names of checkpoints, and which of them go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.runtime.checkpoint import folder as names

STEPS = st.lists(st.integers(0, 500), unique=True)


@given(STEPS, st.integers(-1, 5), st.integers(0, 60))
def test_the_newest_stay_and_every_nth(steps: list[int], keep_last: int, keep_every: int) -> None:
    going = names.to_remove(steps, keep_last=keep_last, keep_every=keep_every)
    staying = sorted(set(steps) - set(going))
    assert set(going) <= set(steps) and going == sorted(going)
    assert staying[-max(1, keep_last) :] == sorted(steps)[-max(1, keep_last) :]
    assert not keep_every or not any(step % keep_every == 0 for step in going)
    assert len(staying) <= max(1, keep_last) + (
        len([s for s in steps if s % keep_every == 0]) if keep_every else 0
    )
    assert not names.to_remove(staying, keep_last=keep_last, keep_every=keep_every)


def test_only_finished_checkpoints_count_by_number(tmp_path: Path) -> None:
    for name in ("step_9", "step_100", "step_20.tmp", "step_3.old", "step_x", "step_-1", "other", "step_5 "):
        (tmp_path / name).mkdir()
    (tmp_path / "step_7").write_text("a file is none")
    assert names.steps_in(tmp_path) == [9, 100]
    assert names.steps_in(tmp_path / "nowhere") == []
    assert [p.name for p in names.leftovers(tmp_path)] == ["step_20.tmp", "step_3.old"]
    assert names.leftovers(tmp_path / "nowhere") == []
    names.tidy(tmp_path)
    assert (
        not names.leftovers(tmp_path)
        and names.steps_in(tmp_path) == [9, 100]
        and len(list(tmp_path.iterdir())) == 7
    )


def test_a_checkpoint_loses_its_name_before_it_loses_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "data").write_text("x")

    def killed(path: Path, *_: Any, **__: Any) -> None:
        assert path.name == "step_1.old" and (path / "data").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            names.remove(tmp_path, [1])
    assert names.steps_in(tmp_path) == [] and [p.name for p in names.leftovers(tmp_path)] == ["step_1.old"]


def test_finishing_gives_the_name(tmp_path: Path) -> None:
    (tmp_path / "step_4.tmp").mkdir()
    assert names.finish(tmp_path / "step_4.tmp") == tmp_path / "step_4"
    assert names.steps_in(tmp_path) == [4] and not names.leftovers(tmp_path)


def test_one_that_was_to_be_replaced_comes_back_where_the_other_never_came(tmp_path: Path) -> None:
    for made in ("step_2.was", "step_4.was", "step_4", "step_6.tmp", "step_8.old"):
        (tmp_path / made).mkdir()
        (tmp_path / made / "from").write_text(made)
    names.tidy(tmp_path)
    assert {p.name: (p / "from").read_text() for p in tmp_path.iterdir()} == {
        "step_2": "step_2.was",
        "step_4": "step_4",
    }


def test_another_one_of_the_same_step_takes_its_place(tmp_path: Path) -> None:
    for made in ("step_2", "step_2.tmp"):
        (tmp_path / made).mkdir()
        (tmp_path / made / "from").write_text(made)
    names.finish(tmp_path / "step_2.tmp")
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]
    assert (tmp_path / "step_2/from").read_text() == "step_2.tmp"
