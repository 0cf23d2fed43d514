"""Every limit is a documented setting, and what it refuses is told its name.

`python tests/openai/test_limits.py` writes the table of docs/limits.md anew.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.bounds import GrammarSettings
from engine.settings import EngineSettings
from fleet.settings import _docs
from fleet.wire.session import WireSettings
from router.openai.settings import HttpSettings
from router.settings import AdmissionSettings, FlowSettings
from router.text.tokenizer import TextSettings

PAGE = Path(__file__).parents[2] / "docs/limits.md"
BEGIN, END = "<!-- limits: begin -->\n", "<!-- limits: end -->\n"

STATUS = {
    "http.max_requests": 429, "http.max_followers": 429, "http.max_body_bytes": 413,
    "http.max_header_bytes": 431, "http.max_headers": 431,
    "http.header_timeout_s": 408, "http.body_timeout_s": 408, "http.idle_timeout_s": "closed",
    "http.write_timeout_s": "closed", "http.deadline_s": 504, "http.drain_limit_s": "error event",
    "flow.max_requests": 429, "flow.max_held": 429, "flow.max_failovers": 503,
    "flow.worker_wait_s": 503, "flow.scale_wait_s": 503,
    "admission.max_queued": 429, "admission.max_wait_s": 429,
    "flow.resume_wait_s": 503, "flow.first_token_timeout_s": 503, "flow.token_timeout_s": 503,
    "engine.max_waiting": 429, "engine.grammar.compile_s": 400, "engine.grammar.threads": 429,
    "wire.message_bytes": 413,
}  # fmt: skip
"""What is answered beyond the limit; 400 where nothing stands here."""


def limits() -> Iterator[tuple[str, Any, str]]:
    """(setting, default, meaning) of all that a request can be refused or ended by."""
    for section, kind in (("http", HttpSettings), ("text", TextSettings), ("flow", FlowSettings),
                          ("admission", AdmissionSettings),
                          ("engine", EngineSettings), ("engine.grammar", GrammarSettings),
                          ("wire", WireSettings)):  # fmt: skip
        docs = _docs(kind)
        for item in fields(kind):
            name = f"{section}.{item.name}"
            shown = section in ("http", "engine.grammar") and item.name.startswith("max_")
            if (
                shown
                or name in STATUS
                or name
                in (
                    "text.template_seconds",
                    "http.template_kwargs",
                    "http.client_templates",
                )
            ):
                yield name, item.default, docs.get(item.name, "")


def table() -> str:
    rows = ["| setting | default | beyond it | meaning |", "|---|---|---|---|"]
    for name, default, meaning in limits():
        shown = ", ".join(default) if isinstance(default, tuple) else default
        rows.append(f"| `{name}` | {shown} | {STATUS.get(name, 400)} | {meaning} |")
    return "\n".join(rows) + "\n"


def test_the_page_is_that_of_the_settings() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table(), f"run: python {__file__}"
    assert set(STATUS) <= {name for name, _, _ in limits()}
    assert all(meaning for _, _, meaning in limits())


SMALL: dict[str, Any] = {
    "max_messages": 2, "max_sequences": 3, "max_answer_tokens": 50, "max_prompt_tokens": 20, "max_stops": 2,
    "max_stop_characters": 5, "max_stop_token_ids": 2, "max_logit_bias": 2, "max_logprobs": 3,
}  # fmt: skip
MESSAGE = {"role": "user", "content": "x"}

BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("max_messages", {"messages": [MESSAGE] * 3}),
    ("max_sequences", {"n": 4}),
    ("max_sequences", {"n": 10**9}),
    ("max_answer_tokens", {"n": 2, "max_tokens": 26}),
    ("max_answer_tokens", {"n": 3, "max_completion_tokens": 10**9}),
    ("max_prompt_tokens", {"messages": [{"role": "user", "content": "x " * 60}]}),
    ("max_stops", {"stop": ["a", "b", "c"]}),
    ("max_stop_characters", {"stop": "abcdef"}),
    ("max_stop_token_ids", {"stop_token_ids": [1, 2, 3]}),
    ("max_logit_bias", {"logit_bias": {"1": 1, "2": 1, "3": 1}}),
    ("max_logprobs", {"logprobs": True, "top_logprobs": 4}),
    ("max_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    ("client_templates", {"chat_template": "{{ messages }}"}),
    ("template_kwargs", {"chat_template_kwargs": {"chat_template": "{{ x }}"}}),
    ("template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("template_kwargs", {"chat_template_kwargs": {"add_generation_prompt": False}}),
]


@pytest.mark.parametrize(("setting", "body"), BEYOND, ids=str)
def test_a_refusal_names_its_setting(serve: Any, says: Any, setting: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with serve(says("ok"), **SMALL) as site:
            response = await site.chat(**body)
            assert response.status_code == 400
            assert f"(setting http.{setting})" in response.json()["error"]["message"]
            assert not site.spine.runs
            within = {
                "messages": [MESSAGE], "n": 2, "max_tokens": 25, "stop": ["abcde", "b"],
                "stop_token_ids": [1, 2], "logit_bias": {"1": 1, "2": 1}, "logprobs": True, "top_logprobs": 3,
                "chat_template_kwargs": {"enable_thinking": False},
            }  # fmt: skip
            assert (await site.chat(**within)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs"])
def test_templates_come_with_the_model_only(serve: Any, says: Any, name: str) -> None:
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    value: Any = bomb if name == "chat_template" else {"chat_template": bomb}

    async def main() -> None:
        async with serve(says("ok")) as site:
            response = await site.chat(**{name: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name
            assert bomb not in response.text
            assert (await site.complete(**{name: value})).status_code == 400

    asyncio.run(main())


def test_answers_without_max_tokens_share_the_budget(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), max_answer_tokens=60, context=200) as site:
            assert (await site.chat(n=3)).status_code == 200
            assert (await site.complete(prompt=["a", "b"], n=2, max_tokens=None)).status_code == 200
            most = [run.request.sampling.max_tokens for run in site.spine.runs]
            assert most == [20] * 3 + [15] * 4

    asyncio.run(main())


def test_many_header_lines(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), max_headers=20) as site:
            headers = {f"x-{n}": "1" for n in range(20)}
            for path in ("/v1/chat/completions", "/health"):
                response = await site.client.post(path, json={}, headers=headers)
                assert response.status_code == 431
                assert "(setting http.max_headers)" in response.json()["error"]["message"]

    asyncio.run(main())


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + rest.partition(END)[2])
    sys.exit(0)
