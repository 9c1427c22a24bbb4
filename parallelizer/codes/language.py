"""What a plan may say, and how it is written. Found without a model."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_DEEP = 33
_MANY = 1001

CODES: tuple[Code, ...] = (
    Code(
        "bad-glob",
        "a glob cannot be parsed",
        """A glob is read strictly: what a shell would take for a literal character, such as a bracket that is
        never closed, is nearly always a slip. Read as a literal it would match nothing, and the modules that
        were meant would stay unsharded.""",
        Example("""
            rules:
              layers.*.attention.w[qkv: colwise
        """),
    ),
    Code(
        "bad-layout-name",
        "a layout has a name that it cannot have",
        """Wherever a placement may stand, the name of a layout may stand too. A layout called `replicate`, or
        one with a blank in its name, could not be told from a placement, and a rule would mean something else
        than it says.""",
        Example("""
            layouts: {replicate: shard(1)}
            rules: {"": fsdp}
        """),
    ),
    Code(
        "duplicate-key",
        "a key stands twice in one map",
        """YAML readers keep the last of two equal keys and drop the first without a word. In a plan that is a
        rule which somebody wrote and which never counts.""",
        Example("""
            rules:
              layers.*: fsdp
              layers.*: checkpoint
        """),
    ),
    Code(
        "empty-file",
        "a plan file holds nothing",
        """A plan without anything in it would leave every module as it is, and every rank would train the
        whole model by itself. The file was most likely cut off, or never saved.""",
        Example("# nothing but a comment\n"),
    ),
    Code(
        "extends-cycle",
        "a plan extends itself",
        """`extends` puts a parent's rules before the file's own. Where the parents lead back to the file
        itself there is no first rule, and so no order that decides which rule wins.""",
        Example("extends: parent.yaml", files={"parent.yaml": "extends: plan.yaml"}),
    ),
    Code(
        "extends-depth",
        "plans extend one another too deep",
        """A rule may be overruled at every level. Beyond a few levels nobody can tell any more what a plan
        says, and a chain this long is mostly the work of a program that made a mistake.""",
        Example(
            "extends: p1.yaml",
            files={f"p{n}.yaml": f"extends: p{n + 1}.yaml" for n in range(1, 10)}
            | {"p10.yaml": 'rules: {"": fsdp}'},
        ),
    ),
    Code(
        "extends-outside",
        "a plan extends a file that lies where no plans are",
        """A plan is often written by somebody else. Could it extend any path, the message about what is wrong in
        `/etc/passwd` would show its lines, and a link in a folder of plans would lead anywhere. So `extends`
        takes a name, or a path below the working directory or beside the plan, links followed.""",
        Example("extends: ../elsewhere/plan.yaml"),
    ),
    Code(
        "file-unreadable",
        "a file is there and cannot be read",
        """The plan, or one that it extends, exists, but this process may not open it, or it is no regular
        file. Going on without it would run another plan than the one that was asked for.""",
        Example(
            command="chmod 000 plan.yaml && python -m parallelizer validate plan=plan.yaml",
            because="it depends on who reads the file, and where it lies",
        ),
    ),
    Code(
        "interpolation",
        "a value would have to be worked out by the configuration",
        """A plan is data. Were `${...}` resolved in it, a plan from somebody else could read the environment
        or any file that a resolver reaches; left as it is, it would be taken for the name of a layout or a
        module. In presets, which are configuration, interpolations are fine as long as they lead to a
        value.""",
        Example("""
            layouts: {stream: "${oc.env:HOME}"}
            rules: {"": fsdp}
        """),
    ),
    Code(
        "missing-option",
        "a style lacks the option that says what it does",
        """Some styles are nothing without their option: `shard-params` must name parameters, `prepare-input`
        an input. Without it the rule would match its modules and change nothing there.""",
        Example("""
            rules:
              output: shard-params
        """),
    ),
    Code(
        "missing-style",
        "a rule names no style",
        """A rule is a glob and a style. Options alone, an empty list, or a number leave open what is to be
        done with the modules, and a default would be a guess.""",
        Example("""
            rules:
              output: {input: shard(1), output: replicate}
        """),
    ),
    Code(
        "no-rules",
        "the plan has no rules",
        """A plan may leave its rules to the one that it extends, but some rule must be there. Without one,
        nothing is sharded, and every rank holds and computes the whole model.""",
        Example("layouts: {stream: shard(1)}"),
    ),
    Code(
        "not-data",
        "a key of Hydra's machinery stands in a plan",
        """`_target_` and its like make Hydra import and call what they name. A plan is data that is often
        written by somebody else: reading one must never run anything. Styles of your own are registered in
        Python, and the configuration's `imports` loads them.""",
        Example("""
            rules:
              layers.*: {style: fsdp, _target_: os.system}
        """),
    ),
    Code(
        "plan-limit",
        "a plan has more rules than a plan may have",
        """A thousand rules are more than anybody can review, and matching them all against a large model
        takes its time. Files this long are made by programs that write a line for each module; a glob says
        the same in one.""",
        Example("rules:\n" + "".join(f"  layers.{n}: fsdp\n" for n in range(_MANY))),
    ),
    Code(
        "plan-version",
        "a plan is of another version of the language",
        """The version says how a file is to be read. One that this release does not know may mean something
        else by the same words, so it is not read at all.""",
        Example("""
            version: 2
            rules: {"": fsdp}
        """),
    ),
    Code(
        "slot-twice",
        "two styles of one rule fill the same slot",
        """A module has one place for each thing that can be done to it: one way to place its parameters, one
        fsdp unit, one checkpoint. The order of a rule's list means nothing, so neither of the two could win,
        and one of them would be dropped.""",
        Example("""
            rules:
              output: [colwise, rowwise]
        """),
    ),
    Code(
        "unknown-axis",
        "there is no mesh axis of this name, or a style cannot stand on it",
        """The axes are pp, dp_replicate, dp_shard, cp, ep and tp. On a misspelt axis a style would find a
        size of 1, do nothing, and leave the module as it was on every rank.""",
        Example("""
            rules:
              output: {style: colwise, axis: data}
        """),
    ),
    Code(
        "unknown-key",
        "there is no key of this name",
        """Where unknown keys are skipped, a misspelt one is a setting that was asked for and never made, and
        the run looks as if all were well. So every key must be known, in plans, presets and overrides
        alike.""",
        Example("""
            ruls: {layers.*: fsdp}
            rules: {"": fsdp}
        """),
    ),
    Code(
        "unknown-layout",
        "a layout is named that the plan does not have",
        """A word where a placement stands is the name of a layout. If the plan has none of that name, it
        cannot be told how the tensor is to lie. A preset that sets a layout nobody uses gets a warning: it
        was meant to switch something, and switches nothing.""",
        Example("""
            layouts: {stream: shard(1)}
            rules:
              norm: {style: sequence, layout: steam}
        """),
    ),
    Code(
        "unknown-option",
        "a style has no option of this name",
        """Every style takes the options that it declares and no others. A misspelt option that is skipped
        leaves the default in force, which may be a correct run at twice the memory, or a wrong one.""",
        Example("""
            rules:
              output: {style: colwise, ouptut: replicate}
        """),
    ),
    Code(
        "unknown-placement",
        "this is no placement, or none that can stand here",
        """A placement is replicate, shard(dim), partial or a layout's name. Anything else has no meaning for
        a tensor; and some places take only some of them: a parameter is never partial, and nothing that is
        whole can be made partial.""",
        Example("""
            rules:
              output: {style: colwise, output: shrad(1)}
        """),
    ),
    Code(
        "unknown-slot",
        "`none` names a slot that modules do not have",
        """`{none: fsdp}` takes away what earlier rules put into a slot. With a slot that does not exist
        nothing would be taken away, and the earlier rule would stay in force.""",
        Example("""
            rules:
              layers.*: fsdp
              layers.0: {none: fdsp}
        """),
    ),
    Code(
        "unknown-style",
        "there is no style of this name",
        """A rule whose style nobody knows would have to be skipped, and its modules would stay whole on every
        rank. Styles of your own must be registered before the plan is read: the configuration's `imports`
        loads the module that does it.""",
        Example("""
            rules:
              layers.*: fdsp
        """),
    ),
    Code(
        "unknown-value",
        "an option has none of the values that it may have",
        """Some options are a choice among a few words, or a dtype. Another word cannot be guessed at, and
        leaving the default in force would hide that the option was never set.""",
        Example("""
            rules:
              layers.*: {style: checkpoint, mode: ful}
        """),
    ),
    Code(
        "unquoted-glob",
        "YAML has taken a glob for syntax of its own",
        """A text that begins with `*`, `&`, `!`, `[` or `{` is an alias, an anchor, a tag, a list or a map to
        YAML. A glob that begins with one of them needs quotes; without them the file is no YAML, or worse, it
        is YAML that says something else.""",
        Example("""
            rules:
              **.attention: checkpoint
        """),
    ),
    Code(
        "wrong-type",
        "a value is of another kind than is wanted here",
        """A list where a map belongs, a word where a number belongs. Converted quietly it would become a
        value that nobody wrote: YAML reads 1e6 as a text, and Python takes a text for true.""",
        Example("""
            rules:
              layers.*: {style: fsdp, min_params: 1e6}
        """),
    ),
    Code(
        "yaml-limit",
        "a file is larger or nested deeper than any plan is",
        """Size, depth and the number of values are counted before anything is built. A few hundred bytes of
        YAML can expand to gigabytes, and a few hundred brackets overflow a parser's stack; a plan needs five
        levels.""",
        Example("rules: " + "[" * _DEEP + "]" * _DEEP),
    ),
    Code(
        "yaml-retyped",
        "YAML reads a text as something else",
        """To YAML 1.1 the key `0` is a number, `on` is true, `0.10` is 0.1 and `12:30` is 750; the value
        `012` is 10. A key read so no longer spells the module that it was meant to name, and a size read so
        is another size. Quotes make it the text that is written there.""",
        Example("""
            rules:
              0: fsdp
        """),
    ),
    Code(
        "yaml-syntax",
        "a file is not YAML",
        """A line is indented otherwise than its neighbours, a bracket or a quote is never closed, a tab
        stands where YAML wants blanks, or a blank is missing behind a colon. YAML has no reading for it, so
        nothing of the file can be used.""",
        Example("""
            rules:
              layers.*: {style: fsdp
        """),
    ),
    Code(
        "yaml-tag",
        "a value has a YAML tag",
        """A tag asks the reader of a file to build some object, `!!python/object` any object at all. A plan
        is data: its reader builds nothing but text, lists and maps.""",
        Example("""
            rules:
              layers.*: !!python/name:os.system fsdp
        """),
    ),
)
