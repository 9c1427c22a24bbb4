"""Plans of an MLP language model, and losses of people's own."""

from tests.silent.case import EVERYWHERE, LABELS, TOKENS, Model, cases, changed, without
from tests.silent.cases.gpt import CP, GPT

LM = Model("lm", "tests.silent.models.lm.Lm")
KEPT = Model(
    "lm with mask", "tests.silent.models.lm.Lm", TOKENS | LABELS | {"kept": {"shape": ["batch", "sequence"]}}
)

DATA = "  blocks.*: fsdp\n" + EVERYWHERE
SPLIT = """\
layouts: {stream: shard(1)}
rules:
  words: {style: rowwise, input: replicate, output: stream}
  blocks.*.norm: {style: sequence, layout: stream}
  blocks.*.up: {style: colwise, input: stream}
  blocks.*.down: {style: rowwise, output: stream}
  norm: {style: sequence, layout: stream}
  head: {style: colwise, input: stream, output: shard(-1), local: false}
  blocks.*: fsdp
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}}}
"""
WHOLE = changed(without(SPLIT, "norm", "blocks.*.norm"), ("stream: shard(1)", "stream: replicate"))
HEAD_WHOLE = changed(SPLIT, ("output: shard(-1), local: false", "output: replicate"))
HEAD_LOCAL = changed(SPLIT, ("output: shard(-1), local: false", "output: shard(-1)"))


def loss(name: str, text: str, plan: str = DATA, model: Model = LM, slug: str = "", **expected):
    """Cases of a loss; `text` says what is special."""
    return cases(model, f"{name}{slug}", plan, f"tests.silent.models.losses.{name}", text, **expected)


CASES = [
    *cases(LM, "usual", DATA, fsdp2="right", hsdp2x2="right"),
    *cases(LM, "one unit", EVERYWHERE, fsdp2="right"),
    *cases(LM, "split stream", SPLIT, tp2="right", fsdp2_tp2="right", cp2_tp2="right", cp2="right"),
    *cases(LM, "whole stream", WHOLE, tp2="right", fsdp2_tp2="right"),
    *cases(LM, "whole logits", HEAD_WHOLE, tp2="right"),
    *cases(LM, "norm forgotten", without(SPLIT, "blocks.*.norm"), tp2="wrong", fsdp2_tp2="wrong"),
    *cases(LM, "last norm forgotten", without(SPLIT, "norm"), tp2="wrong", cp2_tp2="wrong"),
    *cases(LM, "local logits", HEAD_LOCAL, why="the loss takes half the vocabulary for all", tp2="fails"),
    *cases(
        LM,
        "labels not dealt",
        changed(SPLIT, ("input_ids: 1, labels: {dim: 1, pad: -100}", "input_ids: 1")),
        cp2="fails",
    ),
    # Losses over data axes.
    *loss("mean_of_means", "unequal numbers of labels", fsdp2="wrong", hsdp2x2="wrong"),
    *loss("mean_times_tokens", "the mean is over other tokens than its weight", fsdp2="wrong"),
    *loss("mean_times_valid", "a mean times its own count is a sum", fsdp2="right", hsdp2x2="right"),
    *loss("sum_over_all_tokens", "counts what is ignored, equally on every rank", fsdp2="right"),
    *loss("mean_of_inputs", "means of equally many tokens", fsdp2="right", hsdp2x2="right"),
    *loss("constant_count", "the count is summed over ranks", fsdp2="wrong", hsdp2x2="wrong"),
    *loss("rows_means", "rows are whole", fsdp2="right"),
    *loss("shifted", "rows are whole", fsdp2="right", hsdp2x2="right"),
    *loss("focal", "a factor of each token", fsdp2="right"),
    *loss("focal_of_mean", "a factor of the local mean", fsdp2="wrong", hsdp2x2="wrong"),
    *loss("smoothed", "of each token", fsdp2="right"),
    *loss("with_z", "of each token", fsdp2="right"),
    *loss("with_z_mean", "a mean in a sum, once a rank", fsdp2="wrong"),
    *loss("confident", "the entropy of a local mean", fsdp2="wrong", hsdp2x2="wrong"),
    *loss("hard_half", "the hardest tokens of local rows", fsdp2="wrong"),
    *loss("hard_half_of_rows", "the hardest tokens of each row", fsdp2="right"),
    *loss("rare_weighted", "frequencies of local labels", fsdp2="wrong"),
    *loss("class_weighted", "fixed weights, summed like tokens", fsdp2="right", hsdp2x2="right"),
    *loss("relative_to_longest", "the longest local row", fsdp2="wrong"),
    *loss("standardised", "local mean and deviation, of detached weights", fsdp2="wrong"),
    *loss("decorrelated", "a covariance over local rows", fsdp2="wrong"),
    *loss("kept", "weights are summed like tokens", model=KEPT, fsdp2="right"),
    *loss("kept_mean", "a quotient of local means", model=KEPT, fsdp2="wrong"),
    *loss("distilled", "means over equally many rows", fsdp2="right"),
    *loss("centred", "the mean of local logits", fsdp2="wrong"),
    *loss("ranked", "pairs of local rows", fsdp2="wrong", hsdp2x2="wrong"),
    *loss("dice", "a quotient of local sums", fsdp2="wrong"),
    *loss("dice_of_rows", "a quotient for each row", fsdp2="right"),
    *loss("perplexity", "the exponential of a local mean", fsdp2="wrong"),
    *loss("boolean", "a number of tokens that depends on the batch", fsdp2="right"),
    *loss("clipped", "a bound that is written down", fsdp2="right"),
    *loss("clipped_by_median", "the median of local tokens", fsdp2="wrong"),
    # The vocabulary or the sequence is split.
    *loss("smoothed_by_hand", "whole logits", HEAD_WHOLE, tp2="right"),
    *loss("with_z", "whole logits", HEAD_WHOLE, tp2="right"),
    *loss("with_z", "a logsumexp over a rank's vocabulary", HEAD_LOCAL, slug=" local", tp2="fails"),
    *loss("squared_logits", "a DTensor and a plain mask", SPLIT, tp2="fails"),
    *loss("margin", "whole logits", HEAD_WHOLE, tp2="right"),
    *loss("confident", "whole logits, on every rank alike", HEAD_WHOLE, tp2="right", fsdp2_tp2="wrong"),
    *loss("mean_of_means", "every rank of tp has all tokens", HEAD_WHOLE, tp2="right"),
    *loss("shifted", "every rank of tp has all tokens", HEAD_WHOLE, slug=" tp", tp2="right"),
    *loss("constant_count", "every rank of tp counts it once", HEAD_WHOLE, tp2="right"),
    # The sequence is split, on a model with attention.
    *loss("focal", "of each token", CP, GPT, cp2="right"),
    *loss("shifted", "the label behind a cut is lost", CP, GPT, cp2="wrong"),
    *loss("rows_means", "a row's mean over local tokens", CP, GPT, cp2="wrong"),
    *loss("smooth_in_time", "neighbours on other ranks", CP, GPT, cp2="wrong"),
    *loss("last_only", "the last of local positions", CP, GPT, cp2="wrong"),
    *loss("weighted_by_place", "indices of local positions", CP, GPT, cp2="wrong"),
    *loss("constant_count", "counted once a rank", CP, GPT, cp2="wrong"),
    *loss("sum_over_all_tokens", "ranks have equally many tokens", CP, GPT, cp2="right"),
    *loss("boolean", "a number of tokens that depends on the rank", CP, GPT, cp2="right"),
    *loss("mean_times_tokens", "the mean is over other tokens than its weight", CP, GPT, cp2="wrong"),
]
