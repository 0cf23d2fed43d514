"""/tokenize and /detokenize, in the shape that vLLM gave them, and what is answered about embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from fleet.errors import BadRequest
from router.openai import chat
from router.openai.messages import Message, TokenId, parse
from router.openai.settings import HttpSettings
from router.text.tokenizer import ModelText

_encode = msgspec.json.Encoder().encode


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    """Empty: the one that is served."""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Not given: true for a prompt, false for messages, whose template writes them."""
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    input: Any = None


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)


def decode_tokenize(data: bytes) -> TokenizeBody:
    return parse(_TOKENIZE, data)


def decode_detokenize(data: bytes) -> DetokenizeBody:
    return parse(_DETOKENIZE, data)


def decode_embeddings(data: bytes) -> EmbeddingsBody:
    return parse(_EMBEDDINGS, data)


async def tokenize(body: TokenizeBody, text: ModelText, settings: HttpSettings, context: int) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("either prompt or messages is needed", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await text.encode(body.prompt, add_special=special, param="prompt")
    else:
        messages = body.messages or []
        if not 0 < len(messages) <= settings.max_messages:
            raise BadRequest(
                f"messages: {len(messages)}; 1 to {settings.max_messages} are possible "
                "(setting http.max_messages)",
                param="messages",
            )
        prompt = await text.render(chat.history(messages))
        tokens = await text.encode(prompt, add_special=bool(body.add_special_tokens), param="messages")
    strings = None
    if body.return_token_strs:
        strings = [text.vocabulary.piece(token).decode("utf-8", "replace") for token in tokens]
    return _encode({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": strings})


async def detokenize(body: DetokenizeBody, text: ModelText, settings: HttpSettings) -> bytes:
    if len(body.tokens) > settings.max_prompt_tokens:
        raise BadRequest(
            f"tokens: {len(body.tokens)}; the limit is {settings.max_prompt_tokens} "
            "(setting http.max_prompt_tokens)",
            param="tokens",
        )
    if body.tokens and max(body.tokens) >= len(text.vocabulary):
        raise BadRequest(
            f"tokens: there is no token {max(body.tokens)}; ids go from 0 to {len(text.vocabulary) - 1}",
            param="tokens",
        )
    prompt = await asyncio.to_thread(text.decode, body.tokens, skip_special=False)
    return _encode({"prompt": prompt})


def no_embeddings(body: EmbeddingsBody) -> BadRequest:
    return BadRequest(
        f"model {body.model!r} generates text and has no embeddings; ask a server of an embedding model",
        param="model",
        code="unsupported_model",
    )
