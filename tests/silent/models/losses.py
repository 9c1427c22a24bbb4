"""Losses as people write them: (output, batch) -> (sum, what it weighs)."""

import torch
import torch.nn.functional as F

from parallelizer.losses import cross_entropy


def _tokens(output, batch):
    """The loss of each token, 0 where the label is ignored."""
    return F.cross_entropy(
        output.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="none"
    ).view(batch["labels"].shape)


def mean_of_means(output, batch):
    labels = batch["labels"]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100), 1


def mean_times_tokens(output, batch):
    labels = batch["labels"]
    return F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=-100
    ) * labels.numel(), labels.numel()


def mean_times_valid(output, batch):
    labels = batch["labels"]
    count = (labels != -100).sum()
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100) * count, count


def sum_over_all_tokens(output, batch):
    """Divides by padding too, which is the same number on every rank."""
    return _tokens(output, batch).sum(), batch["labels"].numel()


def mean_of_inputs(output, batch):
    """The next input is the label, and all inputs count: ranks have equally many."""
    labels = batch["input_ids"]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten()), 1


def constant_count(output, batch):
    """The count is that of the whole batch, written down."""
    return _tokens(output, batch).sum(), 128


def rows_means(output, batch):
    """Every row's mean over its own labels, then the mean over rows."""
    tokens, valid = _tokens(output, batch), batch["labels"] != -100
    return (tokens.sum(1) / valid.sum(1).clamp(min=1)).sum(), len(tokens)


def shifted(output, batch):
    """Labels are shifted inside of the loss."""
    labels = batch["labels"][:, 1:]
    tokens = F.cross_entropy(
        output[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return tokens, (labels != -100).sum()


def focal(output, batch):
    tokens = _tokens(output, batch)
    return ((1 - torch.exp(-tokens)) ** 2 * tokens).sum(), (batch["labels"] != -100).sum()


def focal_of_mean(output, batch):
    """The factor is that of the mean loss, not of each token."""
    tokens, count = _tokens(output, batch), (batch["labels"] != -100).sum()
    mean = tokens.sum() / count
    return (1 - torch.exp(-mean)) ** 2 * mean * count, count


def smoothed(output, batch):
    labels = batch["labels"]
    total = F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1, reduction="sum"
    )
    return total, (labels != -100).sum()


def smoothed_by_hand(output, batch):
    labels = batch["labels"]
    log = output.log_softmax(-1)
    valid = labels != -100
    hit = log.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((0.9 * hit + 0.1 * log.mean(-1)) * valid).sum(), valid.sum()


def with_z(output, batch):
    total, count = cross_entropy(output, batch)
    z = output.logsumexp(-1) ** 2
    return total + 1e-2 * (z * (batch["labels"] != -100)).sum(), count


def with_z_mean(output, batch):
    """The auxiliary mean is over all local tokens and is added to a sum over valid ones."""
    total, count = cross_entropy(output, batch)
    return total + (output.logsumexp(-1) ** 2).mean(), count


def confident(output, batch):
    """Rewards predictions that are diverse over the batch: the entropy of their mean."""
    total, count = cross_entropy(output, batch)
    mean = output.softmax(-1).mean((0, 1))
    return total + count * (mean * mean.log()).sum(), count


def hard_half(output, batch):
    """Only the half of the tokens with the largest losses counts, in the whole batch."""
    tokens = _tokens(output, batch).flatten()
    hard = tokens.topk(len(tokens) // 2).values
    return hard.sum(), len(hard)


def hard_half_of_rows(output, batch):
    tokens = _tokens(output, batch)
    hard = tokens.topk(tokens.shape[1] // 2, dim=1).values
    return hard.sum(), hard.numel()


def rare_weighted(output, batch):
    """Classes weigh what their frequency in this batch says."""
    labels = batch["labels"]
    counts = torch.bincount(labels[labels != -100], minlength=output.shape[-1])
    weight = 1.0 / (1.0 + counts.to(output.dtype))
    total = F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), weight, ignore_index=-100, reduction="sum"
    )
    return total, (labels != -100).sum()


def class_weighted(output, batch):
    """Classes have fixed weights, and the weights are what is divided by."""
    labels = batch["labels"]
    weight = torch.linspace(0.5, 2.0, output.shape[-1], dtype=output.dtype)
    total = F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), weight, ignore_index=-100, reduction="sum"
    )
    return total, weight[labels[labels != -100]].sum()


def relative_to_longest(output, batch):
    """Rows weigh by their number of labels, relative to the longest row."""
    tokens = _tokens(output, batch)
    lengths = (batch["labels"] != -100).sum(1).to(tokens.dtype)
    return (tokens.sum(1) * lengths / lengths.max()).sum(), len(tokens)


def standardised(output, batch):
    """A token's weight is its loss, standardised over the batch."""
    tokens = _tokens(output, batch)
    weights = ((tokens - tokens.mean()) / tokens.std()).detach().sigmoid()
    return (weights * tokens).sum(), (batch["labels"] != -100).sum()


def decorrelated(output, batch):
    """Logits of different rows are to differ: a covariance over the batch."""
    total, count = cross_entropy(output, batch)
    features = output.mean(1)
    features = features - features.mean(0)
    covariance = features.T @ features / (len(features) - 1)
    return total + 0.1 * count * (covariance - covariance.diag().diag()).pow(2).mean(), count


def kept(output, batch):
    """Tokens are weighed by a mask in the batch."""
    tokens = _tokens(output, batch)
    return (tokens * batch["kept"]).sum(), batch["kept"].sum()


def kept_mean(output, batch):
    tokens = _tokens(output, batch)
    return (tokens * batch["kept"]).mean() / batch["kept"].to(tokens.dtype).mean(), 1


def distilled(output, batch):
    """batchmean divides by rows, and ranks have equally many."""
    target = (
        F.one_hot(batch["input_ids"].roll(1, -1), output.shape[-1]).to(output.dtype) * 0.9
        + 0.1 / output.shape[-1]
    )
    return F.kl_div(output.log_softmax(-1), target / target.sum(-1, keepdim=True), reduction="batchmean"), 1


def centred(output, batch):
    """Logits lose a part of their mean over the batch, as a teacher's centre does."""
    mean = output.detach().mean((0, 1))
    total, count = cross_entropy(output - 3 * torch.tanh(mean), batch)
    return total, count


def ranked(output, batch):
    """Pairs of rows: the one with more labels is to score higher."""
    score = output.mean((1, 2))
    more = (batch["labels"] != -100).sum(1).to(score.dtype)
    wanted = torch.sign(more[:, None] - more[None])
    pairs = F.softplus(-wanted * (score[:, None] - score[None]))
    return pairs.mean() * len(score), len(score)


def dice(output, batch):
    """One quotient of sums over the batch."""
    labels = batch["labels"]
    hot = F.one_hot(labels.clamp(min=0), output.shape[-1]).to(output.dtype) * (labels != -100).unsqueeze(-1)
    probability = output.softmax(-1)
    return len(labels) * (1 - 2 * (hot * probability).sum() / (hot.sum() + probability.sum())), len(labels)


def dice_of_rows(output, batch):
    labels = batch["labels"]
    hot = F.one_hot(labels.clamp(min=0), output.shape[-1]).to(output.dtype) * (labels != -100).unsqueeze(-1)
    probability = output.softmax(-1)
    rows = 1 - 2 * (hot * probability).sum((1, 2)) / (hot.sum((1, 2)) + probability.sum((1, 2)))
    return rows.sum(), len(rows)


def perplexity(output, batch):
    """The exponential of the mean, not the mean of exponentials."""
    total, count = cross_entropy(output, batch)
    return torch.exp((total / count) / 4) * count, count


def boolean(output, batch):
    """Takes the tokens that count out first: their number depends on the batch."""
    valid = batch["labels"] != -100
    return F.cross_entropy(output[valid], batch["labels"][valid], reduction="sum"), valid.sum()


def clipped(output, batch):
    """Losses of tokens are bounded by a number that is written down."""
    tokens = _tokens(output, batch)
    return torch.minimum(tokens, torch.full_like(tokens, 3.5)).sum(), (batch["labels"] != -100).sum()


def clipped_by_median(output, batch):
    """Losses of tokens are bounded by twice their median."""
    tokens = _tokens(output, batch)
    limit = tokens[batch["labels"] != -100].median().detach()
    return torch.minimum(tokens, 1.1 * limit).sum(), (batch["labels"] != -100).sum()


def smooth_in_time(output, batch):
    """Neighbouring positions are to predict alike."""
    total, count = cross_entropy(output, batch)
    return total + 0.1 * (output[:, 1:] - output[:, :-1]).pow(2).sum(), count


def last_only(output, batch):
    """Only the last position of a row counts."""
    return F.cross_entropy(output[:, -1], batch["input_ids"][:, 0], reduction="sum"), len(output)


def weighted_by_place(output, batch):
    """Later positions weigh more, by their index."""
    tokens = _tokens(output, batch)
    weight = torch.arange(1, tokens.shape[1] + 1, dtype=tokens.dtype) / tokens.shape[1]
    return (tokens * weight).sum(), (batch["labels"] != -100).sum()


def squared_logits(output, batch):
    """A penalty on logits, by tokens."""
    total, count = cross_entropy(output, batch)
    return total + 0.01 * (output.pow(2).mean(-1) * (batch["labels"] != -100)).sum(), count


def largest_logit(output, batch):
    """A penalty on the largest logit of each token."""
    total, count = cross_entropy(output, batch)
    return total + 0.1 * (output.max(-1).values * (batch["labels"] != -100)).sum(), count


def margin(output, batch):
    """The right logit is to be above the best other one."""
    labels = batch["labels"]
    valid = labels != -100
    right = output.gather(-1, labels.clamp(min=0).unsqueeze(-1))
    other = output.scatter(-1, labels.clamp(min=0).unsqueeze(-1), float("-inf")).max(-1, keepdim=True).values
    return (F.softplus(other - right).squeeze(-1) * valid).sum(), valid.sum()
