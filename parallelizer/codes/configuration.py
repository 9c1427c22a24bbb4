"""Presets, overrides, and what they name."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

CODES: tuple[Code, ...] = (
    Code(
        "check-not-found",
        "a check that the configuration names is no function",
        """`checks` names functions that look at a composed configuration before anything runs; the recipe's own
        looks at the numbers of a run. If one cannot be found, what it would have refused would pass without a
        word.""",
        Example(overrides=["checks=[recipes.settings.chek]"]),
    ),
    Code(
        "config-invalid",
        "Hydra cannot compose the configuration",
        """What else can be wrong in a defaults list or an override, in Hydra's own words, with the file or
        the override that it has to do with. Nothing was read, so nothing else can be judged.""",
        Example(overrides=["model=${nope}"]),
    ),
    Code(
        "config-not-found",
        "there is no such configuration, or no such folder",
        """`--config-name` names the root configuration, `--config-dir` a folder of your own. Without them
        there is nothing to compose, and falling back to the shipped configuration would run something else
        than was asked for.""",
        Example(
            command="python -m parallelizer validate --config-name trian",
            because="the options of a command stand in no file",
        ),
    ),
    Code(
        "data-mismatch",
        "the data is not what the model takes",
        """The model config's `batch` names the entries that a step is given, and their shapes. What `data` gives has no
        such entry, or one of another shape. A run would fail at its first step.""",
        Example(
            command="python -m recipes.train model=vit_tiny data=stdlib",
            because="data is the recipe's, and not looked at by `validate`",
        ),
    ),
    Code(
        "data-not-found",
        "there is no text to train on",
        """`data.path` names nothing that is there. It is looked for before any rank starts, because the same
        error later would come from every rank at once, after minutes of start-up.""",
        Example(
            command="python -m recipes.train data=text data.path=nowhere.txt",
            because="data is the recipe's, and not looked at by `validate`",
        ),
    ),
    Code(
        "data-too-short",
        "the text is shorter than one sequence",
        """A window of tokens and its successors must fit into both the training text and the held-out one.
        With too little of either, a run would have no batch, or no held-out loss.""",
        Example(
            command="python -m recipes.train data.path=LICENSE train.seq_len=20000 model.max_seq_len=20000",
            because="data is the recipe's, and not looked at by `validate`",
        ),
    ),
    Code(
        "data-unreadable",
        "a text cannot be read",
        """A file of `data.path` may not be opened, or `data._target_` gives something that is no data.
        Passing over it would train on another text than was asked for, without a word.""",
        Example(
            command="python -m recipes.train data._target_=os.getcwd",
            because="data is the recipe's, and not looked at by `validate`",
        ),
    ),
    Code(
        "import-failed",
        "a module that registers styles cannot be imported",
        """`imports` loads Python modules in which styles of your own are registered. If one cannot be
        imported, the plan would be judged without its styles, and every rule that uses them would be called
        wrong.""",
        Example(overrides=["imports=[my_styles]"]),
    ),
    Code(
        "model-build",
        "the model cannot be built as it is configured",
        """The model's config names a class and its arguments, its batch and its loss. Without the model
        nothing can be matched; the reason is what the class itself says, without Hydra's frames around
        it.""",
        Example(overrides=["++model.n_layer=2"]),
    ),
    Code(
        "optim-invalid",
        "the optimizer refuses its settings",
        """The optimizer is built once in the parent, on a parameter that is thrown away. So a beta
        above one is found here, and not by every rank after the model has been built.""",
        Example(
            command="python -m recipes.train 'optim.betas=[2,2]'",
            because="the optimizer is the recipe's, and not built by `validate`",
        ),
    ),
    Code(
        "override-sweep",
        "an override gives several values",
        """To Hydra a comma outside of quotes means one run for each value. A single command has one
        configuration; the recipe runs a sweep with `-m`.""",
        Example(overrides=["parallel=tp2,tp4"]),
    ),
    Code(
        "override-syntax",
        "an override is not in Hydra's grammar",
        """Brackets, braces, commas and parentheses mean something to Hydra, and some of them to the shell as
        well. An override that does not parse ends the command with status 2; the help shows it as it must be
        typed.""",
        Example(overrides=["++parallel.layouts.stream=shard(1)"]),
    ),
    Code(
        "plan-not-found",
        "there is no plan of this name or at this path",
        """A name is looked up as `plans/<name>.yaml` along the search path, and what has a slash or ends in
        `.yaml` is a path. No plan is ever guessed: another one would parallelize the model in another
        way.""",
        Example(overrides=["plan=lama"]),
    ),
    Code(
        "tokenizer-unreadable",
        "a tokenizer cannot be used",
        """`data.tokenizer` names a `tokenizer.json`, a folder of a tokenizer, or a hub id. What is there cannot be
        read, or has no token that ends a document. Falling back to bytes would train on other tokens than was
        asked for, without a word.""",
        Example(
            command="python -m recipes.train data.tokenizer=./nowhere",
            because="data is the recipe's, and not looked at by `validate`",
        ),
    ),
    Code(
        "unknown-preset",
        "a group of the configuration has no file of this name",
        """`model=`, `parallel=`, `data=`, `optim=` and `hardware=` each choose one file. A name that is not
        there leaves nothing to choose.""",
        Example(overrides=["optim=adam"]),
    ),
)
