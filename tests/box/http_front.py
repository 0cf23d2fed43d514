"""The ingress over a box, listening on a real port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from whole_fleet import MODEL, Box

from fleet.api_keys import ApiKey
from router.openai.asgi import Ingress
from router.openai.server import HttpServer
from router.openai.settings import HttpSettings
from router.text.tokenizer import ModelText, TextSettings


@asynccontextmanager
async def listening(
    box: Box, tokenizer_json: str, keys: Sequence[ApiKey] = ()
) -> AsyncIterator[tuple[Ingress, int]]:
    """The ingress and its port; stopped at the end, when all requests have ended by themselves."""
    text = ModelText(
        tokenizer_json,
        end_tokens=(1,),
        context=2048,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        settings=TextSettings(threads=1, inline_characters=512),
    )
    http = HttpSettings(port=0)
    flow = box.router.flow
    ingress = Ingress(flow, {MODEL: text}, http, keys=keys, records=flow.records, name=box.router.name)
    server = await HttpServer.start(ingress, http)
    try:
        yield ingress, server.port
    finally:
        await server.stop(10)
