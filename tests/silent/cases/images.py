"""Plans of models of images: a ViT, two towers, a U-Net."""

from tests.silent.case import CLASSES, EVERYWHERE, TOKENS, Model, cases, changed, without

IMAGES = {"images": {"shape": ["batch", 3, 8, 8], "dtype": "float32"}}
CLEAN = {"clean": {"shape": ["batch", 3, 8, 8], "dtype": "float32"}}
CLASSIFIED = "parallelizer.losses.classification"
VIT = Model("vit", "tests.silent.models.vit.Vit", IMAGES | CLASSES, CLASSIFIED)
MEAN_VIT = Model("vit mean", "tests.silent.models.vit.MeanVit", IMAGES | CLASSES, CLASSIFIED)
FIRST_VIT = Model("vit first", "tests.silent.models.vit.FirstVit", IMAGES | CLASSES, CLASSIFIED)
CLIP_ENTRIES = {"images": {"shape": ["batch", 10], "dtype": "float32"}} | TOKENS
CLIP = Model(
    "clip", "tests.silent.models.clip.Clip", CLIP_ENTRIES, "tests.silent.models.clip.local_negatives"
)
UNETS = {
    norm: Model(
        f"unet {norm}",
        "tests.silent.models.unet.Unet",
        IMAGES | CLEAN,
        "tests.silent.models.unet.denoised",
        {"norm": norm},
    )
    for norm in ("group", "batch", "instance", "frozen")
}

TP = """\
rules:
  blocks.*.q: colwise
  blocks.*.k: colwise
  blocks.*.v: colwise
  blocks.*: {style: shard-params, divide: [heads]}
  blocks.*.proj: rowwise
  blocks.*.mlp.0: colwise
  blocks.*.mlp.2: rowwise
  "": fsdp
"""
MEAN_TP = """\
rules:
  blocks.0: {style: prepare-input, input: {x: replicate -> shard(1)}, local: true}
  blocks.*.ln1: {style: sequence, local: true}
  blocks.*.ln2: {style: sequence, local: true}
  blocks.*.q: {style: colwise, input: shard(1)}
  blocks.*.k: {style: colwise, input: shard(1)}
  blocks.*.v: {style: colwise, input: shard(1)}
  blocks.*: {style: shard-params, divide: [heads]}
  blocks.*.proj: {style: rowwise, output: shard(1)}
  blocks.*.mlp.0: {style: colwise, input: shard(1)}
  blocks.*.mlp.2: {style: rowwise, output: shard(1)}
  norm: [{style: sequence}, {style: prepare-output, output: shard(1) -> replicate}]
  "": fsdp
"""
UNGATHERED = changed(
    MEAN_TP,
    (
        "  norm: [{style: sequence}, {style: prepare-output, output: shard(1) -> replicate}]\n",
        "  norm: {style: sequence, local: true}\n",
    ),
)
TOWERS = """\
rules:
  "{image,text}.fc1": colwise
  "{image,text}.fc2": rowwise
  "": fsdp
"""
CONVS = """\
rules:
  enter.conv1: {style: shard-params, params: {weight: shard(0), bias: shard(0)}, input: replicate, output: shard(1) -> replicate}
  "": fsdp
"""


def clip(name, plan=EVERYWHERE, why="", slug="", **expected):
    return cases(CLIP, f"{name}{slug}", plan, f"tests.silent.models.clip.{name}", why, **expected)


def unet(norm, loss, plan=EVERYWHERE, why="", slug="", **expected):
    return cases(UNETS[norm], f"{loss}{slug}", plan, f"tests.silent.models.unet.{loss}", why, **expected)


CASES = [
    *cases(VIT, "data", "  blocks.*: fsdp\n" + EVERYWHERE, fsdp2="right", hsdp2x2="right"),
    *cases(VIT, "heads", TP, tp2="right", fsdp2_tp2="right"),
    *cases(VIT, "key forgotten", without(TP, "blocks.*.k"), tp2="fails"),
    *cases(
        VIT,
        "heads not divided",
        without(TP, "blocks.*"),
        why="unflatten makes as many heads of half the width",
        tp2="wrong",
    ),
    *cases(
        VIT,
        "proj replicated and summed",
        changed(TP, ("blocks.*.proj: rowwise", "blocks.*.proj: replicate")),
        tp2="fails",
    ),
    *cases(VIT, "unused cp", EVERYWHERE, why="every rank of cp computes the same", cp2="right"),
    *cases(MEAN_VIT, "split tokens", MEAN_TP, why="16 tokens, gathered before the mean", tp2="right"),
    *cases(VIT, "split tokens, 17 of them", MEAN_TP, tp2="fails"),
    *cases(FIRST_VIT, "first of all tokens", MEAN_TP, why="gathered before one is taken", tp2="right"),
    *cases(
        FIRST_VIT,
        "first of a rank's tokens",
        UNGATHERED,
        why="each rank classifies its own first",
        tp2="wrong",
    ),
    *cases(MEAN_VIT, "mean of a rank's tokens", UNGATHERED, tp2="wrong"),
    *clip("local_negatives", why="negatives of one rank", fsdp2="wrong", hsdp2x2="wrong"),
    *clip("all_negatives", why="negatives of all ranks, with gradients", fsdp2="right", hsdp2x2="right"),
    *clip("gathered_without_gradient", why="gradients of other ranks' rows are lost", fsdp2="wrong"),
    *clip("gathered_by_torch", why="negatives of all ranks, with torch's gather", fsdp2="right"),
    *clip("sigmoid_local", why="pairs of one rank", fsdp2="wrong"),
    *clip("matching", why="pairs alone", fsdp2="right", hsdp2x2="right"),
    *clip(
        "local_negatives", TOWERS, "every rank of tp has all rows", slug=" tp", tp2="right", fsdp2_tp2="wrong"
    ),
    *clip("matching", TOWERS, slug=" tp", fsdp2_tp2="right"),
    *unet("group", "denoised", fsdp2="right", hsdp2x2="right"),
    *unet("instance", "denoised_mean", why="means of equally many pixels", fsdp2="right"),
    *unet("batch", "denoised", why="batch norms", fsdp2="wrong", hsdp2x2="wrong"),
    *unet("frozen", "denoised", why="statistics that stay as they are", fsdp2="right"),
    *unet("group", "psnr", why="the logarithm of a local mean", fsdp2="wrong"),
    *unet("group", "psnr_of_rows", fsdp2="right"),
    *unet("batch", "denoised", why="every rank of tp has all images", slug=" tp", tp2="right"),
    *unet("group", "denoised", CONVS, why="channels of a convolution", slug=" channels", tp2="fails"),
]
