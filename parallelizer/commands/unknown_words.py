"""Words of the command line that no command knows: which command they stand in, and what may have been meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from parallelizer.diagnostics.nearest import nearest


class Parser(argparse.ArgumentParser):
    """argparse's parser, which tells a near word behind a value that is none of its choices."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        chosen = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = nearest(chosen[1], re.findall(r"[\w-]+", chosen[2]), 1) if chosen else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def refuse_options(words: Sequence[str], name: str, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """End with the usage of the command `name` if any of the `words` that it left over is an option."""
    unknown = [word for word in words if word.startswith("-")]
    if not unknown:
        return
    command = commands[name]
    own = _options(command)
    parts = []
    for word in unknown:
        option = word.partition("=")[0]
        near = nearest(option, own, 1)
        others = [other for other, parser in commands.items() if option in _options(parser)]
        if option in own:
            hint = f" (it stands behind the command: {name} {word})"
        elif near:
            hint = f" (did you mean {near[0]}?)"
        elif others:
            hint = f" (an option of {', '.join(others)})"
        else:
            hint = ""
        parts.append(word + hint)
    command.error(f"unrecognized arguments: {', '.join(parts)}")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser, as its help lists them."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]*", parser.format_usage())))
