"""What is wrong with how a case ended."""

from __future__ import annotations

import json
import re

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from parallelizer.configuration.limits import MAX_OVERRIDES
from tests.fuzz.corpus import Case
from tests.fuzz.drive import Outcome

MAX_SECONDS = 1.0
MAX_GROWTH = 256 * 2**20


def judge(case: Case, outcome: Outcome) -> str | None:
    """What is wrong, beginning with a word for its kind; None if nothing is."""
    if outcome.crash:
        return f"traceback: {outcome.crash}"
    if outcome.seconds > MAX_SECONDS:
        return f"slow: {outcome.seconds:.2f} s"
    if outcome.grown > MAX_GROWTH:
        return f"memory: {outcome.grown / 2**20:.0f} MiB"
    if outcome.status not in ((0, 1, 2) if case.kind == "override" else (0, 1)):
        return f"status: {outcome.status}"
    return _wrong_status(case, outcome) or _wrong_output(case, outcome)


def _wrong_status(case: Case, outcome: Outcome) -> str | None:
    """Compare the status with what PyYAML's parser and Hydra's say of the same text."""
    if case.kind == "override":
        parses = _parses(case.words)
        if parses is not None and (outcome.status == 2) == parses:
            return f"status: {outcome.status} of overrides that {'parse' if parses else 'do not parse'}"
        return None
    if outcome.status == 0 and not _is_yaml(case.content):
        return "status: 0 of a text that is no YAML"
    return None


def _parses(words: tuple[str, ...]) -> bool | None:
    """Whether Hydra's grammar reads overrides; None for what we refuse before it is asked."""
    if sum(map(len, words)) > MAX_OVERRIDES or any(sum(map(w.count, "[{(")) > 32 for w in words):
        return None
    files = ["=" not in w and ("/" in w or w.endswith((".yaml", ".yml"))) for w in words]
    if any(files):  # read as plan files
        return None if all(files) else False
    try:
        OverridesParser.create().parse_overrides(list(words))
        return True
    except HydraException:
        return False
    except Exception:  # a fault of Hydra's own
        return None


def _is_yaml(content: bytes) -> bool:
    try:
        for _ in yaml.parse(content.decode("utf-8-sig"), Loader=yaml.SafeLoader):
            pass
    except (yaml.YAMLError, UnicodeDecodeError, ValueError):
        return False
    return True


def _wrong_output(case: Case, outcome: Outcome) -> str | None:
    printed = outcome.err + outcome.out
    if hidden := re.search(r"[^\n\x20-\x7e\xa1-\U0010ffff]", printed):
        return f"output: the character U+{ord(hidden[0]):04X} is printed"
    if outcome.status == 2:
        return (
            None if "error" in outcome.err and not outcome.out else "output: nothing said of a syntax error"
        )
    if case.as_json:
        return _wrong_document(case, outcome)
    if outcome.status == 0:
        return None if "well formed" in outcome.out else "output: nothing said of a plan that is well formed"
    if outcome.out or not re.fullmatch(
        r"\d+ errors?(, \d+ warnings?)?", outcome.err.rstrip("\n").rpartition("\n")[2]
    ):
        return "output: no count of errors at the end"
    return None


def _wrong_document(case: Case, outcome: Outcome) -> str | None:
    try:
        document = json.loads(outcome.out)
    except ValueError:
        return "output: no JSON"
    found = document["diagnostics"]
    errors = [d for d in found if d["severity"] == "error"]
    if document["valid"] != (outcome.status == 0) or bool(errors) == document["valid"] or outcome.err:
        return "output: status, `valid` and diagnostics differ"
    for one in found:
        if not (one["code"] and one["message"]):
            return f"output: a diagnostic says nothing: {one}"
        if wrong := _wrong_span(case, one["span"]):
            return f"span: {wrong} in {one['code']}: {one['message']}"
    return None


_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


def _wrong_span(case: Case, span: dict[str, int | str] | None) -> str | None:
    """A place that the file does not have."""
    if span is None or not str(span["file"]).endswith("fuzzed.yaml"):
        return None
    line, column, end = (int(span[key]) for key in ("line", "column", "end_column"))
    lines = _LINE_BREAK.split(case.content.decode("utf-8-sig", "replace"))
    if line == column == end == 1:
        return None  # the file
    if not 1 <= line <= len(lines) or not 1 <= column < end:
        return f"{line}:{column}-{end} of {len(lines)} lines"
    if column > len(lines[line - 1]) + 1:
        return f"{line}:{column} of {len(lines[line - 1])} columns"
    return None
