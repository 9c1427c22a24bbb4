"""Options and commands that are not there: the usage of the command, and what may have been meant."""

from __future__ import annotations

import pytest

from parallelizer.commands.main import main

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        (["validate", "--qiuck"], "usage: parallelizer validate", "--qiuck (did you mean --quick?)"),
        (["plan", "--diif", "a", "b"], "usage: parallelizer plan", "--diif (did you mean --diff?)"),
        (["plan", "parallel=tp2", "--htlm=x"], "usage: parallelizer plan", "(did you mean --html?)"),
        (["explain", "--jsn", "x"], "usage: parallelizer explain", "--jsn (did you mean --json?)"),
        (["plan", "--quick"], "usage: parallelizer plan", "--quick (an option of validate)"),
        (["--json", "validate"], "usage: parallelizer validate", "behind the command: validate --json"),
        (["validate", "--nothing"], "usage: parallelizer validate", "arguments: --nothing\n"),
        (["validat"], "usage: parallelizer [-h]", "did you mean validate?"),
        (["verify", "--dtype=float46"], "usage: parallelizer verify", "did you mean float64?"),
        (["xyzzy"], "usage: parallelizer [-h]", "invalid choice: 'xyzzy'"),
    ],
)
def test_the_usage_is_the_command_s(arguments: list[str], usage: str, said: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err.startswith(usage) and said in printed.err
