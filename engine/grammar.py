"""From a constraint to the tokens that may come next, by xgrammar: nobody else imports it.

Compiling takes from a millisecond to seconds and lets go of the GIL, but cannot be interrupted. So what is
compiled is bounded first (`engine/bounds.py`), each compilation has a thread of its own that runs after
everything else, and one that takes too long is answered with an error while its thread is left to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.bounds import GrammarSettings, prepare
from fleet.errors import BadConstraint, BadRequest, Internal, Overloaded
from fleet.request import Constraint, ConstraintKind

log = logging.getLogger(__name__)

_WHITESPACE = 2
"""Most whitespace characters in a row between the parts of JSON: a model may indent, but not for ever."""

_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?: (?:Check failed: \([^)]*(?:\([^)]*\)[^)]*)*\) is false: )?")
"""What xgrammar puts before its messages: time, source line and the expression that failed."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token writes. A token that writes nothing, such as one that marks turns, is never drawn
    under a constraint, unless it ends the sequence."""

    pieces: tuple[bytes, ...]
    end_tokens: tuple[int, ...]
    size: int
    """Of the logits; may exceed the number of pieces."""

    @classmethod
    def load(cls, folder: Path, size: int) -> Vocabulary:
        """From a Hugging Face folder. BadRequest when its tokenizer is of an unknown kind."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        kind = _kind(json.loads((folder / "tokenizer.json").read_text("utf-8")).get("decoder"))
        texts = tokenizer.get_vocab(with_added_tokens=True)
        special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        encoded = [""] * size
        for text, token in texts.items():
            if token < size and token not in special:
                encoded[token] = text
        info = xgrammar.TokenizerInfo(encoded, kind, stop_token_ids=[])
        ends = tuple(token for token in _end_tokens(folder, tokenizer) if token < size)
        return cls(tuple(info.decoded_vocab), ends, size)


class Matcher:
    """An `engine.words.Matcher`."""

    __slots__ = ("_inner", "_tail", "_vocabulary")

    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._inner = xgrammar.GrammarMatcher(compiled)
        rest = vocabulary.size % 32
        self._tail = np.int32((1 << rest) - 1) if rest else np.int32(-1)

    @property
    def vocabulary(self) -> int:
        return self._vocabulary.size

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self._vocabulary.end_tokens

    @property
    def finished(self) -> bool:
        return bool(self._inner.is_terminated())

    def fill(self, mask: NDArray[np.int32], row: int) -> None:
        words = -(-self._vocabulary.size // 32)
        part = mask[row : row + 1, :words]
        self._inner.fill_next_token_bitmask(part, 0)
        part[0, -1] &= self._tail

    def accept(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))


class Grammars:
    """Compiles constraints for one vocabulary, and keeps those used last."""

    def __init__(self, vocabulary: Vocabulary, settings: GrammarSettings) -> None:
        self.vocabulary = vocabulary
        self._settings = settings
        info = xgrammar.TokenizerInfo(
            list(vocabulary.pieces),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.end_tokens),
        )
        # Its own cache is keyed by text too, but knows no number of entries.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._cache: OrderedDict[Constraint, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[Constraint, asyncio.Task[Any]] = {}
        self._turn = asyncio.Semaphore(settings.threads)
        self._compiling = 0

    async def matcher(self, constraint: Constraint, generated: Sequence[int] = ()) -> Matcher:
        """For a sequence that has `generated` already. BadConstraint says why a constraint cannot be
        compiled, or which limit it is above; Overloaded: too many are being compiled."""
        matcher = Matcher(await self._compiled(constraint), self.vocabulary)
        for place, token in enumerate(generated):
            if not matcher.accept(token):
                raise Internal(f"token {place} of those generated so far does not fit the constraint")
        return matcher

    @property
    def cached(self) -> int:
        """Constraints that need no compilation."""
        return len(self._cache)

    @property
    def cached_bytes(self) -> int:
        return self._bytes

    @property
    def compiling(self) -> int:
        """Threads at work, those included that nobody waits for any more."""
        return self._compiling

    async def _compiled(self, constraint: Constraint) -> Any:
        if (found := self._cache.get(constraint)) is not None:
            self._cache.move_to_end(constraint)
            return found[0]
        task = self._under_way.get(constraint)
        if task is None:
            prepared = prepare(constraint, self._settings)
            task = asyncio.create_task(self._run(constraint, prepared))
            self._under_way[constraint] = task
            # An error nobody waited for is nobody's.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Whoever leaves, others wait for the same.
        return await asyncio.shield(task)

    async def _run(self, constraint: Constraint, prepared: Constraint) -> Any:
        """Compiles it in a thread, in turn. Stays under way as long as the thread does, so that no second
        one is started for the same constraint."""
        limit = self._settings.compile_s
        try:
            async with asyncio.timeout(limit):
                await self._turn.acquire()
        except TimeoutError:
            del self._under_way[constraint]
            raise Overloaded(
                f"{self._settings.threads} constraints have been compiling for {limit:g} s "
                "(settings engine.grammar.threads and engine.grammar.compile_s)"
            ) from None
        done = self._start(constraint, prepared)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(done)
        except TimeoutError:
            raise BadConstraint(
                f"the constraint takes more than {limit:g} s to compile "
                "(setting engine.grammar.compile_s); make it simpler"
            ) from None

    def _start(self, constraint: Constraint, prepared: Constraint) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        done.add_done_callback(lambda future: future.exception())
        self._compiling += 1

        def settle(compiled: Any, error: Exception | None) -> None:
            self._compiling -= 1
            self._turn.release()
            del self._under_way[constraint]
            if error is None:
                self._keep(constraint, compiled)
                done.set_result(compiled)
            else:
                done.set_exception(error)

        def work() -> None:
            _stand_back()
            compiled, error = None, None
            try:
                compiled = self._compile(prepared)
            except Exception as failure:  # noqa: BLE001  the root of a thread
                error = _explained(failure)
            with suppress(RuntimeError):  # the loop has ended: nobody is left
                loop.call_soon_threadsafe(settle, compiled, error)

        # A daemon: a compilation that goes on does not keep a process from leaving.
        threading.Thread(target=work, name="grammar", daemon=True).start()
        return done

    def _compile(self, constraint: Constraint) -> Any:
        compiler, text = self._compiler, constraint.text
        match constraint.kind:
            case ConstraintKind.JSON_OBJECT:
                return compiler.compile_json_schema(
                    '{"type":"object"}', strict_mode=False, max_whitespace_cnt=_WHITESPACE
                )
            case ConstraintKind.JSON_SCHEMA:
                return compiler.compile_grammar(_json_grammar(text, _WHITESPACE))
            case ConstraintKind.REGEX:
                return compiler.compile_regex(text)
            case ConstraintKind.GRAMMAR:
                return compiler.compile_grammar(text)
            case ConstraintKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(json.dumps(_tag(json.loads(text))))

    def _keep(self, constraint: Constraint, compiled: Any) -> None:
        size = compiled.memory_size_bytes + len(constraint.text)
        if size > self._settings.cache_bytes:
            return
        self._cache[constraint] = compiled, size
        self._bytes += size
        while self._bytes > self._settings.cache_bytes or len(self._cache) > self._settings.cache_entries:
            _, (_, freed) = self._cache.popitem(last=False)
            self._bytes -= freed


def _json_grammar(schema: str, whitespace: int | None) -> str:
    """EBNF of a schema. xgrammar lets control characters into strings of bounded length, though JSON does
    not; the class it writes for their characters is replaced."""
    grammar = str(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=whitespace))
    return grammar.replace(r"[^\"\\\r\n]", r"[^\"\\\x00-\x1f]")


def _tag(value: Any) -> Any:
    """The same for the schemas in a structural tag."""
    if isinstance(value, list):
        return [_tag(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and value.keys() <= {"type", "json_schema", "max_whitespace_cnt"}:
        schema = json.dumps(value.get("json_schema"))
        grammar = _json_grammar(schema, value.get("max_whitespace_cnt", _WHITESPACE))
        return {"type": "grammar", "grammar": grammar}
    return {name: _tag(item) for name, item in value.items()}


def _stand_back() -> None:
    """Lets the engine's steps go first. Where priorities are not of a thread but of the process: nothing."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _explained(failure: Exception) -> Exception:
    if isinstance(failure, RuntimeError | ValueError | TypeError):
        why = _PLACE.sub("", str(failure)).strip().partition("\n")[0][:500]
        return BadConstraint(f"the constraint cannot be compiled: {why}")
    log.error("compiling a constraint broke", exc_info=failure)
    return Internal(f"compiling the constraint broke: {type(failure).__name__}")


def _kind(decoder: object) -> Any:
    kinds = _decoders(decoder)
    if "ByteLevel" in kinds:
        return xgrammar.VocabType.BYTE_LEVEL
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return xgrammar.VocabType.BYTE_FALLBACK
    raise BadRequest(
        f"tokenizer.json has the decoder {', '.join(kinds) or 'none'}; constraints on what is generated work "
        "with ByteLevel, ByteFallback and Metaspace"
    )


def _decoders(decoder: object) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for inner in decoder.get("decoders", []) for kind in _decoders(inner)]
    return [str(decoder.get("type"))]


def _end_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        config = json.loads((folder / name).read_text("utf-8"))
        ids = config.get("eos_token_id")
        found += [ids] if isinstance(ids, int) else [i for i in ids or () if isinstance(i, int)]
        named = config.get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        if isinstance(text, str) and (token := tokenizer.token_to_id(text)) is not None:
            found.append(token)
    return tuple(dict.fromkeys(found))
