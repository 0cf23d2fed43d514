"""A model's text side from its Hugging Face folder: tokenizer, end tokens, chat template, context length.

Encoding changes nothing in a tokenizer, yet the library locks it for a while in some calls ("Already
borrowed"), so each thread has its own. Short texts are encoded where they are; long ones, which would
block the event loop, in a pool of threads: the library lets go of the GIL.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fleet.errors import BadRequest
from router.text.detokenize import Vocabulary
from router.text.given_template import GivenTemplates
from router.text.reasoning import BEGIN, END, thinks
from router.text.template import ChatTemplate, OutOfTime
from router.text.tools.formats import FORMATS, format_of, shows_tools

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads of its own for a batch of one text

_INLINE_S = 0.02
"""Seconds that a chat template may take on the event loop."""
_QUEUE_S = 30.0
"""Seconds that a rendering may wait for a thread, beyond its own time."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How text becomes tokens."""

    threads: int = 2
    """Threads that encode long texts and render long histories; each holds a tokenizer of its own."""
    inline_characters: int = 4096
    """Texts up to this length are encoded on the event loop: about 1 ms, less than a thread would cost."""
    template_seconds: float = 2.0
    """Longest a chat template may take for one request, seconds."""
    tool_parser: str = "auto"
    """How the model writes calls of tools: auto (by its chat template), hermes, llama, mistral, mistral_args
    or json."""
    reasoning_parser: str = "auto"
    """How reasoning is parted from answers: auto (by its chat template), think (`<think>`) or none."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; at least 1 is needed")
        if not self.template_seconds > 0:
            raise ValueError(f"template_seconds is {self.template_seconds}; a time above 0 is needed")
        for name, known in (
            ("tool_parser", ("auto", *FORMATS)),
            ("reasoning_parser", ("auto", "think", "none")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; there are {', '.join(known)}")


class ModelText:
    """Text to tokens for one model. Encoding and rendering are safe at any concurrency."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        end_tokens: Sequence[int] = (),
        context: int = 1 << 20,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        settings: TextSettings | None = None,
    ) -> None:
        """ValueError: the tokenizer is of a kind that cannot be decoded byte by byte."""
        self._json = tokenizer_json
        self._settings = settings or TextSettings()
        self._local = threading.local()
        parsed = json.loads(tokenizer_json)
        self.vocabulary = _vocabulary(self._tokenizer(), parsed.get("decoder"))
        # A normalizer may join characters before they are encoded: composition makes one of at most four.
        shrink = 4 if parsed.get("normalizer") else 1
        self._longest = shrink * max(map(len, self.vocabulary.pieces), default=1)
        self.end_tokens = tuple(end_tokens)
        """Tokens that end an answer."""
        self.context = context
        """Most tokens of a sequence, prompt and answer, that the model was made for."""
        self.template = (
            ChatTemplate(chat_template, special_tokens or {}, most_characters=self.most_characters)
            if chat_template is not None
            else None
        )
        source = chat_template or ""
        kind = self._settings.tool_parser
        self.tool_format = format_of(source) if kind == "auto" else FORMATS[kind]
        """How it writes calls of tools; None: its template shows a way that is not known here."""
        self.shows_tools = shows_tools(source)
        """Whether the template describes tools to the model."""
        self.takes_system = self.template is not None and _takes_system(
            self.template, self._settings.template_seconds
        )
        """Whether the template shows a system prompt."""
        reasoning = self._settings.reasoning_parser
        self.thinks = thinks(source) if reasoning == "auto" else reasoning == "think"
        """Whether its answers may begin with reasoning."""
        marks = {
            mark.encode() for mark in (BEGIN, END, *(self.tool_format.specials if self.tool_format else ()))
        }
        self.marks = frozenset(t for t in self.vocabulary.special if self.vocabulary.piece(t) in marks)
        """Control tokens that part an answer: needed as text where it is to be parted."""
        self._pool = ThreadPoolExecutor(self._settings.threads, thread_name_prefix="text")
        self.given = GivenTemplates(
            special_tokens or {},
            self.most_characters,
            self._settings.template_seconds,
            self._settings.threads,
        )
        """Renders templates that come with requests."""

    @classmethod
    def load(cls, folder: Path, settings: TextSettings | None = None) -> ModelText:
        """From tokenizer.json and, where there are, tokenizer_config.json, chat_template.jinja,
        generation_config.json and config.json. ValueError or OSError: a file is broken or missing."""
        text = (folder / "tokenizer.json").read_text("utf-8")
        config, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
        tokenizer_config = _read(folder / "tokenizer_config.json")
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in tokenizer_config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        tokenizer = Tokenizer.from_str(text)
        ends = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
        if (named := tokenizer.token_to_id(special.get("eos_token", ""))) is not None:
            ends.append(named)
        length = config.get("max_position_embeddings") or tokenizer_config.get("model_max_length")
        if not isinstance(length, int | float) or length < 1:
            raise ValueError(f"{folder / 'config.json'} has no max_position_embeddings")
        return cls(
            text,
            end_tokens=tuple(dict.fromkeys(ends)),
            context=int(length),
            chat_template=_chat_template(folder, tokenizer_config),
            special_tokens=special,
            settings=settings,
        )

    @classmethod
    def of_bytes(cls, settings: TextSettings | None = None) -> ModelText:
        """For models that mean nothing: token n is byte n, and two more begin and end a turn."""
        tokenizer = Tokenizer(models.BPE(dict(_ALPHABET), []))
        # Word by word: the library keeps 10,000 words that it has split, and whole prompts would be 20 MB.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        template = (
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
            "{% endfor %}<|im_start|>assistant\n"
        )
        return cls(tokenizer.to_str(), end_tokens=(257,), chat_template=template, settings=settings)

    @property
    def most_characters(self) -> int:
        """No text longer than this fits into the context: no token stands for more than the longest one."""
        return self.context * self._longest

    async def encode(self, text: str, *, add_special: bool, param: str = "prompt") -> list[int]:
        """Tokens of `text`; `add_special` puts those before and after that a bare text gets, such as a
        begin token. BadRequest names `param` where the text cannot fit or is not valid Unicode."""
        if len(text) > self.most_characters:
            raise BadRequest(
                f"{param} has {len(text)} characters: more than the {self.context} tokens of the model's "
                "context can hold",
                param=param,
                code="context_length_exceeded",
            )
        try:
            if len(text) <= self._settings.inline_characters:
                return self._encode(text, add_special)
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, self._encode, text, add_special
            )
        except (UnicodeError, TypeError) as error:
            # The library calls a string with half a surrogate pair no string.
            raise BadRequest(f"{param} is not valid Unicode", param=param) from error

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. BadRequest: the model has no template, it refuses, or it takes
        longer than `text.template_seconds`. `variables` are what the template sees besides."""
        if self.template is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions with a prompt", param="messages"
            )
        size = sum(len(message["content"]) for message in messages)
        if size <= self._settings.inline_characters and not tools:
            try:
                return self.template.render(messages, tools, variables, _INLINE_S)
            except OutOfTime:
                pass  # once more, where it holds up nobody
        if size > self.most_characters:
            raise BadRequest(
                f"the messages have {size} characters: more than the {self.context} tokens of the model's "
                "context can hold",
                param="messages",
                code="context_length_exceeded",
            )
        limit_s = self._settings.template_seconds
        rendering = asyncio.get_running_loop().run_in_executor(
            self._pool, self.template.render, messages, tools, variables, limit_s
        )
        try:
            # The template looks at the time itself; whatever keeps it from that is left to itself.
            return await asyncio.wait_for(rendering, limit_s + _QUEUE_S)
        except (OutOfTime, TimeoutError):
            raise BadRequest(
                f"the model's chat template took more than {limit_s:g} s for these messages "
                "(setting text.template_seconds)",
                param="messages",
            ) from None

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """All at once, by the library itself."""
        return str(self._tokenizer().decode(list(tokens), skip_special_tokens=skip_special))

    def _encode(self, text: str, add_special: bool) -> list[int]:
        # The one call that leaves out where each token stands in the text, half of the time for short ones.
        (encoded,) = self._tokenizer().encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoded.ids
        return ids

    def _tokenizer(self) -> Tokenizer:
        tokenizer = getattr(self._local, "tokenizer", None)
        if tokenizer is None:
            tokenizer = self._local.tokenizer = Tokenizer.from_str(self._json)
            # Some folders store both; a prompt must be neither cut nor filled up.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        return tokenizer

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _takes_system(template: ChatTemplate, limit_s: float) -> bool:
    """Some refuse the role, some leave it out: asking is the way to know."""
    mark = "a system prompt"
    turns = [{"role": "system", "content": mark}, {"role": "user", "content": "words"}]
    try:
        return mark in template.render(turns, None, None, limit_s)
    except (BadRequest, OutOfTime):
        return False


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def _ids(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        # Several by name, for special purposes; the one for plain chat is called "default".
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _vocabulary(tokenizer: Tokenizer, decoder: object) -> Vocabulary:
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        to_bytes = _byte_fallback
    else:
        raise ValueError(
            f"tokenizer.json has the decoder {', '.join(kinds) or 'none'}; "
            "supported are ByteLevel, ByteFallback and Metaspace"
        )
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        pieces[token] = to_bytes(text)
    return Vocabulary(tuple(pieces), frozenset(token for token, kind in added.items() if kind.special))


def _kinds(decoder: object) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for inner in decoder.get("decoders", []) for kind in _kinds(inner)]
    return [str(decoder.get("type"))]


def _byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level BPE (GPT-2) writes each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()  # an added token is written as it is


def _byte_fallback(token: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0x0A>` one byte. The library writes a run of bytes that is not whole
    UTF-8 as one U+FFFD a byte, and strips a space at the very start: an answer never stands there."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
