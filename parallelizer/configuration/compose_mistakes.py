"""Why Hydra could not compose a configuration, in terms of the command that was typed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from parallelizer.configuration.override_mistakes import RULES, override_span, value_span
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span, quoted
from parallelizer.diagnostics.nearest import did_you_mean, nearest
from parallelizer.language import yaml_mistakes
from parallelizer.language.parse_rule import quoted_rules
from parallelizer.language.yaml_nodes import (
    MappingNode,
    Node,
    Place,
    Scalar,
    SequenceNode,
    kind,
    read,
    read_text,
    shown_path,
)

OPEN_MAPS = ("parallel.layouts", "parallel.styles", "model")
"""Where a key may be added with `++`."""


@dataclass(frozen=True)
class Attempt:
    """A composition that failed; `compose` tries again with other overrides."""

    overrides: Sequence[str]
    folders: Sequence[Path]
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
        message, help_text = "a configuration file is not UTF-8 text", "save it in the encoding UTF-8"
        unnamed = Diagnostic("yaml-syntax", message, None, help_text)
        return next(_undecodable(attempt.folders), unnamed)
    text = str(error).strip() or str(error.__cause__ or "").strip()
    for pattern, explained in _EXPLAINED:
        match = re.search(pattern, text)
        found = explained(match, attempt) if match else None
        if found is not None:
            return found
    return _unexplained(error, text, attempt)


def _unexplained(error: Exception, text: str, attempt: Attempt) -> Diagnostic:
    """Hydra's own words, at the file or the override that they have to do with."""
    cause = str(error.__cause__ or "").split("\n")
    reason = text.split("\n")[0] or cause[0] or type(error).__name__
    if isinstance(error, RecursionError):
        reason = "a defaults list includes its own file"
    key = next((line.partition("full_key: ")[2] for line in cause if "full_key: " in line), "")
    message = f"the configuration cannot be composed: {reason}" + (f" (at {key})" if key else "")
    where = re.search(r"[Ii]n '([^']+)'", text)
    if where:
        span, help_text = _in_file(where[1], "", attempt), "correct the file's defaults list"
    else:
        span, help_text = _blamed(attempt), "correct or remove the override"
    return Diagnostic("config-invalid", message, span, help_text)


def _named(key: str, attempt: Attempt) -> tuple[str, Span]:
    """The override of a key, and the place of the key in it."""
    for override in attempt.overrides:
        name = override.partition("=")[0]
        if name.lstrip("+~") == key:
            start = len(name) - len(key) + 1
            return override, Span(f"<override {override}>", 1, start, start + len(key))
    return key, override_span(key)


def _missing(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    """A config that is not there: named by an override, or by a defaults list."""
    where, config = match["where"], match["config"]
    group, _, option = config.rpartition("/")
    of_override = next((o for o in attempt.overrides if o.lstrip("+~") == f"{group}={option}"), None)
    span = value_span(of_override) if of_override else _in_file(where, option, attempt) if where else None
    message = f"there is no {group or 'configuration'} {quoted(option)}"
    # Hydra's own groups are in no folder: it lists them, indented.
    known = attempt.options(group) or re.findall(r"^\t(\S+)$", match.string, re.MULTILINE)
    return Diagnostic("unknown-preset", message, span, did_you_mean(option, known, "there are"))


def _no_root(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    message = f"there is no configuration {quoted(match[1])}"
    help_text = did_you_mean(match[1], attempt.options(""), "--config-name takes")
    return Diagnostic("config-not-found", message, None, help_text)


def _unknown_key(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    key = match[1]
    override, span = _named(key, attempt)
    parent, _, last = key.rpartition(".")
    known = _known_keys(attempt)
    siblings = known.get(parent, [])
    elsewhere = [f"{p}.{last}" if p else last for p, names in known.items() if last in names]
    meant, wrong = _respelled(key.split("."), known)
    if "@" in key:
        help_text = f"remove the text after the `@`: {key.partition('@')[0]}=<value>"
    elif parent.startswith(OPEN_MAPS) or not known:
        near = nearest(last, siblings, 1)
        added = f"to add a key to {parent or 'the configuration'}, write ++{override.lstrip('+')}"
        help_text = f"did you mean {near[0]}?" if near else added
    elif not siblings:
        span = _part(span, key, wrong)
        help_text = f"did you mean {meant}?" if meant else f"{parent} has no keys"
        if not meant and parent not in _paths(known):
            top = wrong == 0
            around = ".".join(key.split(".")[:wrong])
            below = [path for path in sorted(_paths(known)) if path.endswith(f".{key}")]
            help_text = (
                f"did you mean {below[0]}?"
                if below
                else did_you_mean(
                    key.split(".")[wrong], known.get(around, []), "there are" if top else f"{around} has"
                )
            )
    else:
        span = _part(span, key, wrong)
        help_text = did_you_mean(last, siblings, f"{parent} has" if parent else "there are")
        if elsewhere and not nearest(last, siblings, 1):
            help_text = f"did you mean {elsewhere[0]}? {help_text}"
    return Diagnostic("unknown-key", f"there is no key {quoted(key)}", span, help_text)


def _paths(known: Mapping[str, Sequence[str]]) -> set[str]:
    """Every path that there is, of maps and of values."""
    return {f"{path}.{name}" if path else name for path, names in known.items() for name in names}


def _respelled(parts: Sequence[str], known: Mapping[str, Sequence[str]]) -> tuple[str | None, int]:
    """The key that a misspelt one may mean, if there is one, and which of its parts is the first wrong one."""
    path, wrong = "", -1
    for at, part in enumerate(parts):
        names = known.get(path, [])
        near = [part] if part in names else nearest(part, names, 1)
        if part not in names and wrong < 0:
            wrong = at
        if not near:
            return None, max(wrong, 0)
        path = f"{path}.{near[0]}" if path else near[0]
    return path, max(wrong, 0)


def _part(span: Span, key: str, at: int) -> Span:
    """One part of a dotted key that stands at `span`."""
    parts = key.split(".")
    start = span.column + sum(len(part) + 1 for part in parts[:at])
    return replace(span, column=start, end_column=start + len(parts[at]))


def _known_keys(attempt: Attempt) -> dict[str, list[str]]:
    """By the path of each map, its keys, with the overrides of groups alone; nothing if that fails too."""
    groups = [override for override in attempt.overrides if attempt.options(override.partition("=")[0])]
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
    key = override.partition("=")[0].lstrip("+")
    if key in RULES:
        message, help_text = f"{key} takes one list", f"put all rules into this list: {quoted_rules(key, '')}"
    else:
        message = "several values for one key are a sweep"
        help_text = f"`python -m recipes.train -m {override}` runs each; a comma inside a value needs quotes"
    return Diagnostic("override-sweep", message, value_span(override), help_text)


def _twice(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    override, span = _named(match[1], attempt)
    message = f"{quoted(match[1])} exists already and cannot be added again"
    return Diagnostic("unknown-key", message, span, f"write {override.lstrip('+')}")


def _nothing_to_delete(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    _, span = _named(match[1].partition("=")[0], attempt)
    message = f"there is no {quoted(match[1])} to remove"
    return Diagnostic("unknown-key", message, span, "remove the override")


def _cannot_merge(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    key = match[1].partition("=")[0].lstrip("+")
    if key in RULES:
        message = f"{key} takes a list of rules"
        help_text = f"write each in quotes: {quoted_rules(key, '')}"
    else:
        message = f"{key} takes a value of another type: a map, a list or a text"
        help_text = "look at the value in the configuration"
    return Diagnostic("wrong-type", message, value_span(match[1]), help_text)


def _wrong_kind(match: re.Match[str], attempt: Attempt) -> Diagnostic:
    """A preset that has a list where its base has a map, or a map where that has a list."""
    message = (
        f"{match['where']} has a value of another type (a map, a list or a text) than the configuration that "
        "it is merged into"
    )
    path = attempt.path(match["where"])
    node = _read_trusted(path) if path is not None else None
    for key, value in node if isinstance(node, MappingNode) else ():
        if key.text in ("mesh", "layouts", "styles", "rules") and not isinstance(value, Scalar):
            wanted = "a list" if key.text == "rules" else "a map"
            if kind(value) != wanted:
                return Diagnostic(
                    "wrong-type", f"`{key.text}` takes {wanted}, not {kind(value)}", value.span, _AS_BASE
                )
    return Diagnostic("wrong-type", message, _in_file(match["where"], "", attempt), _AS_BASE)


def _key_of_nothing(match: re.Match[str], attempt: Attempt) -> Diagnostic | None:
    """A key without a text: `&p: 2`, of which YAML takes `&p` for an anchor, its name for a key of nothing."""
    message = "there is no key before the colon"
    for path in (path for folder in attempt.folders for path in sorted(folder.rglob("*.yaml"))):
        for key in _keys(_read_trusted(path)):
            if key.plain and key.text in ("", "~", "null"):
                wrong = " (YAML reads it as an anchor)" if key.text == "" else ""
                return Diagnostic(
                    "yaml-retyped",
                    message + wrong,
                    key.span,
                    "put a key in quotes if YAML reads it as null",
                )
    return None


def _keys(node: Node | None) -> Iterator[Scalar]:
    if isinstance(node, SequenceNode):
        for item in node.items:
            yield from _keys(item)
    elif isinstance(node, MappingNode):
        for key, value in node:
            yield key
            yield from _keys(value)


_AS_BASE = "parallel/base shows what each key takes"


def _group_value(match: re.Match[str], attempt: Attempt) -> Diagnostic | None:
    """A group that was set to a number or to nothing."""
    for override in attempt.overrides:
        group, _, option = override.partition("=")
        group = group.lstrip("+~")
        if not group:
            message = "there is no key before the `=`"
            return Diagnostic("unknown-key", message, override_span(override), "write key=value")
        options = attempt.options(group)
        if options and option not in options:
            message = f"there is no {group} {quoted(option)}"
            help_text = did_you_mean(option, options, "there are")
            return Diagnostic("unknown-preset", message, value_span(override), help_text)
    return None


_EXPLAINED: Sequence[tuple[str, Callable[[re.Match[str], Attempt], Diagnostic | None]]] = (
    (r"(?:In '(?P<where>[^']+)': )?Could not (?:find|load) '(?P<config>[^']+)'", _missing),
    (r"Cannot find primary config '([^']+)'", _no_root),
    (r"Could not override '([^']+)'", _unknown_key),
    (r"(?:Ambiguous value for argument|Sweep parameters) '([^\n]+?)'", _sweep),
    (r"An item is already at '([^']+)'", _twice),
    (r"Multiple values for ([\w/@.]+)\.", _twice),
    (r"force-add of config groups is not supported: '\++([\w/@.]*)", _twice),
    (r"Could not delete from config\. '([^']+)'", _nothing_to_delete),
    (r"Could not delete '([^']+)'", _nothing_to_delete),
    (r"Error merging override ([^\n]+)", _cannot_merge),
    (r"In '(?P<where>[^']+)': ConfigTypeError raised", _wrong_kind),
    (r"Config group override must be", _group_value),
    (r"Incompatible key type 'NoneType'", _key_of_nothing),
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
    node = _read_trusted(path)
    defaults = node.get("defaults") if isinstance(node, MappingNode) else None
    values = _scalars(defaults) if defaults is not None else iter(())
    named = (value.span for value in values if word and value.text.rpartition("/")[2] == word)
    return next(named, Span(shown_path(path)))


def _read_trusted(path: Path) -> Node | None:
    shown = shown_path(path)
    try:
        return read(read_text(str(path), shown), shown, trusted=True)
    except PlanError:
        return None


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
        return value_span(override)
    return None
