"""The columns of a batch's sampling for `draw_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine import noise
from engine.kernels.sampling import draw_tokens
from engine.staging import staging_of
from engine.words import Chunk


def draw(logits: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    """Tokens and the largest logit of each row, there; `logits` are adjusted and constrained already."""
    samplings = [chunk.sampling for chunk in chunks]
    vocabulary = logits.shape[1]
    heat = np.asarray([sampling.temperature for sampling in samplings], dtype=np.float32)
    top_k = np.asarray([min(sampling.top_k, vocabulary) for sampling in samplings], dtype=np.int32)
    top_p = np.asarray([sampling.top_p for sampling in samplings], dtype=np.float32)
    least = np.asarray([sampling.min_p for sampling in samplings], dtype=np.float32)
    with np.errstate(divide="ignore"):
        least = np.log(least)
    draws = [(chunk.sampling.seed, chunk.start + len(chunk.tokens)) for chunk in chunks]
    keys = noise.keys(draws, torch.device("cpu")).numpy()
    columns = staging_of(logits.device).upload(heat, top_k, top_p, least, keys)
    tokens, best, _ = draw_tokens(
        logits,
        *columns,
        random=bool((heat > 0).any()),
        cut=bool((((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0)).any()),
    )
    return tokens, best
