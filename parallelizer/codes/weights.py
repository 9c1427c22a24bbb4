"""Pretrained weights that cannot be loaded or saved."""

from __future__ import annotations

from parallelizer.codes.declare import Code, Example

_TRAIN = "python -m recipes.train model=hf model.name=./folder"
_FOLDER = "it takes a folder of weights"

CODES: tuple[Code, ...] = (
    Code(
        "weights-conversion",
        "a checkpoint's tensors cannot be converted slice by slice",
        """transformers brings the tensors of a checkpoint into a model's form: it renames, stacks, joins, splits
        and transposes them, and a rank reads just the numbers that end up in its own shards. A conversion that
        computes new numbers needs whole tensors on every rank, and one that takes numbers twice or drops some
        could not be undone when the model is saved.""",
        Example(command=_TRAIN, because="it takes a conversion that transformers does not have yet"),
    ),
    Code(
        "weights-dtype",
        "a checkpoint holds another kind of numbers than the model",
        """Floating point numbers of 16, 32 and 64 bits are cast to the dtype of the model's parameters, which is
        exact where it grows. Quantized weights, numbers of 8 bits and whole numbers mean nothing without scales
        that lie beside them: cast like the others they would be loaded in silence, and wrong.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-missing",
        "a checkpoint has no values for a part of the model",
        """Every parameter needs a value, and one that is left random in a model that is otherwise trained would
        only be seen in its loss. Parameters that share their values need them once; buffers that are computed,
        such as rotary frequencies, need none.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-not-found",
        "there are no weights where the configuration says",
        """`model.name` is a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files
        that it names; or a model's id on a hub that can be reached. Weights in pickles are not read: they run
        code, and cannot be read in slices.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-shape",
        "a checkpoint's tensor has another shape than the model's",
        """The model was built with other sizes than the checkpoint was saved with, mostly because the
        configuration changes what the folder's own `config.json` says. No part of a tensor is taken for the
        whole, and nothing is padded.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-unexpected",
        "a checkpoint has tensors that the model has no place for",
        """What a checkpoint holds and the model has no place for is mostly a sign of another architecture or of
        another head: the model would run without what was trained. Tensors that transformers itself ignores for
        this model are let pass, and saved again as they were.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-unreadable",
        "a file of weights is cut off, damaged or cannot be opened",
        """The header of a safetensors file says where each tensor begins and how long the file is, and the index
        which file has which tensor. All of that is compared before any rank waits for another; a download that
        was broken off, or a pointer of Git LFS in the place of a file, ends here.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-untied",
        "one parameter of the model has two different values in a checkpoint",
        """A model with tied embeddings has one parameter under two names. A checkpoint that has both, with
        different values, was trained with `tie_word_embeddings` off, and one of them would be lost: which one
        would depend on the order of names.""",
        Example(command=_TRAIN, because=_FOLDER),
    ),
    Code(
        "weights-unwritable",
        "a model cannot be saved in this folder",
        """A model is written into a folder beside the wanted one, which gets its name when every file is whole
        and on the disk; so a folder of that name is never half a model. A name that is taken, a full disk and a
        missing permission are found out before training as far as they can be, and nothing is left behind.""",
        Example(command=f"{_TRAIN} train.save=./folder", because=_FOLDER),
    ),
)
