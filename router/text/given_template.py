"""Chat templates that come with a request, where that is allowed: each rendered in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.errors import BadRequest, Overloaded

_START_S = 10.0
"""Seconds that a process may take to start, beyond the template's own time."""
_QUEUE_S = 30.0
"""Seconds that a rendering may wait for its turn."""


class GivenTemplates:
    """Renders what clients give as the model's own template would be, a few at a time."""

    def __init__(
        self, special_tokens: Mapping[str, str], most_characters: int, limit_s: float, at_once: int
    ) -> None:
        self._special = dict(special_tokens)
        self._most = most_characters
        self._limit_s = limit_s
        self._turn = asyncio.Semaphore(at_once)

    async def render(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """As `ModelText.render`. BadRequest also: it is no template, or takes too much time or memory."""
        asked = {
            "source": source,
            "special": self._special,
            "most": self._most,
            "seconds": self._limit_s,
            "messages": messages,
            "tools": tools,
            "variables": variables,
        }
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("too many chat templates of clients are being rendered") from None
        try:
            answer = await self._ask(json.dumps(asked).encode())
        finally:
            self._turn.release()
        if "prompt" in answer:
            return answer["prompt"]
        if "late" in answer:
            raise self._late()
        told = answer["refused"].replace("the model's chat template", "the chat template")
        raise BadRequest(f"chat_template: {told[:1000]}", param="chat_template")

    def _late(self) -> BadRequest:
        return BadRequest(
            f"chat_template took more than {self._limit_s:g} s, or too much memory, for these messages "
            "(setting text.template_seconds)",
            param="chat_template",
        )

    async def _ask(self, asked: bytes) -> dict[str, str]:
        # Of our environment, which may hold keys, it gets only where our modules are.
        environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "router.text.template_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        try:
            async with asyncio.timeout(self._limit_s + _START_S):
                written, _ = await child.communicate(asked)
        except TimeoutError:
            raise self._late() from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        try:
            answer: dict[str, str] = json.loads(written)
        except ValueError:
            raise self._late() from None  # ended by one of its limits
        return answer
