"""Constraints on what is generated: masks as a share of a decode step at batch 8, and compile times."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.report import emit
from engine.bounds import GrammarSettings, prepare
from engine.build import build_runner, choose_device, choose_dtype, plan_pool
from engine.grammar import Grammars, Matcher, Vocabulary
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Batch, Chunk
from fleet.model_files import resolve
from fleet.request import Constraint, ConstraintKind, Sampling

BATCH = 8
CONTEXT = 512

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}},
        "home": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "tags"],
}
CASES = {
    "json_object": Constraint(ConstraintKind.JSON_OBJECT),
    "schema": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Constraint(ConstraintKind.REGEX, r"[a-z ]{20,200}\. [A-Z][a-z]+ [0-9]{1,9}"),
    "grammar": Constraint(
        ConstraintKind.GRAMMAR, 'root ::= sum\nsum ::= item ([+*-] item)*\nitem ::= [0-9]+ | "(" sum ")"'
    ),
}


def wide(properties: int) -> Constraint:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(properties)}}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


COMPILED = {
    **CASES,
    "strings of up to 100 characters": Constraint(
        ConstraintKind.JSON_SCHEMA, '{"type":"array","items":{"type":"string","maxLength":100}}'
    ),
    "200 optional properties": wide(200),
    "regex of two long dots": Constraint(ConstraintKind.REGEX, ".{0,1000}.{0,1000}b"),
    "choices, 1,000": Constraint(
        ConstraintKind.GRAMMAR, "root ::= " + " | ".join(f'"answer {n}"' for n in range(1000))
    ),
}


def compiled(grammars: Grammars, constraint: Constraint) -> Any:
    """At once and in this thread: what the thread of a compilation does."""
    return grammars._compile(prepare(constraint, GrammarSettings()))


class Writer:
    """Random text under a constraint; begins again when it is whole."""

    def __init__(self, grammars: Grammars, form: Any, seed: int) -> None:
        self._grammars, self._form, self._chance = grammars, form, random.Random(seed)
        self.matcher = Matcher(form, grammars.vocabulary)

    def took(self, token: int | None) -> None:
        if token is None or not self.matcher.accept(token):
            raise AssertionError("a token outside the constraint was drawn")
        if self.matcher.finished or self._chance.random() < 0.01:
            self.matcher = Matcher(self._form, self._grammars.vocabulary)


def shares(
    runner: TorchRunner, writers: Sequence[Writer], steps: int
) -> tuple[list[float], list[float], list[float]]:
    """Of paired steps of the same batch, without and with constraints: ms each, and µs to fill a row."""
    each = runner.layout.blocks_for(CONTEXT + 1)
    tables = [tuple(range(row * each, (row + 1) * each)) for row in range(BATCH)]
    plain, held, fills = [], [], []
    warm = [Sampling(max_tokens=1, temperature=0.8, seed=row) for row in range(BATCH)]
    mask = np.zeros((1, -(-runner.vocabulary // 32)), dtype=np.int32)
    for step in range(steps + 2):
        for constrained in (False, True):
            chunks = tuple(
                Chunk(
                    row,
                    (100 + row,),
                    CONTEXT - 1,
                    tables[row],
                    True,
                    warm[row],
                    matcher=writers[row].matcher if constrained else None,
                )
                for row in range(BATCH)
            )
            start = time.perf_counter()
            result = runner.step(Batch(chunks))
            (held if constrained else plain).append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        for writer in writers:
            writer.matcher.fill(mask, 0)
        fills.append((time.perf_counter() - start) * 1e6 / BATCH)
        for writer, token in zip(writers, result.tokens, strict=True):
            writer.took(token)
        warm = [Sampling(max_tokens=1, temperature=0.8, seed=step * BATCH + row) for row in range(BATCH)]
    return plain[2:], held[2:], fills[2:]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    files = resolve(options.model)
    device = choose_device(options.device)
    dtype = choose_dtype("auto", device)
    settings = EngineSettings(device=str(device), dtype=dtype)
    layout, _ = plan_pool(files.folder, settings)
    room = (BATCH * layout.blocks_for(CONTEXT + 1) + 1) * layout.block_bytes
    settings = EngineSettings(device=str(device), dtype=dtype, kv_memory_bytes=room)
    runner = build_runner(files.folder, settings)
    assert isinstance(runner, TorchRunner)
    torch.set_num_threads(options.threads)
    grammars = Grammars(Vocabulary.load(files.folder, runner.vocabulary), GrammarSettings())
    told = {"model": files.name, "dtype": dtype, "device": str(device), "threads": options.threads}
    for name, constraint in CASES.items():
        form = compiled(grammars, constraint)
        writers = [Writer(grammars, form, row) for row in range(BATCH)]
        plain, held, fills = shares(runner, writers, 5 if options.quick else 60)
        # The median of differences: what else a machine does falls on one step of a pair or the other.
        extra = statistics.median(b - a for a, b in zip(plain, held, strict=True))
        emit("grammar/share", "%", [100 * extra / statistics.median(plain)], batch=BATCH, form=name, **told)
        emit("grammar/fill", "us", fills, form=name, **told)
    for name, constraint in COMPILED.items():
        times = []
        for _ in range(1 if options.quick else 3):
            start = time.perf_counter()
            size = compiled(grammars, constraint).memory_size_bytes
            times.append((time.perf_counter() - start) * 1e3)
        emit("grammar/compile", "ms", times, form=name, bytes=size, **told)
    return 0
