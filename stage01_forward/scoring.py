"""How well a model predicts given tokens: perplexity, and the log probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import UserError

from .attention import Recompute
from .generation import Logprobs
from .model import GPT2

ROWS = 128  # rows of logits at a time: 26 MB for GPT-2 in float32; a whole window takes 206 MB


@torch.inference_mode()
def perplexity(
    model: GPT2,
    ids: Sequence[int],
    stride: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, float]:
    """Judge every token of `ids` but the first, in windows of n_positions tokens, `stride` apart.

    `stride` defaults to half a window. `progress` is called with the number of tokens that each
    window judged.
    Returns "perplexity", "cross_entropy" (nats per token) and "tokens" (judged).
    Raises UserError for fewer than two tokens, or a stride outside 1 to n_positions.
    """
    window = model.config.n_positions
    stride = max(1, window // 2) if stride is None else stride
    if len(ids) < 2:
        raise UserError(
            f"The text has {len(ids)} tokens, but perplexity needs 2 or more: give a longer text."
        )
    if not 1 <= stride <= window:
        raise UserError(
            f"The stride must be from 1 to {window}, the length of a window, not {stride}."
        )
    tokens = torch.tensor(ids, device=model.device)  # (N,)
    total, judged = 0.0, 0
    while judged < len(ids) - 1:
        # The window that follows at `stride` is the first to reach token `judged` + 1, so it judges
        # all tokens from there on.
        start = 0 if judged == 0 else judged + stride - window
        end = min(start + window, len(ids) - 1)
        positions = torch.arange(end - start, device=model.device)  # (T,)
        hidden = model(tokens[start:end], positions, Recompute().attend)  # (T, C)
        parts = hidden[judged - start :].split(ROWS), tokens[judged + 1 : end + 1].split(ROWS)
        for rows, targets in zip(*parts, strict=True):
            logits = model.logits(rows)  # (R, C) -> (R, V)
            # A sum of exponentials needs the precision of float32 or more.
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total += F.cross_entropy(logits, targets, reduction="sum").item()
        if progress is not None:
            progress(end - judged)
        judged = end
    cross_entropy = total / judged
    exp = torch.tensor(cross_entropy, dtype=torch.float64).exp()  # math.exp raises; this gives inf
    return {"perplexity": exp.item(), "cross_entropy": cross_entropy, "tokens": judged}


@torch.inference_mode()
def prompt_logprobs(model: GPT2, ids: Sequence[int], top: int) -> list[Logprobs | None]:
    """The log probability of each prompt token, and of the `top` likeliest tokens in its place.

    None for the first token, which has no context.
    """
    tokens = torch.tensor(ids, device=model.device)  # (T,)
    positions = torch.arange(len(ids), device=model.device)
    hidden = model(tokens, positions, Recompute().attend)  # (T, C)
    scores: list[Logprobs | None] = [None]
    for rows, targets in zip(hidden[:-1].split(ROWS), tokens[1:].split(ROWS), strict=True):
        scores += score_rows(model.logits(rows), targets, top)
    return scores


def score_rows(logits: Tensor, targets: Tensor, top: int) -> list[Logprobs]:
    """The log probabilities of the tokens `targets` (R,), each by its row of `logits` (R, V), and
    of the `top` likeliest tokens of the row."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    values, indices = logprobs.topk(top)  # (R, top) each
    tops = zip(indices.tolist(), values.tolist(), strict=True)
    columns = logprobs.gather(-1, targets[:, None])[:, 0].tolist(), logits.amax(-1).tolist()
    return [
        Logprobs(token, list(zip(*pair, strict=True)), highest)
        for token, pair, highest in zip(columns[0], tops, columns[1], strict=True)
    ]
