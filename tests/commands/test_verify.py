"""`python -m parallelizer verify`: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parallelizer.commands.main import main
from parallelizer.proof import prove as module
from parallelizer.runtime.launch.failures import LaunchError

NO_NORM = 'rules=["layers.*.ffn_norm: none"]'


@pytest.mark.ranks
def test_a_proven_plan_exits_with_0_and_nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "parallel=fsdp8_tp8", "train.batch_size=16"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "dp_shard=2 x tp=2, 4 ranks, in float64" in out
    assert "shrunk: dp_shard 8 -> 2, tp 8 -> 2" in out
    assert "train.batch_size 16 -> 4, train.seq_len 256 -> 12" in " ".join(out.split())
    assert "error <= c * eps * sqrt(n)" in out and "worst three parameters:" in out
    assert "proven: the sharded run equals the unsharded one" in out


@pytest.mark.ranks
def test_a_wrong_plan_exits_with_1_and_shows_its_rule(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "parallel=tp2", NO_NORM, "--force"]) == 1
    out = capfd.readouterr().out
    assert "error[not-equal]" in out and "its reduction over tp is" in " ".join(out.split())
    assert f"| {NO_NORM}" in out and "^^^^" in out
    assert "replicas that hold different bits:\n  layers.{0,1}." in out
    assert "NOT proven" in out


@pytest.mark.ranks
def test_json_is_all_of_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "parallel=tp2", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["passed"] and document["first_divergence"] is None and document["ranks"] == 2


@pytest.mark.ranks
def test_its_certificate_is_what_plan_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def last_line(*words: str) -> str:
        assert main([*words, "parallel=tp2", "model.n_layers=1"]) == 0
        return capfd.readouterr().out.splitlines()[-1]

    assert last_line("plan") == "proof: not proven"
    [written] = re.findall(r"certificate: (\S+)", last_line("verify"))
    name = Path(written).stem
    assert (tmp_path / written).is_file()
    assert re.fullmatch(
        rf"proof: proven on [\d-]{{10}} \(certificate {name}, worst error 0\.\d\d of its bound\)",
        last_line("plan"),
    )


@pytest.mark.parametrize("json_too", [False, True])
def test_a_refused_plan_exits_with_1_and_its_diagnostics(
    json_too: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = ["verify", "parallel=tp2", 'rules=["layers.*.attension.wq: colwise"]']
    assert main([*wrong, *(["--json"] if json_too else [])]) == 1
    out, err = capfd.readouterr()
    if json_too:
        document = json.loads(out)
        assert not document["passed"] and document["diagnostics"]
    else:
        assert out == "" and "attension" in err


@pytest.mark.parametrize("seed", ["99999999999999999999", "one"])
def test_a_seed_that_is_none_exits_with_2(seed: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--seed", seed])
    assert ended.value.code == 2 and "argument --seed: " in capfd.readouterr().err


def test_more_ranks_than_a_machine_is_given_are_not_started(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "parallel=fsdp1024_cp2_tp8", "--full-mesh"]) == 1
    assert "16,384 ranks are more than the 64" in " ".join(capfd.readouterr().err.split())


def test_ranks_that_fail_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise LaunchError(
            "rank 1 of 2 failed (exit code 1): ValueError: no\n\nTraceback (most recent call last):\n  ..."
        )

    monkeypatch.setattr(module, "prove", fail)
    assert main(["verify", "parallel=tp2"]) == 1
    err = capfd.readouterr().err
    assert "rank 1 of 2 failed" in err and "Traceback" not in err
