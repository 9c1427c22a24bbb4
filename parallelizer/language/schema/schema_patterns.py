"""The plan language's texts as regular expressions that JSON Schema can hold: ECMA-262's, and Python's too.

The parser does not use them. They accept everything that it accepts; `tests/language/schema/test_schema.py` holds them to
it. Globs are only checked for what a pattern can see: braces nested deeper than `_DEPTH` are not.
"""

from __future__ import annotations

_DEPTH = 3
_UNPRINTABLE = (
    r"\u0000-\u001f\u007f-\u00a0\u00ad\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffb"
)
"""What Python calls not printable, less the rare: controls, blanks other than U+0020, invisible marks."""

_DATA = r"(?!_.+_$)(?!.*\$\{)"
"""Before a key or a text: no interpolation, and no key of Hydra's or OmegaConf's."""

TEXT = rf"^{_DATA}[^{_UNPRINTABLE}]*$"
"""Any text that may stand in a plan."""

_LAYOUT = r"[A-Za-z_][A-Za-z0-9_-]*"
_SHARD = r"shard\(\s*-?[0-9]{1,2}\s*\)"
_NAMED = rf"(?:{_SHARD}|(?!shard\s*(?:$|->)){_LAYOUT})"

LAYOUT_NAME = rf"^(?!_.+_$){_LAYOUT}$"
PLAIN_PLACEMENT = rf"^ *(?:replicate|partial|{_SHARD}) *$"
PLACEMENT = rf"^ *{_NAMED} *$"
FLOW = rf"^ *{_NAMED} *(?:-> *{_NAMED} *)?$"

# A word of Python's: letters of other alphabets are let through.
IDENTIFIER = r"^[A-Za-z_\u00aa-\uffff][A-Za-z0-9_\u00aa-\uffff]*$"

DOTTED = rf"^{IDENTIFIER[1:-1]}(?:\.{IDENTIFIER[1:-1]})*$"

NUMBER = rf"^(?:{DOTTED[1:-1]}|{IDENTIFIER[1:-1]}\.shape\[-?[0-9]\])$"
"""What a forward reads: an attribute, or a size of an argument."""

WHOLE = r"^(?:0|[1-9][0-9]{0,2}(?:_[0-9]{3}){1,5}|[1-9][0-9]{0,17})$"
SIGNED = WHOLE.replace("^", "^-?", 1)
WHOLE_FROM_1 = WHOLE.replace("0|", "", 1)

_SET = r"\[(?!\^)!?\]?[^\].]*\]"
_CHARACTER = rf"[^\[\]{{}}\\.,\s{_UNPRINTABLE}]"
_RANGE = r"\{-?[0-9]+\.\.-?[0-9]+(?:\.\.-?[0-9]+)?\}"


def _braces(depth: int) -> str:
    """Numbers, or at least two alternatives."""
    inner = rf"|{_braces(depth - 1)}" if depth else ""
    part = rf"(?:{_SET}|{_CHARACTER}|\.{inner})*"
    return rf"{_RANGE}|\{{{part}(?:,{part})+\}}"


_STARS = r"(?![^\[]*[\w?-]\*\*)(?![^\[]*\*\*[\w?-])"
"""`**` has a segment to itself."""

GLOB = rf"^{_DATA}{_STARS}(?!\.)(?:{_SET}|{_CHARACTER}|,|\.(?!\.|$)|{_braces(_DEPTH)})*$"
"""A glob; the root's is empty. Outside braces no segment is empty."""
