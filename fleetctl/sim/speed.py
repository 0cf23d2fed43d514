"""How long a step takes: by a roofline of model and GPU, or fitted to what was measured. Pure.

A step of a batch is told by four sums (`Work`), so that one fit serves prompts, decodes and steps of both.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from engine.words import Batch
from fleetctl.sim.devices import Gpu, Model


class Work(Struct, frozen=True):
    """What a step has to do."""

    prompt: int = 0
    """Tokens of chunks of more than one."""
    pairs: int = 0
    """Of those, tokens that look at each other: a prompt of n tokens has n(n + 1) / 2 pairs."""
    decodes: int = 0
    """Chunks of one token."""
    context: int = 0
    """Tokens whose KV is read for those."""
    before: int = 0
    """Tokens before those chunks, whose KV is read for them."""

    @classmethod
    def of(cls, batch: Batch) -> Work:
        prompt = pairs = decodes = context = before = 0
        for chunk in batch.chunks:
            count, start = len(chunk.tokens), chunk.start
            if count == 1:
                decodes += 1
                context += start + 1
            else:
                prompt += count
                before += start
                pairs += count * start + count * (count + 1) // 2
        return cls(prompt, pairs, decodes, context, before)


class Speed(Protocol):
    def step_s(self, work: Work) -> float: ...

    def as_dict(self) -> dict[str, Any]:
        """What it is made of, for results."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """The longer of computing and of reading weights and KV (Williams et al., "Roofline", 2009)."""

    model: Model
    gpu: Gpu
    gpus: int = 1
    """A worker's, with tensors in parallel."""
    flops_share: float = 0.55
    """Of the processor's published speed that large prompts reach: serving engines measure 0.5 to 0.6."""
    bytes_share: float = 0.75
    """Of the memory's published speed that decode steps reach."""
    parallel_share: float = 0.9
    """Of their speed that two or more GPUs have left beside what they tell each other."""
    overhead_s: float = 0.002
    """Of each step: scheduling, launches, sampling."""

    def step_s(self, work: Work) -> float:
        model, gpus = self.model, self.gpus * (self.parallel_share if self.gpus > 1 else 1.0)
        tokens = work.prompt + work.decodes
        attention = 4.0 * model.layers * model.heads * model.head_dim * (work.pairs + work.context)
        flops = 2.0 * model.parameters * tokens + attention
        read = model.weight_bytes + model.kv_bytes * (work.context + work.before + work.prompt)
        computing = flops / (self.gpu.flops * self.flops_share * gpus)
        reading = read / (self.gpu.bytes_s * self.bytes_share * gpus)
        return max(computing, reading) + self.overhead_s

    def kv_tokens(self, share: float = 0.9) -> int:
        """Tokens whose KV has room beside the weights, in `share` of the memory."""
        left = self.gpu.memory * self.gpus * share - self.model.weight_bytes
        return max(0, int(left / self.model.kv_bytes))

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "roofline", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Measured:
    """A line through measurements. A step of both kinds has the longer base: the weights are read once."""

    prompt_base_s: float = 0.0
    per_prompt_token_s: float = 0.0
    per_pair_s: float = 0.0
    decode_base_s: float = 0.0
    per_decode_s: float = 0.0
    per_context_token_s: float = 0.0

    def step_s(self, work: Work) -> float:
        seconds = 0.0
        if work.prompt:
            seconds = self.prompt_base_s
            if work.decodes:
                seconds = max(seconds, self.decode_base_s)
            seconds += work.prompt * self.per_prompt_token_s + work.pairs * self.per_pair_s
        elif work.decodes:
            seconds = self.decode_base_s
        return seconds + work.decodes * self.per_decode_s + work.context * self.per_context_token_s

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "measured", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    work: Work
    seconds: float


def fit(samples: Sequence[Sample]) -> Measured:
    """Least squares of relative errors, no part of a step below zero. ValueError without steps of both kinds.

    Of steps with prompts, then of those with decodes alone.
    """
    prompts = [sample for sample in samples if sample.work.prompt and not sample.work.decodes]
    decodes = [sample for sample in samples if sample.work.decodes and not sample.work.prompt]
    if not prompts or not decodes:
        raise ValueError("a fit needs measured steps of prompts and of decodes")
    base, token, pair = _least_squares(
        [(1.0, one.work.prompt, one.work.pairs) for one in prompts], [one.seconds for one in prompts]
    )
    decode_base, each, context = _least_squares(
        [(1.0, one.work.decodes, one.work.context) for one in decodes], [one.seconds for one in decodes]
    )
    return Measured(base, token, pair, decode_base, each, context)


def _least_squares(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Weights of the columns, none negative: the worst is left out and the rest fitted again."""
    # Relative: a short step's error weighs as much as a long one's.
    matrix = np.array(rows, dtype=float) / np.array(seconds)[:, None]
    ones = np.ones(len(rows))
    used = list(range(matrix.shape[1]))
    weights = [0.0] * matrix.shape[1]
    while used:
        # Columns differ by many orders of magnitude.
        scale = np.abs(matrix[:, used]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, used] / scale, ones, rcond=None)[0] / scale
        if (found * scale).min() >= -1e-9:
            for column, weight in zip(used, found, strict=True):
                weights[column] = max(0.0, float(weight))
            break
        used.pop(int((found * scale).argmin()))
    return weights


def error(speed: Speed, samples: Sequence[Sample]) -> float:
    """Median of relative errors."""
    return float(np.median([abs(speed.step_s(one.work) / one.seconds - 1) for one in samples]))


def splitwise_samples(lines: Iterable[str], model: str, hardware: str, parallel: int) -> list[Sample]:
    """Of Splitwise's published measurements (Patel et al., ISCA 2024): CSV of prompt_time and token_time, ms,
    by prompt_size, batch_size and token_size. ValueError names what there is instead."""
    rows: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in csv.DictReader(lines):
        rows.setdefault((row["model"], row["hardware"], row["tensor_parallel"]), []).append(row)
    if (model, hardware, str(parallel)) not in rows:
        raise ValueError(
            f"no measurements of {model} on {parallel} {hardware}; there are: "
            + ", ".join(f"{model} on {count} {hardware}" for model, hardware, count in sorted(rows))
        )
    samples = []
    for row in rows[model, hardware, str(parallel)]:
        size, batch, answer = (int(row[name]) for name in ("prompt_size", "batch_size", "token_size"))
        pairs = batch * size * (size + 1) // 2
        samples.append(Sample(Work(batch * size, pairs), float(row["prompt_time"]) / 1000))
        # On average half of the answer is there.
        context = batch * (size + answer // 2)
        samples.append(Sample(Work(decodes=batch, context=context), float(row["token_time"]) / 1000))
    return samples


def benchmark_samples(lines: Iterable[str], **wanted: object) -> list[Sample]:
    """Of the JSON lines of `python -m benchmarks engine`; `wanted` are settings that a row must have. Prompts
    that took several steps are left out: their times are not those of a step."""
    samples = []
    for line in lines:
        row = json.loads(line) if line.strip() else {}
        settings: Mapping[str, Any] = row.get("settings", {})
        if any(settings.get(name) != value for name, value in wanted.items()):
            continue
        if row.get("case") == "engine/prefill" and settings["prompt"] <= settings["chunk"]:
            size = settings["prompt"]
            samples.append(Sample(Work(size, size * (size + 1) // 2), size / row["p50"]))
        elif row.get("case") == "engine/decode":
            batch = settings["batch"]
            samples.append(
                Sample(Work(decodes=batch, context=batch * settings["context"]), batch / row["p50"])
            )
    return samples
