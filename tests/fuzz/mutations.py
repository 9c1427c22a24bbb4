"""Ways in which a text can be spoilt, from a character to a bomb. All randomness is the caller's."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from parallelizer.language.plan import AXES
from parallelizer.language.styles import STYLES

Mutation = Callable[[str, random.Random], str]

CHARACTERS = (
    "abcxyzLQ019._-:,;*?[]{}()<>|&!%@#`'\"\\/=+~^"
    "$ \t\n\r\0\x07\x1b\x7f\x85\xa0éßñ中\u200b\u202e\u2028\ufeff\U0001f600\ud7ff"
)
WORDS = (
    *STYLES,
    *AXES,
    *dict.fromkeys(option for style in STYLES.values() for option in style.options),
    *("none", "style", "optional", "version", "extends", "layouts", "rules", "buffers", "batch", "model"),
    *("replicate", "partial", "shard(1)", "shard(-1)", "shard(99)", "shard()", "shard(1) -> replicate", "->"),
    *(
        "no",
        "on",
        "off",
        "yes",
        "y",
        "~",
        "null",
        "",
        "012",
        "0x1f",
        "0.10",
        "1e3",
        ".inf",
        ".nan",
        "190:20:30",
    ),
    *("2001-01-01", "<<", "=", "-0", "+1", "1_000", "0b1", "true", "TRUE", "-", "?", ":", "--- ", "..."),
    *("99999999999999999999999999", "-1", "1e999", "0" * 400, "9" * 5000),
    *(
        "_target_",
        "_recursive_",
        "_partial_",
        "hydra:",
        "defaults",
        "${x}",
        "${oc.env:HOME}",
        "${hydra:run.dir}",
    ),
    *(
        "!!python/object/apply:os.system",
        "!!python/name:os.system",
        "!!str",
        "!",
        "&a",
        "*a",
        "&a *a",
        "%YAML 9.9",
    ),
    *(
        "{0.__class__}",
        "%s%s%n",
        "../../etc/passwd",
        "/dev/zero",
        "~/.ssh/id_rsa",
        "$HOME",
        "`id`",
        "x" * 2000,
    ),
)
"""The words of the language, YAML's traps, and what a hostile plan would try."""

GLOBS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: "{a,b}" * rng.choice((2, 10, 12, 13, 200)),
    lambda rng: f"{{0..{rng.choice((9, 4095, 4096, 999_999_999, 10**30))}}}",
    lambda rng: "{0..99}" * rng.randint(1, 5),
    lambda rng: f"{{{'9' * rng.choice((3, 400, 5000))}..0}}",
    lambda rng: ".".join(["**"] * rng.choice((2, 30, 300))),
    lambda rng: ".".join(["**", "a"] * rng.choice((2, 30, 240))),
    lambda rng: "*" * rng.choice((1, 2, 3, 900)),
    lambda rng: "*a" * rng.choice((5, 100, 490)),
    lambda rng: "{" * rng.choice((1, 30, 900)) + "a,b" + "}" * rng.choice((1, 30, 40)),
    lambda rng: "{,}" * rng.choice((1, 5, 300)),
    lambda rng: "[" * rng.choice((1, 30, 500)) + "a" + "]" * rng.choice((0, 1, 30)),
    lambda rng: "[!a-z]" * rng.choice((1, 150)),
    lambda rng: "{0..8..0}.{a..c}.{-5..5..2}",
    lambda rng: "layers." + "{0..1}." * rng.randint(1, 9) + "x",
    lambda rng: "a" * rng.choice((999, 1000, 1001, 100_000)),
    lambda rng: ".".join("a" * rng.choice((2, 400))),
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A file with one to four mutations; rarely, one of its bytes or its encoding is spoilt too."""
    text = content.decode(errors="replace")
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        text = rng.choice(MUTATIONS)(text, rng)
    kind = rng.random()
    if kind < 0.01:
        return text.encode("utf-16", "replace")
    made = text.encode("utf-8", "surrogatepass")
    if kind < 0.03:
        at = rng.randrange(len(made) + 1)
        made = made[:at] + bytes([rng.randrange(128, 256)]) + made[at:]
    return made


def mutated_word(word: str, rng: random.Random) -> str:
    """An override with one or two mutations; no NUL, which no command line can carry."""
    for _ in range(rng.choice((1, 1, 2))):
        word = rng.choice(WORD_MUTATIONS)(word, rng)
    return word.replace("\0", "")


# --- characters, words, lines ------------------------------------------------------------------


def delete_character(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + 1 :]


def insert_character(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(CHARACTERS) * rng.choice((1, 1, 1, 2, 50)) + text[at:]


def replace_character(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(CHARACTERS) + text[at + 1 :]


def swap_characters(text: str, rng: random.Random) -> str:
    at = rng.randrange(max(len(text) - 1, 1))
    return text[:at] + text[at : at + 2][::-1] + text[at + 2 :]


def _a_word(text: str, rng: random.Random) -> tuple[int, int]:
    found = list(re.finditer(r"[\w.*{}\[\]()>-]+", text))
    if not found:
        return 0, 0
    word = rng.choice(found)
    return word.start(), word.end()


def replace_word(text: str, rng: random.Random) -> str:
    start, end = _a_word(text, rng)
    return text[:start] + rng.choice(WORDS) + text[end:]


def insert_word(text: str, rng: random.Random) -> str:
    start, _ = _a_word(text, rng)
    return text[:start] + rng.choice(WORDS) + rng.choice((" ", ": ", ", ", "")) + text[start:]


def delete_word(text: str, rng: random.Random) -> str:
    start, end = _a_word(text, rng)
    return text[:start] + text[end:]


def replace_by_glob(text: str, rng: random.Random) -> str:
    start, end = _a_word(text, rng)
    glob, quote = rng.choice(GLOBS)(rng), rng.choice(("", '"', "'"))
    return text[:start] + quote + glob + quote + text[end:]


def _on_lines(change: Callable[[list[str], int, random.Random], None]) -> Mutation:
    def mutation(text: str, rng: random.Random) -> str:
        lines = text.split("\n")
        change(lines, rng.randrange(len(lines)), rng)
        return "\n".join(lines)

    return mutation


def _delete_line(lines: list[str], at: int, rng: random.Random) -> None:
    del lines[at]


def _repeat_line(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at:at] = [lines[at]] * rng.choice((1, 1, 2, 100, 3000))


def _swap_lines(lines: list[str], at: int, rng: random.Random) -> None:
    other = rng.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def _indent_line(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = rng.choice((" ", "  ", "\t", " \t", "- ", "? ", " " * 90)) + lines[at]


def _dedent_line(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = lines[at].lstrip()


def _join_lines(lines: list[str], at: int, rng: random.Random) -> None:
    if at + 1 < len(lines):
        lines[at : at + 2] = [lines[at] + lines[at + 1]]


def _mess_up_line(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = rng.choice(
        ("---", "...", "%YAML 1.1", "? a", ": b", "- - - -", "<<: *a", "a: &a b", "key: |", "key: >-", "\t")
    )


def _number_lines(lines: list[str], at: int, rng: random.Random) -> None:
    pattern = lines[at]
    lines[at:at] = [
        f"{pattern[: len(pattern) - len(pattern.lstrip())]}m{n}: fsdp" for n in range(rng.choice((5, 1500)))
    ]


# --- the whole text ----------------------------------------------------------------------------


def truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def other_line_ends(text: str, rng: random.Random) -> str:
    return text.replace("\n", rng.choice(("\r\n", "\r", "\n\n", "\u2028", "\x85")))


def byte_order_mark(text: str, rng: random.Random) -> str:
    return "\ufeff" * rng.choice((1, 2)) + text


def tabs(text: str, rng: random.Random) -> str:
    return text.replace("  ", "\t", rng.choice((1, -1)))


def long_line(text: str, rng: random.Random) -> str:
    at, length = rng.randrange(len(text) + 1), rng.choice((1000, 20_000, 240_000, 300_000))
    return (
        text[:at]
        + (rng.choice(("a", " ", "a ", "#", "'", "[", "{a: ", "- ", "a, ", "\\", "é")) * length)[:length]
        + text[at:]
    )


def other_quotes(text: str, rng: random.Random) -> str:
    one, other = rng.sample(("'", '"', ""), 2)
    return text.replace(one, other) if one else replace_by_glob(text, rng)


# --- YAML's structure --------------------------------------------------------------------------


def _value(text: str, rng: random.Random, value: str) -> str:
    """The text with one of its values replaced."""
    found = list(re.finditer(r"(?<=: )\S[^\n]*", text))
    if not found:
        return text + value
    at = rng.choice(found)
    return text[: at.start()] + value + text[at.end() :]


def deep(text: str, rng: random.Random) -> str:
    depth = rng.choice((5, 33, 100, 500, 5000))
    opening, closing = rng.choice(
        (("[", "]"), ("{a: ", "}"), ("[{a: ", "}]"), ("{? ", "}"), ("- ", ""), ("\n" + " ", ""))
    )
    if opening == "\n ":
        return text + "\n" + "\n".join(" " * n + "a:" for n in range(min(depth, 500)))
    return _value(text, rng, opening * depth + "a" + closing * rng.choice((depth, depth, depth - 1)))


def alias_bomb(text: str, rng: random.Random) -> str:
    width, height = rng.choice(((9, 9), (2, 30), (10, 4), (100, 3)))
    lines = ["a0: &a0 [x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, height)
    ]
    bomb = "\n".join(lines) + "\n"
    where = rng.random()
    if where < 0.4:
        return bomb + text
    if where < 0.7:
        return text + "\n" + bomb
    return re.sub(
        r"(?m)^(rules|layouts|mesh|styles):.*$", lambda m: f"{bomb}{m[1]}: *a{height - 1}", text, count=1
    )


def anchor_and_alias(text: str, rng: random.Random) -> str:
    return _value(_value(text, rng, "&x fsdp"), rng, rng.choice(("*x", "[*x, *x]", "{<<: *x}", "*y")))


def tag(text: str, rng: random.Random) -> str:
    return _value(
        text,
        rng,
        rng.choice(
            (
                "!!python/object/apply:os.system [echo fuzzed]",
                "!!python/object/new:type [x]",
                "!!python/name:os.environ",
                "!!python/module:antigravity",
                "!!binary aGVsbG8=",
                "!!set {a, b}",
                "!foo!bar baz",
                "!<tag:x> y",
                "!!timestamp nonsense",
                "!!int nonsense",
            )
        ),
    )


def huge_number(text: str, rng: random.Random) -> str:
    return _value(
        text,
        rng,
        rng.choice(("9" * 30, "9" * 5000, "-" + "9" * 400, "1e400", "0x" + "f" * 900, "1:" * 300 + "1")),
    )


def block_scalar(text: str, rng: random.Random) -> str:
    return _value(text, rng, rng.choice(("|\n   a\n   b", ">-\n  a", "|9\n a", "|0\n a", "|-", ">+\n\n\n")))


def escape_sequence(text: str, rng: random.Random) -> str:
    return _value(
        text,
        rng,
        rng.choice(('"\\UFFFFFFFF"', '"\\x1b[2J"', '"\\ud800"', '"\\0"', '"\\N"', '"\\\n  a"', '"\\u202e"')),
    )


def collection_as_key(text: str, rng: random.Random) -> str:
    return text + rng.choice(
        ("\n? [a, b]\n: c\n", "\n{a: b}: c\n", "\n[a]: b\n", "\n? \n: \n", "\n? |\n  a\n: b\n")
    )


def interpolation_bomb(text: str, rng: random.Random) -> str:
    height = rng.choice((3, 12, 30))
    lines = [f"i{n}: '${{i{n + 1}}}${{i{n + 1}}}'" for n in range(height)] + [f"i{height}: xxxxxxxxxx"]
    return (
        text
        + "\n"
        + "\n".join(line.replace("${i", rng.choice(("${i", "${parallel.i", "${.i"))) for line in lines)
        + "\n"
    )


MUTATIONS: tuple[Mutation, ...] = (
    *(delete_character, insert_character, replace_character, swap_characters) * 3,
    *(replace_word, insert_word, delete_word, replace_by_glob) * 3,
    *map(_on_lines, (_delete_line, _repeat_line, _swap_lines, _indent_line, _dedent_line, _join_lines)),
    *map(_on_lines, (_mess_up_line, _number_lines)),
    *(truncate, other_line_ends, byte_order_mark, tabs, long_line, other_quotes),
    *(deep, alias_bomb, anchor_and_alias, tag, huge_number, block_scalar, escape_sequence, collection_as_key),
    interpolation_bomb,
)
"""What one step does to a file; those of characters and words stand thrice, so that they come as often."""


def _deep_value(word: str, rng: random.Random) -> str:
    depth = rng.choice((5, 33, 500))
    opening, closing = rng.choice((("[", "]"), ("{a:", "}"), ("(", ")"), ("${", "}"), ("choice(", ")")))
    return word.partition("=")[0] + "=" + opening * depth + "1" + closing * depth


def _long_value(word: str, rng: random.Random) -> str:
    return word + rng.choice(("a", ",", " ", "[", "'", "=", "a,", "\\", "${x}")) * rng.choice(
        (10, 1000, 30_000)
    )


WORD_MUTATIONS: tuple[Mutation, ...] = (
    *(delete_character, insert_character, replace_character, swap_characters) * 3,
    *(replace_word, insert_word, delete_word, replace_by_glob) * 2,
    *(truncate, _deep_value, _long_value),
)
"""What one step does to an override."""
