"""What is said when Hydra cannot compose: which code, at which part of the override or file, with which
advice.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.yaml_nodes import read_text


def cut(span: Span | None) -> str:
    assert span is not None
    if span.file.startswith("<override "):
        return span.file.removeprefix("<override ").removesuffix(">")[span.column - 1 : span.end_column - 1]
    return read_text(span.file, span.file).split("\n")[span.line - 1][span.column - 1 : span.end_column - 1]


def refused(overrides: list[str], folder: str | None = None, name: str = "train") -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        compose_config(overrides, folder, name)
    [found] = caught.value.diagnostics
    assert found.help and found.message and "\n" not in found.message
    assert not re.search(r"hydra\.cc|HYDRA_FULL|searchpath|struct|DictConfig", found.message + found.help), (
        found
    )
    return found


@pytest.mark.parametrize(
    ("overrides", "code", "wrong", "message", "advice"),
    [
        (["parallel=tp9"], "unknown-preset", "tp9", "there is no parallel 'tp9'", "did you mean tp2? there are base, cp2"),
        (["parallel="], "unknown-preset", "", "there is no parallel ''", "there are base, cp2"),
        (["parallel=null"], "unknown-preset", "null", "there is no parallel 'null'", "there are base"),
        (["parallel=3"], "unknown-preset", "3", "there is no parallel '3'", "there are base"),
        (["parallel=Tp2"], "unknown-preset", "Tp2", "there is no parallel 'Tp2'", "did you mean tp2?"),
        (["model=llama"], "unknown-preset", "llama", "there is no model 'llama'", "llama_debug"),
        (["hydra/launcher=nope"], "unknown-preset", "nope", "there is no hydra/launcher 'nope'", "there are basic"),
        (["parallel=tp2", "model=nope"], "unknown-preset", "nope", "there is no model 'nope'", "llama_debug"),
        (["parralel=tp2"], "unknown-key", "parralel", "there is no key 'parralel'", "did you mean parallel?"),
        (["train.seqlen=4"], "unknown-key", "seqlen", "'train.seqlen'", "did you mean seq_len? train has steps"),
        (["seq_len=4"], "unknown-key", "seq_len", "there is no key 'seq_len'", "did you mean train.seq_len?"),
        (["parallel=cp2", "parallel.mesh.tpp=2"], "unknown-key", "tpp", "mesh.tpp'", "parallel.mesh has pp"),
        (["parallel.mehs.tp=2"], "unknown-key", "mehs", "'parallel.mehs.tp'", "did you mean parallel.mesh.tp?"),
        (["mesh.tp=2"], "unknown-key", "mesh", "no key 'mesh.tp'", "did you mean parallel.mesh.tp?"),
        (["trian.steps=4"], "unknown-key", "trian", "'trian.steps'", "did you mean train.steps?"),
        (["trian.stpes=4"], "unknown-key", "trian", "'trian.stpes'", "did you mean train.steps?"),
        (["trian.seqlen.x=4"], "unknown-key", "trian", "no key", "did you mean train? there are model, parallel"),
        (["nowhere.steps=4"], "unknown-key", "nowhere", "no key", "there are model, parallel"),
        (["parallel.qqq.tp=4"], "unknown-key", "qqq", "no key", "parallel has mesh, layouts"),
        (["train.seq_len.x=3"], "unknown-key", "x", "'train.seq_len.x'", "train.seq_len has no keys"),
        (["parallel.layouts.a=replicate"], "unknown-key", "parallel.layouts.a", "no key", "++parallel.layouts.a=replicate"),
        (["parallel.styles.fsdp.a=3"], "unknown-key", "parallel.styles.fsdp.a", "no key", "++parallel.styles.fsdp.a=3"),
        (["parallel@x=tp2"], "unknown-key", "parallel@x", "'parallel@x'", "parallel=<value>"),
        (["parralel=tp2", "model=nope"], "unknown-preset", "nope", "no model 'nope'", "there are"),
        (["model.hiden_dim=4"], "unknown-key", "model.hiden_dim", "no key", "did you mean hidden_dim?"),
        (["=3"], "unknown-key", "=3", "there is no key before the `=`", "key=value"),
        (["+parallel=tp2"], "unknown-key", "parallel", "exists already", "write parallel=tp2"),
        (["++parallel=tp2"], "unknown-key", "parallel", "exists already", "write parallel=tp2"),
        (["+train.seq_len=3"], "unknown-key", "train.seq_len", "exists already", "write train.seq_len=3"),
        (["~foo"], "unknown-key", "foo", "there is no 'foo' to remove", "remove the override"),
        (["~parallel=tp2"], "unknown-key", "parallel", "there is no 'parallel=tp2' to remove", "remove the override"),
        (["plan=a,b"], "override-sweep", "a,b", "are a sweep", "`python -m recipes.train -m plan=a,b`"),
        (['rules=["a: b"],["c: d"]'], "override-sweep", '["a: b"],["c: d"]', "rules takes one list", "'rules=["),
        (["train.steps=range(3)"], "override-sweep", "range(3)", "are a sweep", "-m train.steps=range(3)"),
        (["rules={a: b}"], "wrong-type", "{a: b}", "rules takes a list of rules", "'rules=["),
        (["parallel.mesh=[1]"], "wrong-type", "[1]", "parallel.mesh takes a value of another type", "look at the value"),
        (["model=${nope}"], "config-invalid", "${nope}", "Error resolving interpolation", "correct or remove the override"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong_is_marked_and_corrected(
    overrides: list[str], code: str, wrong: str, message: str, advice: str
) -> None:
    found = refused(overrides)
    assert found.code == code
    assert cut(found.span) == wrong
    assert message in found.message and advice in (found.help or "")


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "wrong", "message", "advice"),
    [
        ("defaults: [bse]\nmesh: {tp: 2}\n", "unknown-preset", "bse", "there is no parallel 'bse'", "did you mean base?"),
        ("defaults: [base, {/model: nope}]\n", "unknown-preset", "nope", "there is no model 'nope'", "llama_debug"),
        ("defaults: 3\n", "config-invalid", "", "defaults must be a list", "defaults list"),
        ("defaults: {a: b}\n", "config-invalid", "", "defaults must be a list", "defaults list"),
        ("defaults: [broken]\n", "config-invalid", None, "includes its own file", "correct or remove the override"),
        ("mesh: {tp: 2}\nmesh: {cp: 2}\n", "duplicate-key", "mesh", "the key 'mesh' occurs twice", "keep one"),
        ("mesh: {tp: 2\n", "yaml-syntax", "{", "this `{` is never closed", "close it"),
        ("mesh:\n\ttp: 2\n", "yaml-syntax", "\t", "a tab", "blanks"),
        ("rules:\n  - *.wq: fsdp\n", "unquoted-glob", "*.wq", "as an alias", '"*.wq"'),
        ("mesh: {tp: ${x}}\n", "interpolation", "${x}", "without quotes", "put it in quotes"),
        ("mesh: {tp: '${'}\n", "config-invalid", None, "(at mesh.tp)", "correct or remove the override"),
        ("mesh: !foo {tp: 2}\n", "yaml-tag", "!foo", "the tag '!foo' is not allowed", "leave the tag out"),
        ("mesh: {tp: !!python/object/apply:os.abort []}\n", "yaml-tag", "!!python/object/apply:os.abort", "not allowed", ""),
        ("defaults: [base]\nmesh: [1]\n", "wrong-type", "[1]", "`mesh` takes a map, not a list", "parallel/base"),
        ("defaults: [base]\nrules: {a: fsdp}\n", "wrong-type", "{a: fsdp}", "`rules` takes a list, not a map", "parallel/base"),
        ("[1, 2]: 3\n", "yaml-syntax", "[", "this key is a list or a map", "in quotes"),
        ("mesh: {cp: 2, &p: 2}\n", "yaml-retyped", "&p", "no key before the colon", "in quotes"),
        ("mesh: {cp: 2, null: 2}\n", "yaml-retyped", "null", "no key before the colon", "in quotes"),
        ("mesh: {tp: \x07}\n", "yaml-syntax", "\x07", "U+0007", "remove it"),
    ],
)  # fmt: skip
def test_a_preset_that_is_wrong_is_marked_in_its_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    code: str,
    wrong: str | None,
    message: str,
    advice: str | None,
) -> None:
    (tmp_path / "conf" / "parallel").mkdir(parents=True)
    (tmp_path / "conf" / "parallel" / "broken.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        compose_config(["parallel=broken"], "conf")
    [found] = caught.value.diagnostics
    assert found.code == code and message in found.message and (advice or "") in (found.help or "")
    assert found.span is not None
    if wrong is None:
        assert found.span.file == "<override parallel=broken>"
    else:
        assert found.span.file == "conf/parallel/broken.yaml"
        assert cut(found.span) == wrong


def test_a_file_in_another_encoding_is_found(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "latin.yaml").write_bytes(b"mesh: {tp: 2}  # \xff\n")
    found = refused(["parallel=latin"], str(tmp_path))
    assert found.code == "yaml-syntax" and found.span == Span(
        str(tmp_path / "parallel" / "latin.yaml"), 1, 18, 19
    )


def test_a_folder_or_root_that_is_not_there_is_named() -> None:
    found = refused([], "nope")
    assert (found.code, found.message) == ("config-not-found", "there is no folder nope")
    found = refused([], None, "trian")
    assert (found.code, found.message) == ("config-not-found", "there is no configuration 'trian'")
    assert (found.help or "").startswith("did you mean train?")
