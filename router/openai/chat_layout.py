"""How a chat's answers are written as JSON: plain ones, and those that are parted into more than content."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from fleet.request import Usage
from router.openai.job import usage_object
from router.openai.prompt_scores import LOWEST, listed
from router.openai.stream import Choice
from router.text.answer import LoggedToken
from router.text.detokenize import Vocabulary
from router.text.parts import CallArguments, CallBegun, Content, Part, Reasoning
from router.text.split import Split

_encode = msgspec.json.Encoder().encode


def shown_tokens(logged: Sequence[LoggedToken], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Log-probabilities as chats and responses show them."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        text = piece.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(piece)}

    return [
        {**shown(one.token, one.logprobs.logprob), "top_logprobs": [shown(*top) for top in one.logprobs.top]}
        for one in logged
    ]


class ChatLayout:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        vocabulary: Vocabulary,
        *,
        usage_null: bool,
        logprobs: bool,
        prompt_logprobs: int | None = None,
    ) -> None:
        """`prompt_logprobs`: how many of the most likely tokens to list at each token of the prompt."""
        self._vocabulary = vocabulary
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = logprobs
        self._head = {"id": id, "created": created, "model": model}
        common = _encode({**self._head, "object": "chat.completion.chunk"})[:-1]
        self._start = b"data: " + common + b',"choices":[{"index":'
        self._stop = b"]" + (b',"usage":null' if usage_null else b"") + b"}\n\n"
        self._no_logprobs = b'},"logprobs":null,"finish_reason":null}' + self._stop
        self._usage = b"data: " + common + b',"choices":[],"usage":'

    def opening(self, choice: Choice) -> bytes:
        return self._start + b'%d,"delta":{"role":"assistant","content":""' % choice.index + self._no_logprobs

    def delta(self, choice: Choice, text: str, logged: Sequence[LoggedToken]) -> bytes:
        start = self._start + b'%d,"delta":{"content":' % choice.index + _encode(text)
        if not self._logprobs:
            return start + self._no_logprobs
        return start + b'},"logprobs":' + self._log(logged) + b',"finish_reason":null}' + self._stop

    def closing(self, choice: Choice, logged: Sequence[LoggedToken]) -> bytes:
        return (
            self._start
            + b'%d,"delta":{},"logprobs":' % choice.index
            + (self._log(logged) if logged else b"null")
            + b',"finish_reason":'
            + _encode(self._finish(choice))
            + b"}"
            + self._stop
        )

    def usage(self, usage: Usage) -> bytes:
        return self._usage + _encode(usage_object(usage)) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": choice.index,
                        "message": self._message(choice),
                        "logprobs": msgspec.Raw(self._log(choice.logged)) if self._logprobs else None,
                        "finish_reason": self._finish(choice),
                    }
                    for choice in choices
                ],
                "usage": usage_object(usage),
                **self._scores(choices[0]),
            }
        )

    def _message(self, choice: Choice) -> dict[str, Any]:
        return {"role": "assistant", "content": "".join(choice.text), "refusal": None}

    def _finish(self, choice: Choice) -> str:
        return choice.finish

    def _scores(self, choice: Choice) -> dict[str, Any]:
        if self._prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": listed(choice, self._prompt_logprobs, self._vocabulary)}

    def _log(self, logged: Sequence[LoggedToken]) -> bytes:
        return _encode({"content": shown_tokens(logged, self._vocabulary), "refusal": None})


class PartedLayout(ChatLayout):
    """For answers that may hold reasoning or calls of tools."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        vocabulary: Vocabulary,
        splits: Sequence[Split],
        *,
        usage_null: bool,
        logprobs: bool,
        prompt_logprobs: int | None,
        id_length: int,
    ) -> None:
        """`splits`: one for each answer; `id_length` of calls, 0 for OpenAI's own."""
        super().__init__(
            id,
            created,
            model,
            vocabulary,
            usage_null=usage_null,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self.splits = splits
        self._id_length = id_length
        self._waiting: list[list[LoggedToken]] = [[] for _ in splits]
        """Log-probabilities of text that is held back."""

    def delta(self, choice: Choice, text: str, logged: Sequence[LoggedToken]) -> bytes:
        self._waiting[choice.index] += logged
        return self._frames(choice, self.splits[choice.index].feed(text))

    def closing(self, choice: Choice, logged: Sequence[LoggedToken]) -> bytes:
        frames = self._frames(choice, self.splits[choice.index].end())
        return frames + super().closing(choice, [*self._waiting[choice.index], *logged])

    def _frames(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        frames = b""
        for part in parts:
            frames += self._start + b'%d,"delta":' % choice.index + _encode(self._delta(part))
            logged = self._waiting[choice.index]
            if logged:
                frames += b',"logprobs":' + self._log(logged) + b',"finish_reason":null}' + self._stop
                logged.clear()
            else:
                frames += self._no_logprobs[1:]
        return frames

    def _delta(self, part: Part) -> dict[str, Any]:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegun(index, name):
                return {"tool_calls": [{"index": index, **self._call(name, "")}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        if self._id_length:
            letters = string.ascii_letters + string.digits
            id = "".join(secrets.choice(letters) for _ in range(self._id_length))
        else:
            id = f"call_{secrets.token_hex(12)}"
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _message(self, choice: Choice) -> dict[str, Any]:
        split = self.splits[choice.index]
        content = reasoning = ""
        calls: list[list[str]] = []
        for part in [*split.feed("".join(choice.text)), *split.end()]:
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegun(_, name):
                    calls.append([name, ""])
                case CallArguments(index, text):
                    calls[index][1] += text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [self._call(name, arguments) for name, arguments in calls]
        return message

    def _finish(self, choice: Choice) -> str:
        called = choice.finish == "stop" and self.splits[choice.index].called
        return "tool_calls" if called else choice.finish
