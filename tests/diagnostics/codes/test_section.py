"""A section that has not the form is refused with its file and line."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.codes.section import Example, MalformedSection, read_sections

WELL = """## a-code

*error or warning, mesh*: something is wrong

The first paragraph,
on two lines.

The second.

`plan.yaml`:

```yaml
rules:

  # not a heading
  "": fsdp
```

`conf/model/mine.yaml`:

```yaml
_target_: mine.Mine
```

```console
$ python -m parallelizer validate --config-dir conf plan=plan.yaml 'rules=["a: b"]'
error[a-code]: it is

error[a-code]: twice
```

**Fix:** Do something
else.

## b-code

*note, language*: another

Why.

No file triggers it: it is rare.

```console
$ rm plan.yaml
```

**Fix:** None.
"""


def test_a_section_is_read() -> None:
    one, other = read_sections(WELL, "a.md")
    assert (one.name, one.family, one.severities, one.severity) == (
        "a-code",
        "mesh",
        ("error", "warning"),
        "error",
    )
    assert one.summary == "something is wrong" and one.fix == "Do something else."
    assert one.why == ("The first paragraph, on two lines.", "The second.")
    assert one.example == Example(
        """python -m parallelizer validate --config-dir conf plan=plan.yaml 'rules=["a: b"]'""",
        "error[a-code]: it is\n\nerror[a-code]: twice",
        {
            "plan.yaml": 'rules:\n\n  # not a heading\n  "": fsdp\n',
            "conf/model/mine.yaml": "_target_: mine.Mine\n",
        },
    )
    assert one.example.overrides == ["plan=plan.yaml", 'rules=["a: b"]'] and one.example.config_dir == "conf"
    assert other.example == Example("rm plan.yaml", because="it is rare") and not other.example.runs
    assert (one.line, other.line) == (1, 35) and f"{one.text}\n{other.text}" == WELL


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("## a-code", "# a-code", "1: a section begins with"),
        ("## a-code", "Text.\n\n## a-code", "1: a section begins with"),
        ("## a-code\n", "## a-code\nText.\n", "1: a section begins with"),
        ("## a-code", "## A code", "1: a section begins with"),
        ("*error or", "error or", "3: the next line is"),
        ("warning, mesh*", "warning*", "3: the next line is"),
        ("error or warning", "fatal", "3: there is no severity `fatal`"),
        ("The first paragraph,\non two lines.\n\nThe second.\n\n", "", "5: a paragraph comes next"),
        ("```yaml\nrules", "```\nrules", "12: a fenced block begins with its language"),
        ('"": fsdp\n```\n', '"": fsdp\n', "12: a fenced block begins"),
        ("```yaml\nrules", "```python\nrules", "12: the text of `plan.yaml` comes next, in yaml"),
        ("`plan.yaml`", "`plan.txt`", "10: `plan.txt` ends in none of yaml, py"),
        ("`plan.yaml`:\n\n", "", "10: a block of console comes next"),
        ("$ python", "python", "25: a block of console comes next"),
        ("error[a-code]: it is\n\nerror[a-code]: twice\n", "", "25: below a command stands what it prints"),
        ("$ rm plan.yaml", "$ rm plan.yaml\nerror", "43: below a command stands what it prints"),
        ("No file triggers it: it is rare.\n\n", "", "41: below a command stands what it prints"),
        ("**Fix:** Do", "Do", "32: a paragraph comes next that begins with `**Fix:**`"),
        ("else.\n", "else.\n\nMore.\n", "35: a section ends with its fix"),
        ("```console\n$ python", "No file triggers it: never.\n\n```console\n$ python", "25: what has files needs"),
    ],
)  # fmt: skip
def test_a_malformed_section_is_refused_at_its_line(old: str, new: str, told: str) -> None:
    assert old in WELL
    with pytest.raises(MalformedSection) as refused:
        list(read_sections(WELL.replace(old, new, 1), "a.md"))
    assert str(refused.value).startswith(f"a.md:{told}")


@pytest.mark.parametrize("text", ["", "\n", "Text.\n"])
def test_a_file_without_sections_is_refused(text: str) -> None:
    with pytest.raises(MalformedSection, match=r"^a.md:\d: a section begins with"):
        list(read_sections(text, "a.md"))


def test_lines_that_differ_in_one_number_are_written_out() -> None:
    text = "rules:\n  layers.8: fsdp\n  # ...\n  layers.11: fsdp\n  # ...\n  output: fsdp\n"
    [(_, written)] = Example("", files={"plan.yaml": text}).written_out.items()
    lines = "".join(f"  layers.{n}: fsdp\n" for n in range(8, 12))
    assert written == f"rules:\n{lines}  # ...\n  output: fsdp\n"
