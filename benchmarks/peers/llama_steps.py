"""llama.cpp's steps one by one, for `python -m benchmarks.micro.engine --llama`: run by a Python that has
llama-cpp-python, built for this processor or with libraries that choose their kernels when they are loaded.

Reads a line a case, `prefill TOKENS` or `decode BATCH STEPS`, and answers with its CPU time in seconds: of a
whole prompt in chunks of 512 tokens, or of so many steps of a batch at a context of about 512, greedy tokens
drawn. One thread.
"""

import ctypes
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTEXT = 512
CHUNK = 512


class Steps:
    def __init__(self, file: str) -> None:
        import llama_cpp  # type: ignore[import-not-found]
        from llama_cpp import _ggml

        self._api: Any = llama_cpp.llama_cpp
        load = getattr(_ggml.libggml, "ggml_backend_load_all_from_path", None)
        if load is not None:
            load.argtypes = [ctypes.c_char_p]
            load(str(Path(llama_cpp.__file__).parent / "lib").encode())
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(
            file.encode(), self._api.llama_model_default_params()
        )
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._vocabulary: int = self._api.llama_vocab_n_tokens(vocabulary)
        self._random = random.Random(1)
        self._shape: tuple[int, int] | None = None
        self._context: Any = None
        self._tokens: list[int] = []
        self._place = 0

    def _begin(self, sequences: int, length: int) -> None:
        """A context of so many sequences, each of at most `length` tokens, with nothing in it."""
        if self._shape != (sequences, length):
            if self._context is not None:
                self._api.llama_free(self._context)
            parameters = self._api.llama_context_default_params()
            parameters.n_ctx = sequences * length
            parameters.n_seq_max = sequences
            parameters.n_batch = parameters.n_ubatch = CHUNK
            parameters.n_outputs_max = max(sequences, 1)
            parameters.n_threads = parameters.n_threads_batch = 1
            self._context = self._api.llama_init_from_model(self._model, parameters)
            if not self._context:
                raise RuntimeError("llama.cpp made no context")
            self._shape = (sequences, length)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _step(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Of (token, position, sequence, whether the next token is wanted); the tokens wanted."""
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        failed = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode: {failed}")
        return [self._drawn(index) for index, row in enumerate(rows) if row[3]]

    def _drawn(self, row: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _prompt(self, tokens: Sequence[int], sequence: int) -> int:
        last: list[int] = []
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            last = self._step(
                [(token, start + i, sequence, start + i + 1 == len(tokens)) for i, token in enumerate(part)]
            )
        return last[0]

    def _random_tokens(self, count: int) -> list[int]:
        return self._random.choices(range(100, 30000), k=count)

    def prefill(self, length: int) -> float:
        self._begin(1, 4096)
        tokens = self._random_tokens(length)
        start = time.process_time()
        self._prompt(tokens, 0)
        return time.process_time() - start

    def decode(self, batch: int, steps: int) -> float:
        if self._shape != (batch, 2 * CONTEXT) or self._place + steps > CONTEXT + 64:
            self._begin(batch, 2 * CONTEXT)
            self._place = CONTEXT - steps
            self._tokens = [self._prompt(self._random_tokens(self._place), one) for one in range(batch)]
        start = time.process_time()
        for _ in range(steps):
            self._tokens = self._step(
                [(token, self._place, one, True) for one, token in enumerate(self._tokens)]
            )
            self._place += 1
        return time.process_time() - start


def answer() -> None:
    # Libraries may write to the standard output; answers go where it was at the start.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps = Steps(sys.argv[1])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        print(getattr(steps, kind)(*map(int, numbers)), file=answers, flush=True)


if __name__ == "__main__":
    answer()
