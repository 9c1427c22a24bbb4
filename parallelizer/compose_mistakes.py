"""Why Hydra could not compose a configuration, in the words of somebody who typed the command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from parallelizer import yaml_mistakes
from parallelizer.diagnostics import Diagnostic, PlanError, Span, quoted
from parallelizer.source import MappingNode, Node, Place, Scalar, SequenceNode, read, read_text, shown_path
from parallelizer.suggest import did_you_mean, nearest


@dataclass(frozen=True)
class Attempt:
    """A composition that failed; `compose` tries again with other overrides."""

    overrides: Sequence[str]
    folders: Sequence[Path]
    config_name: str
    compose: Callable[[Sequence[str]], DictConfig]

    def options(self, group: str) -> list[str]:
        """The configs of a group."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})

    def path(self, config: str) -> Path | None:
        """The file of a config."""
        return next((f for folder in self.folders if (f := folder / f"{config}.yaml").is_file()), None)


def explain(error: Exception, attempt: Attempt) -> Diagnostic:
    """The diagnostic for an exception of Hydra's; nothing that Hydra says about itself is left in it."""
    if isinstance(error, yaml.YAMLError):
        return _explain_yaml(error)
    if isinstance(error, UnicodeDecodeError):
        return next(
            _undecodable(attempt.folders), Diagnostic("yaml-syntax", "a configuration file is not UTF-8 text")
        )
    text = str(error).strip()
    for pattern, explained in _EXPLAINED:
        if match := re.search(pattern, text):
            found = explained(match, attempt)
            if found is not None:
                return found
    cause = str(error.__cause__).split("\n") if error.__cause__ else []
    key = next(
        (line.split(": ", 1)[1] for line in cause if "full_key: " in line and not line.endswith(": ")), None
    )
    reason = cause[0] if cause and not text else text.split("\n")[0]
    if isinstance(error, RecursionError):
        reason = "a defaults list comes back to its own file"
    message = f"the configuration cannot be composed: {reason}" + (f" (at {key})" if key else "")
    where = re.search(r"[Ii]n '([^']+)'", text)
    span = _in_file(where[1], "", attempt) if where else _blamed(attempt)
    return Diagnostic("config-invalid", message, span, "see the defaults list and the files that it names")


def explain_override(override: str, reason: str, overrides: Sequence[str]) -> Diagnostic:
    """The diagnostic for an override that Hydra's grammar does not read."""
    name, equals, value = override.partition("=")
    if not equals:
        help_text = "an override is key=value"
        if "rules" in " ".join(overrides):
            help_text += "; a rule's blanks need quotes: 'rules=[\"layers.*: checkpoint\"]'"
        message = f"{quoted(override)} is no override"
        return Diagnostic(
            "override-syntax", message, Span(f"<override {override}>", 1, 1, len(override) + 1), help_text
        )
    key = name.lstrip("+~")
    span = _value_span(override)
    called = re.match(r"\s*(\w+)\s*\(", value)
    if key in ("rules", "parallel.rules"):
        message = "Hydra cannot read these rules without quotes"
        return Diagnostic(
            "override-syntax",
            message,
            span,
            f"put each rule in quotes: {_quoted_rules(name, override, overrides)}",
        )
    if called:
        message = f"Hydra reads {quoted(value)} as the call of a function"
    else:
        message = f"Hydra cannot read {quoted(value)}: {_plain(reason)}"
    inside = '"' if "'" in value else "'"
    outside = "'" if inside == '"' else '"'
    return Diagnostic(
        "override-syntax",
        message,
        span,
        f"put it in quotes: {outside}{name}={inside}{value}{inside}{outside}",
    )


def _quoted_rules(name: str, override: str, overrides: Sequence[str]) -> str:
    """How rules are written so that both the shell and Hydra leave them alone."""
    words = list(overrides[list(overrides).index(override) :])
    # Without quotes the shell has cut the list at its blanks.
    end = next((at for at, word in enumerate(words) if word.rstrip().endswith("]")), 0)
    text = " ".join(words[: end + 1]).partition("=")[2].strip()
    inner = text.removeprefix("[").removesuffix("]").strip()
    if not inner or inner[0] in "\"'":
        inner = "layers.*: checkpoint"
    return f"'{name}=[\"{inner}\"]'" if '"' not in inner and "'" not in inner else f"\"{name}=['...']\""


def _plain(reason: str) -> str:
    """Hydra's parser's complaint in one line, without the override and without the link to its grammar."""
    lines = [
        line
        for line in reason.split("\n")
        if line.strip(" ^") and not line.startswith(("See ", "Error parsing"))
    ]
    return (lines[0] if lines else "it does not parse").replace(
        "LexerNoViableAltException: ", "no such syntax in "
    )


def _value_span(override: str) -> Span:
    value = override.partition("=")[2]
    start = len(override) - len(value) + 1
    return Span(f"<override {override}>", 1, start, start + max(len(value), 1))


def _named(key: str, attempt: Attempt) -> tuple[str, Span]:
    """The override of a key, and the place of the key in it."""
    for override in attempt.overrides:
        name = override.partition("=")[0]
        if name.lstrip("+~") == key:
            start = len(name) - len(key) + 1
            return override, Span(f"<override {override}>", 1, start, start + len(key))
    return key, Span(f"<override {key}>", 1, 1, len(key) + 1)


def _missing(match: re.Match[str], attempt: Attempt) -> Diagnostic | None:
    """A config that is not there: named by an override, or by a defaults list."""
    where, config = match["where"], match["config"]
    group, _, option = config.rpartition("/")
    help_text = did_you_mean(option, attempt.options(group), "there are")
    for override in attempt.overrides:
        if (
            override.lstrip("+~").rstrip("/") == f"{group}={option}"
            or override.lstrip("+~") == f"{group}={option}"
        ):
            message = f"there is no {group} {quoted(option)}"
            return Diagnostic("unknown-preset", message, _value_span(override), help_text)
    message = f"there is no {group or 'configuration'} {quoted(option)}"
    return Diagnostic(
        "unknown-preset", message, _in_file(where, option, attempt) if where else None, help_text
    )


def _no_root(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    known = sorted({path.stem for folder in attempt.folders for path in folder.glob("*.yaml")})
    message = f"there is no configuration {quoted(match[1])}"
    return Diagnostic("config-not-found", message, None, did_you_mean(match[1], known, "--config-name takes"))


def _unknown_key(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    key = match[1].partition("@")[0]
    override, span = _named(match[1], attempt)
    known = _known_keys(attempt)
    parent, _, last = key.rpartition(".")
    siblings = known.get(parent, [])
    elsewhere = [f"{p}.{last}" if p else last for p, names in known.items() if last in names and p != parent]
    help_text = did_you_mean(last, siblings, f"{parent} has" if parent else "there are")
    if elsewhere and not nearest(last, siblings, 1):
        help_text = f"did you mean {elsewhere[0]}? {help_text}"
    if parent.startswith(("parallel.layouts", "parallel.styles", "model")) or not siblings:
        help_text = f"to add it to an open map, write ++{override.lstrip('+')}"
    return Diagnostic("unknown-key", f"there is no key {quoted(key)}", span, help_text)


def _known_keys(attempt: Attempt) -> dict[str, list[str]]:
    """By the path of each map, the keys in it, when only groups are overridden; nothing if that fails too."""
    groups = [
        o for o in attempt.overrides if any((f / o.partition("=")[0]).is_dir() for f in attempt.folders)
    ]
    try:
        config = attempt.compose(groups)
    except Exception:  # the groups are wrong as well: then there is nothing to compare with
        return {}
    known: dict[str, list[str]] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict) and path != "hydra":
            known[path] = [str(name) for name in value if name != "hydra"]
            for name, below in value.items():
                visit(f"{path}.{name}" if path else str(name), below)

    visit("", OmegaConf.to_container(config, resolve=False))
    return known


def _sweep(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    override = match[1]
    help_text = (
        f"`python -m recipes.train -m {override}` runs each; a comma that belongs to the value needs quotes"
    )
    return Diagnostic(
        "override-sweep", "several values for one key are a sweep", _value_span(override), help_text
    )


def _twice(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    override, span = _named(match[1], attempt)
    message = f"{quoted(match[1])} is there already: `+` would add it a second time"
    return Diagnostic("unknown-key", message, span, f"write {override.lstrip('+')}")


def _nothing_to_delete(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    _, span = _named(match[1].partition("=")[0], attempt)
    return Diagnostic(
        "unknown-key", f"there is no {quoted(match[1])} to remove", span, "leave the override out"
    )


def _cannot_merge(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    message = f"{match[1].partition('=')[0].lstrip('+')} takes another kind of value (a map, a list, a text)"
    return Diagnostic("wrong-type", message, _value_span(match[1]), "see what the configuration has there")


def _group_value(match: re.Match[str], attempt: Attempt) -> Diagnostic | None:
    """A group that was set to a number or to nothing."""
    for override in attempt.overrides:
        group, _, option = override.partition("=")
        group = group.lstrip("+~")
        if not group or any((folder / group).is_dir() for folder in attempt.folders):
            if group and option in attempt.options(group):
                continue
            message = f"there is no {group} {quoted(option)}" if group else "there is no key before the `=`"
            help_text = (
                did_you_mean(option, attempt.options(group), "there are") if group else "write key=value"
            )
            return Diagnostic("unknown-preset", message, _value_span(override), help_text)
    return None


_EXPLAINED: Sequence[tuple[str, Callable[[re.Match[str], Attempt], Diagnostic | None]]] = (
    (r"(?:In '(?P<where>[^']+)': )?Could not (?:find|load) '(?P<config>[^']+)'", _missing),
    (r"Cannot find primary config '([^']+)'", _no_root),
    (r"Could not override '([^']+)'", _unknown_key),
    (r"(?:Ambiguous value for argument|Sweep parameters) '([^\n]+?)'", _sweep),
    (r"An item is already at '([^']+)'", _twice),
    (r"Multiple values for ([\w/@.]+)\.", _twice),
    (r"Could not delete from config\. '([^']+)'", _nothing_to_delete),
    (r"Could not delete '([^']+)'", _nothing_to_delete),
    (r"Error merging override ([^\n]+)", _cannot_merge),
    (r"Config group override must be", _group_value),
)
"""What Hydra says, and who explains it."""


def _explain_yaml(error: yaml.YAMLError) -> Diagnostic:
    """An error in the YAML of a configuration file, which PyYAML names in its marks."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    name = mark.name if mark is not None else str(getattr(error, "name", ""))
    try:
        text = read_text(name, shown_path(name))
    except PlanError as unreadable:
        return unreadable.diagnostics[0]
    place = Place(shown_path(name))
    if isinstance(error, yaml.MarkedYAMLError):
        return yaml_mistakes.explain(error, text, place.span)
    if isinstance(error, yaml.reader.ReaderError):
        return yaml_mistakes.unreadable_character(error, text, place.span)
    return Diagnostic("yaml-syntax", str(error).split("\n")[0], Span(shown_path(name)))


def _undecodable(folders: Sequence[Path]) -> Iterator[Diagnostic]:
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            read_text(str(path), shown_path(path))
        except PlanError as error:
            yield from error.diagnostics


def _in_file(config: str, word: str, attempt: Attempt) -> Span | None:
    """Where a word stands as a value in a config's defaults list; the file's first line if it does not."""
    path = attempt.path(config)
    if path is None:
        return None
    shown = shown_path(path)
    try:
        node = read(read_text(str(path), shown), shown, trusted=True)
    except PlanError:
        return Span(shown)
    defaults = node.get("defaults") if isinstance(node, MappingNode) else None
    values = _scalars(defaults) if defaults is not None else iter(())
    return next((v.span for v in values if word and v.text.rpartition("/")[2] == word), Span(shown))


def _scalars(node: Node) -> Iterator[Scalar]:
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _scalars(item)
    else:
        for _, value in node:
            yield from _scalars(value)


def _blamed(attempt: Attempt) -> Span | None:
    """The one override without which the configuration can be composed, if there is one."""
    for override in attempt.overrides:
        try:
            attempt.compose([other for other in attempt.overrides if other is not override])
        except Exception:  # the mistake is still there
            continue
        return (
            _value_span(override)
            if "=" in override
            else Span(f"<override {override}>", 1, 1, len(override) + 1)
        )
    return None
