"""vLLM's steps one by one, for `python -m benchmarks engine --peer`: run by the Python that has vLLM.

Reads a line a case, `prefill TOKENS` or `decode BATCH STEPS`, and answers with its CPU time in seconds: of a
whole prompt in chunks of 512 tokens, or of so many steps of a batch at a context of about 512.
"""

import os
import random
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")

CONTEXT = 512


class Steps:
    def __init__(self, folder: str) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self._engine = LLM(
            model=folder,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        ).llm_engine
        self._random = random.Random(1)
        self._added: list[str] = []
        self._batch = 0

    def _add(self, length: int, new: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt  # type: ignore[import-not-found]

        name = str(self._random.random())
        tokens = self._random.choices(range(100, 30000), k=length)
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        self._added.append(name)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), sampling)

    def _drop(self) -> None:
        if self._added:
            self._engine.abort_request(self._added)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._added, self._batch = [], 0

    def prefill(self, length: int) -> float:
        self._drop()
        self._add(length, 1)
        start = time.process_time()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.process_time() - start

    def decode(self, batch: int, steps: int) -> float:
        if self._batch != batch:
            self._drop()
            for _ in range(batch):
                self._add(CONTEXT - batch, 1024)
            self._batch = batch
            while True:
                outputs = self._engine.step()
                if len(outputs) == batch and all(len(one.outputs[0].token_ids) > 1 for one in outputs):
                    break
        start = time.process_time()
        for _ in range(steps):
            if len(self._engine.step()) != batch:
                raise RuntimeError(f"a step of fewer than {batch} sequences")
        return time.process_time() - start


def answer() -> None:
    # vLLM writes to the standard output; answers go where it was at the start.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps = Steps(sys.argv[1])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        print(getattr(steps, kind)(*map(int, numbers)), file=answers, flush=True)


if __name__ == "__main__":
    answer()
