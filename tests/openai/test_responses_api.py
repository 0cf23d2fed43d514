"""/v1/responses: inputs of every kind, the object, the events in their order, and the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from fleet.errors import WorkerLost
from router.text.tokenizer import ModelText, TextSettings

MODEL = "tiny/model-1"
CALLING = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
def calling(tokenizer_json: str) -> ModelText:
    """A model that knows tools."""
    return ModelText(
        tokenizer_json,
        end_tokens=(1,),
        context=4096,
        chat_template=CALLING,
        settings=TextSettings(threads=1),
    )


def client(site: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0, timeout=30
    )


async def ask(site: Any, **body: Any) -> Any:
    return await site.client.post("/v1/responses", json={"model": MODEL, "input": "hi", **body})


def events(body: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each."""
    assert body.endswith("\n\n")
    found = []
    for block in body[:-2].split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_the_official_client(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello 😀 there, fox")) as site, client(site) as api:
            whole = await api.responses.create(model=MODEL, input="hi", instructions="be brief")
            assert whole.output_text == "Hello 😀 there, fox"
            assert whole.status == "completed"
            assert whole.usage is not None
            assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens > 0
            stream = await api.responses.create(model=MODEL, input="hi", instructions="be brief", stream=True)
            seen = [event async for event in stream]
            assert (
                "".join(e.delta for e in seen if e.type == "response.output_text.delta") == whole.output_text
            )
            last = seen[-1]
            assert last.type == "response.completed"
            assert last.response.output_text == whole.output_text
            assert last.response.usage == whole.usage
            async with api.responses.stream(model=MODEL, input="hi") as helper:
                async for _ in helper:
                    pass
                assert (await helper.get_final_response()).output_text == whole.output_text

    asyncio.run(main())


def test_events_in_order(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            response = await ask(site, stream=True)
            assert response.headers["content-type"].startswith("text/event-stream")
            seen = events(response.text)
            names = [name for name, _ in seen]
            deltas = names.count("response.output_text.delta")
            assert deltas >= 2
            assert names == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                *["response.output_text.delta"] * deltas,
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert [data["sequence_number"] for _, data in seen] == list(range(len(seen)))
            assert all(name == data["type"] for name, data in seen)
            items = {data["item_id"] for _, data in seen if "item_id" in data}
            assert items == {seen[-1][1]["response"]["output"][0]["id"]}
            assert {data["response"]["id"] for _, data in seen if "response" in data} == {
                seen[0][1]["response"]["id"]
            }
            whole = (await ask(site)).json()
            changing = {"id", "created_at", "output"}
            final = seen[-1][1]["response"]
            assert {k: v for k, v in final.items() if k not in changing} == {
                k: v for k, v in whole.items() if k not in changing
            }
            assert final["output"][0]["content"] == whole["output"][0]["content"]
            Response.model_validate(whole, strict=False)

    asyncio.run(main())


def test_a_limit_makes_it_incomplete(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there, the quick brown fox")) as site:
            body = (await ask(site, max_output_tokens=2)).json()
            assert body["status"] == body["output"][0]["status"] == "incomplete"
            assert body["incomplete_details"] == {"reason": "max_output_tokens"}
            assert body["usage"]["output_tokens"] == 2
            seen = events((await ask(site, max_output_tokens=2, stream=True)).text)
            assert seen[-1][0] == "response.incomplete"
            assert seen[-1][1]["response"]["output"][0]["content"] == body["output"][0]["content"]

    asyncio.run(main())


def test_an_answer_without_text(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("")) as site:
            body = (await ask(site)).json()
            assert body["output"][0]["content"][0]["text"] == ""
            names = [name for name, _ in events((await ask(site, stream=True)).text)]
            assert names[-1] == "response.completed"
            assert "response.output_text.delta" not in names

    asyncio.run(main())


def test_logprobs(serve: Any, says: Any, calling: ModelText) -> None:
    """They are those of the same chat, whole and streamed, and their bytes are the text."""
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

    async def main() -> None:
        async with serve(says("Hello 😀 there, fox")) as site, client(site) as api:
            whole = await api.responses.create(model=MODEL, input="hi", **asked)
            (item,) = whole.output
            assert item.type == "message"
            (part,) = item.content
            assert part.type == "output_text"
            assert part.logprobs is not None
            said = b"".join(bytes(one.bytes) for one in part.logprobs)
            assert said.removesuffix(b"<|im_end|>").decode() == whole.output_text
            assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
            stream = await api.responses.create(model=MODEL, input="hi", stream=True, **asked)
            seen = [event async for event in stream]
            deltas = [event for event in seen if event.type == "response.output_text.delta"]
            assert all(event.logprobs for event in deltas)
            (done,) = [event for event in seen if event.type == "response.output_text.done"]
            grown = [one.token for event in deltas for one in event.logprobs]
            every = [one.token for one in part.logprobs]
            assert grown == every[: len(grown)]
            assert [one.token for one in done.logprobs] == every
            chat = (await site.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
            assert [one.model_dump() for one in part.logprobs] == chat["content"]
            none = await api.responses.create(model=MODEL, input="hi")
            assert none.output[0].content[0].logprobs == []  # type: ignore[union-attr]
        async with serve(says("x"), model_text=calling) as site:
            refused = await ask(site, tools=[TOOL], include=asked["include"])
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "include"

    asyncio.run(main())


def test_a_fault_in_the_middle(serve: Any, text: Any) -> None:
    tokens = text._encode("Hello there", False)

    async def main() -> None:
        async with serve(lambda request: [*tokens, WorkerLost("gone")]) as site:
            assert (await ask(site)).status_code == 503
            seen = events((await ask(site, stream=True)).text)
            name, last = seen[-1]
            assert name == "response.failed"
            assert last["response"]["status"] == "failed"
            assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
            assert "response.completed" not in [name for name, _ in seen]
        async with serve(lambda request: [WorkerLost("gone")]) as site:
            assert (await ask(site, stream=True)).status_code == 503

    asyncio.run(main())


def test_the_prompt_is_that_of_the_same_chat(serve: Any, says: Any, calling: ModelText) -> None:
    """Items become turns: the tokens that reach the fleet are those of the chat that says the same."""
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "e"},
    ]  # fmt: skip
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
            {"id": "c2", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "e"},
    ]  # fmt: skip

    async def main() -> None:
        async with serve(says("ok"), model_text=calling) as site:
            sampled = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
            asked = await ask(
                site, input=items, instructions="s", max_output_tokens=7, truncation="disabled",
                store=False, include=["reasoning.encrypted_content"], metadata={"a": "b"}, **sampled,
            )  # fmt: skip
            assert asked.status_code == 200, asked.text
            assert asked.json()["metadata"] == {"a": "b"}
            assert (await site.chat(messages=messages, max_tokens=7, **sampled)).status_code == 200
            ours, chats = (run.request for run in site.spine.runs)
            assert ours.prompt == chats.prompt
            assert ours.sampling == chats.sampling

    asyncio.run(main())


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}


def test_calls_of_tools(serve: Any, says: Any, calling: ModelText) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>'
    said = f"Well. {call % 1}\n{call % 2}"

    async def main() -> None:
        async with serve(says(said), model_text=calling) as site, client(site) as api:
            response = await api.responses.create(model=MODEL, input="hi", tools=[TOOL])  # type: ignore[list-item]
            kinds = [item.type for item in response.output]
            assert kinds == ["message", "function_call", "function_call"]
            calls = [item for item in response.output if item.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
            assert len({call.call_id for call in calls}) == 2
            stream = await api.responses.create(model=MODEL, input="hi", tools=[TOOL], stream=True)  # type: ignore[list-item]
            arguments: dict[int, str] = {}
            async for event in stream:
                if event.type == "response.function_call_arguments.delta":
                    arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
                if event.type == "response.function_call_arguments.done":
                    assert event.arguments == arguments[event.output_index]
            assert {index: json.loads(text) for index, text in arguments.items()} == {
                1: {"a": 1},
                2: {"a": 2},
            }
            # The answer may be handed back as it is, with the results.
            again: Any = [
                {"role": "user", "content": "hi"},
                *[item.model_dump(exclude_none=True) for item in response.output],
                *[{"type": "function_call_output", "call_id": c.call_id, "output": "3"} for c in calls],
            ]
            assert (await api.responses.create(model=MODEL, input=again, tools=[TOOL])).status == "completed"  # type: ignore[list-item]

    asyncio.run(main())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"top_logprobs": -1, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0]"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
    ({"input": "x" * 100_000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"text": {"format": {"type": "bogus"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
]


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([HI, {"role": "king", "content": "x"}], "input[1].role"),
        ([HI, {"type": "reasoning", "summary": []}, {"role": "user"}], "input[2].content"),
        ([HI, {"type": "reasoning", "summary": []}, CALL], "input[2].tool_calls"),
        ([HI, CALL, {**CALL, "call_id": "d"}, RESULT, {**RESULT, "call_id": "e"}], "input[4].call_id"),
        ([RESULT], "input[0].call_id"),
    ],
    ids=str,
)
def test_a_refusal_names_the_item(serve: Any, says: Any, items: list[Any], param: str) -> None:
    """Whatever turns the items become, and whatever stands before them."""

    async def main() -> None:
        async with serve(says("ok")) as site:
            for more in ({}, {"instructions": "be brief"}):
                response = await ask(site, input=items, **more)
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert error["param"] == param, error
                assert param in error["message"]

    asyncio.run(main())


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
def test_what_is_refused_is_named(serve: Any, says: Any, body: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            response = await ask(site, **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"].startswith(param), error
            assert "messages" not in error["message"], error
            assert not site.spine.runs

    asyncio.run(main())


def test_a_form_of_the_answer(serve: Any, says: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shape = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}

    async def main() -> None:
        async with serve(says('{"a": 1}')) as site:
            body = (await ask(site, text={"format": shape, "verbosity": "low"})).json()
            assert json.loads(body["output"][0]["content"][0]["text"]) == {"a": 1}
            assert body["text"]["format"] == shape
            wrapped = {k: v for k, v in shape.items() if k != "type"}
            chat = await site.chat(response_format={"type": "json_schema", "json_schema": wrapped})
            assert chat.status_code == 200
            ours, chats = (run.request.constraint for run in site.spine.runs)
            assert ours is not None
            assert ours == chats

    asyncio.run(main())
