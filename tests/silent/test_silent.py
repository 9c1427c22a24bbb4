"""The judge agrees with what is written beside the cases: a few of them in every run, and each verdict of each model and of each
preset in `make test-all`. `python -m tests.silent` judges all of them.
"""

import pytest

from tests.chosen import values
from tests.silent.__main__ import main
from tests.silent.case import Case, all_cases, changed, without
from tests.silent.judge import judge
from tests.silent.table import table, unlisted

FEW = (
    "lm/mean_of_means/fsdp2",
    "lm/boolean/fsdp2",
    "lm/norm forgotten/tp2",
    "rows.Followed/running mean/fsdp2",
    "gated halves/not packed/tp2",
    "gpt/positions not dealt/cp2",
)


Verdicts = tuple[tuple[str, str], tuple[str, str]]


def verdicts(case: Case) -> Verdicts:
    """What is expected, of the model and of the preset."""
    return (case.model.name, case.expected), (case.preset, case.expected)


def stand_for_all() -> list[str]:
    """Names of cases that together have each verdict of each model and of each preset, without the few."""
    of: dict[Verdicts, str] = {}
    for case in sorted(all_cases(), key=lambda case: case.name not in FEW):
        of.setdefault(verdicts(case), case.name)
    kept = [key for key, name in of.items() if name in FEW]
    return [of[param.values[0]] for param in values(list(of), kept) if of[param.values[0]] not in FEW]


def of_name(name: str) -> Case:
    (case,) = (case for case in all_cases() if case.name == name)
    return case


@pytest.mark.ranks
@pytest.mark.parametrize("name", FEW)
def test_the_judge_agrees(name: str) -> None:
    case = of_name(name)
    judged = judge(case)
    assert judged.verdict == case.expected, judged.said


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", stand_for_all())
def test_the_judge_agrees_on_others(name: str) -> None:
    case = of_name(name)
    judged = judge(case)
    assert judged.verdict == case.expected, judged.said


def test_there_are_right_and_wrong_cases_of_every_kind_of_axes() -> None:
    cases = all_cases()
    wrong = [case for case in cases if case.expected != "right"]
    assert len(cases) >= 150 and len(cases) / 4 < len(cases) - len(wrong)
    assert sum(case.preset in ("fsdp2", "hsdp2x2") for case in wrong) >= 40
    assert len({case.model.target for case in cases}) >= 16


def test_the_table_counts_and_names_what_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "name": "a", "preset": "tp2", "expected": "wrong", "verdict": "wrong", "error": "w: 1", "why": "because",
        "static": None, "validate": {"accepted": True, "said": ""}, "verify": {"accepted": False, "said": "no"},
    }  # fmt: skip
    right = {
        **record,
        "name": "b",
        "expected": "right",
        "verdict": "wrong",
        "validate": {"accepted": False, "said": "code: no"},
    }
    text = table([record, right])
    assert "| tp | 1 | 0 of 0 asked | 0 | 0 | 1 | 0 of 0 asked | 0 | 1 | 0 |" in text
    assert "wrong plans that validate accepts (1):\n  a: because" in text
    assert "right plans that validate refuses (1):\n  b: code: no" in text
    assert unlisted([record, right]) == ["a (validate)", "b (validate)", "b (verify)"]
    monkeypatch.setattr("tests.silent.table.KNOWN", {"validate": frozenset("ab")})
    assert unlisted([record, right]) == []
    assert "judged otherwise than expected (1):\n  b: wrong, w: 1" in text


def test_a_change_that_changes_nothing_is_an_error() -> None:
    assert changed("a: b\n", ("b", "c")) == "a: c\n"
    assert without("  a: b\n  c: d\n", "c") == "  a: b\n"
    with pytest.raises(ValueError, match="0 times"):
        changed("a", ("b", "c"))
    with pytest.raises(ValueError, match="0 lines"):
        without("a: b\n", "c")


def test_a_filter_that_names_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["no such case"])
    assert stopped.value.code == 2 and "no such case" in capsys.readouterr().err
