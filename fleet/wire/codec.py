"""Words to protobuf bytes and back, for all that crosses a process boundary. Pure.

`encode_x(word) -> bytes` raises ValueError when a number does not fit its field. `decode_x(bytes) -> word`
raises `Malformed`, a ValueError that names the field, for bytes that are no such word; never anything else.
Fields a newer peer added are ignored; an unknown kind of message or way to end is malformed.

Words and messages have the same field names (`proto/pdfleet/v1/worker.proto`), so one walk over a
dataclass's fields serves all of them. Tokens of a frame, the hot path, are columns and have their own code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, NewType, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from msgspec import structs

from fleet.events import (
    BlocksDropped,
    BlocksStored,
    Cleared,
    Dispatch,
    KeyUse,
    KvDigest,
    KvEvent,
    KvEvents,
    KvSnapshot,
    LoadReport,
    RouterMoves,
    Settled,
    Tier,
)
from fleet.handoff import (
    Cancel,
    DecodeJob,
    Ended,
    Frame,
    Holder,
    KvTicket,
    Lent,
    Prefilled,
    PrefillJob,
    Proceed,
    Release,
    Renew,
    Scored,
    Started,
    Token,
    ToWorker,
)
from fleet.ids import Incarnation, WorkerId
from fleet.member import MemberState, Role
from fleet.request import Constraint, Request, Sampling, TokenLogprobs, Usage
from fleet.wire.v1 import worker_pb2 as pb

NUMBER_LIMIT = 1 << 31
"""Token ids, streams and counts are below it, so that they fit a signed 32-bit index everywhere."""
SEQUENCE_LIMIT = 1 << 20
"""Most tokens in a prompt, an answer or a list of stop tokens."""
TEXT_LIMIT = 4096
"""Most characters in any text but a constraint's."""
CONSTRAINT_LIMIT = 1 << 18
"""Most characters in a schema, a regular expression or a grammar; the ingress allows far fewer."""


class Malformed(ValueError):
    """Bytes that are no word. `stream` is set when they name the stream they were meant for."""

    def __init__(self, message: str, stream: int | None = None) -> None:
        super().__init__(message)
        self.stream = stream


# --- values: checks of what protobuf itself lets through ---


def _count(value: int) -> int:
    if value >= NUMBER_LIMIT:
        raise ValueError(f"{value} is not below {NUMBER_LIMIT}")
    return value


def _counts(values: Iterable[int]) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) > SEQUENCE_LIMIT:
        raise ValueError(f"{len(found)} numbers; at most {SEQUENCE_LIMIT} are allowed")
    if found:
        _count(max(found))
    return found


def _text(value: str) -> str:
    if len(value) > TEXT_LIMIT:
        raise ValueError(f"{len(value)} characters; at most {TEXT_LIMIT} are allowed")
    return value


def _constraint(value: str) -> str:
    if len(value) > CONSTRAINT_LIMIT:
        raise ValueError(f"{len(value)} characters; at most {CONSTRAINT_LIMIT} are allowed")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


def _logprob(value: float) -> float:
    """-inf is the log-probability of what a constraint forbids."""
    if math.isnan(value) or value == math.inf:
        raise ValueError(f"{value} is not a log-probability")
    return value


def _same(value: Any) -> Any:
    return value


def _names(values: tuple[int, ...]) -> bytes:
    """Block names travel as bytes: taking them out of a repeated field costs twice as much."""
    try:
        return struct.pack(f"<{len(values)}Q", *values)
    except struct.error as error:
        raise ValueError(f"a block's name is no number of 64 bits: {error}") from None


_FEW_NAMES = [struct.Struct(f"<{count}Q") for count in range(33)]
"""What a step stores is a few; to find the form for it takes longer than to read it."""


def _named(data: bytes) -> tuple[int, ...]:
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no names of 8 bytes each")
    count = len(data) // 8
    return _FEW_NAMES[count].unpack(data) if count <= 32 else struct.unpack(f"<{count}Q", data)


def _token_bytes(values: tuple[int, ...]) -> bytes:
    """So does a prompt, the longest thing that is sent for each request."""
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except struct.error as error:
        raise ValueError(f"a token is no number of 32 bits: {error}") from None


def _tokens_of(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no tokens of 4 bytes each")
    if len(data) > 4 * SEQUENCE_LIMIT:
        raise ValueError(f"{len(data) // 4} numbers; at most {SEQUENCE_LIMIT} are allowed")
    found = struct.unpack(f"<{len(data) // 4}I", data)
    if not data[3::4].isascii():  # the highest byte of each: below 128
        _count(max(found))
    return found


# --- words: one dataclass, one message, field by field ---

W = TypeVar("W")
_Turn = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    unpack: Callable[[Any], Any]
    """From the message's value to the word's; or, where `whole`, from the message."""
    pack: Callable[[Any], Any] | None = None
    """From the word's value to the message's, or where `whole` to keyword arguments; None: they are equal."""
    whole: bool = False
    absent: bool = False
    """Whether it may be None, which is then not in the message; else what is empty is not."""


class _Shape(Generic[W]):
    """How a word lies in its message. `checks` replace the usual check of a field's values."""

    def __init__(self, word: type[W], message: Any, **checks: _Turn) -> None:
        self.word = word
        self.message = message
        hints = get_type_hints(word)
        by_name = message.DESCRIPTOR.fields_by_name
        names: tuple[str, ...] = word.__match_args__  # type: ignore[attr-defined]
        self._fields = [_field(name, hints[name], by_name, checks.get(name)) for name in names]
        # Of fewer than two names the getter gives no tuple.
        one_by_one = lambda word: [getattr(word, name) for name in names]  # noqa: E731
        self._values: Callable[[Any], Iterable[Any]] = attrgetter(*names) if len(names) > 1 else one_by_one

    def pack(self, word: W) -> Any:
        values: dict[str, Any] = {}
        for field, value in zip(self._fields, self._values(word), strict=True):
            if value is None or not (value or field.absent):
                continue
            name = field.name
            if field.pack is None:
                values[name] = value
            elif field.whole:
                values.update(field.pack(value))
            else:
                values[name] = field.pack(value)
        try:
            return self.message(**values)
        except ValueError as error:
            raise ValueError(f"{self.word.__name__}: {error}") from None

    def unpack(self, message: Any) -> W:
        values = []
        for field in self._fields:
            try:
                values.append(field.unpack(message if field.whole else getattr(message, field.name)))
            except ValueError as error:
                raise ValueError(f"{self.word.__name__}.{field.name}: {error}") from None
        return self.word(*values)


_SHAPES: dict[Any, Any] = {}
"""Shape of each word known so far; of a union of words too."""


def _shape(word: type[W], message: Any, **checks: _Turn) -> _Shape[W]:
    """Makes the shape known, so that words holding this word find it: the innermost come first."""
    _SHAPES[word] = shape = _Shape(word, message, **checks)
    return shape


def _field(name: str, hint: Any, by_name: dict[str, FieldDescriptor], check: _Turn | None) -> _Field:
    """Picks the way of one field by its type; KeyError at import when the message has no such field."""
    optional = type(None) in get_args(hint)
    if optional:
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    inner = get_args(hint)
    if inner and inner[0] in _SHAPES:  # tuple[word, ...]
        shape = _SHAPES[inner[0]]
        return _Field(
            name,
            lambda values: tuple(map(shape.unpack, values)),
            lambda words: map(shape.pack, words),
        )
    if inner and get_args(inner[0]):  # pairs (token, value): two columns
        return _pairs(name, check or _finite)
    descriptor = by_name[name]
    if inner and inner[-1] is int:  # totals by name
        return _Field(name, lambda totals: {_text(key): value for key, value in totals.items()})
    if inner:  # tuple[number or text, ...]
        if descriptor.type == FieldDescriptor.TYPE_UINT32:
            return _Field(name, _counts)
        if descriptor.type == FieldDescriptor.TYPE_BYTES:
            to, of = (_token_bytes, _tokens_of) if name == "prompt" else (_names, _named)
            return _Field(name, of, to)
        return _Field(name, lambda texts: tuple(map(_text, texts)))
    if hint in _SHAPES:
        return _nested(name, _SHAPES[hint], optional)
    turn = check or _scalar(hint, descriptor)
    if optional:

        def unpack(message: Any) -> Any:
            return turn(getattr(message, name)) if message.HasField(name) else None

        return _Field(name, unpack, lambda value: {name: value}, whole=True, absent=True)
    return _Field(name, turn)


def _nested(name: str, shape: _Shape[Any], optional: bool) -> _Field:
    def unpack(message: Any) -> Any:
        if message.HasField(name):
            return shape.unpack(getattr(message, name))
        if optional:
            return None
        raise ValueError("is missing")

    return _Field(name, unpack, lambda value: {name: shape.pack(value)}, whole=True, absent=True)


def _scalar(hint: Any, descriptor: FieldDescriptor) -> _Turn:
    kind: Any = hint.__supertype__ if isinstance(hint, NewType) else hint
    if issubclass(kind, StrEnum):
        return lambda value: kind(value)
    if kind is str:
        return _text
    if kind is float:
        return _finite
    return _count if descriptor.type == FieldDescriptor.TYPE_UINT32 else _same


def _pairs(name: str, check: Callable[[float], float]) -> _Field:
    tokens, numbers = f"{name}_tokens", f"{name}_values"

    def pack(pairs: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        return {tokens: [token for token, _ in pairs], numbers: [number for _, number in pairs]}

    def unpack(message: Any) -> tuple[tuple[int, float], ...]:
        keys, values = _counts(getattr(message, tokens)), getattr(message, numbers)
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} tokens beside {len(values)} values")
        return tuple(zip(keys, map(check, values), strict=True))

    return _Field(name, unpack, pack, whole=True)


class _Union:
    """One of several words; the message's only oneof tells which."""

    def __init__(self, message: Any, **shapes: _Shape[Any]) -> None:
        self.message = message
        self._oneof = message.DESCRIPTOR.oneofs[0].name
        self._shapes = shapes
        self._names = {shape.word: name for name, shape in shapes.items()}

    def pack(self, word: Any) -> Any:
        name = self._names[type(word)]
        return self.message(**{name: self._shapes[name].pack(word)})

    def unpack(self, message: Any) -> Any:
        name = message.WhichOneof(self._oneof)
        if name is None:
            raise ValueError(f"{self.message.DESCRIPTOR.name} is none of {', '.join(self._shapes)}")
        return self._shapes[name].unpack(getattr(message, name))


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _parse(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise Malformed(f"no {message.DESCRIPTOR.name}: {error}") from None


def _decode(shape: _Shape[W], data: bytes) -> W:
    message = _parse(shape.message, data)
    try:
        return shape.unpack(message)
    except ValueError as error:
        raise Malformed(str(error)) from None


_shape(Sampling, pb.Sampling)
_shape(Constraint, pb.Constraint, text=_constraint)
_shape(Request, pb.Request)
_shape(KvTicket, pb.KvTicket)
_shape(Holder, pb.Holder)
_shape(Usage, pb.Usage)
_TOKEN_LOGPROBS = _shape(TokenLogprobs, pb.TokenLogprobs, logprob=_logprob, top=_logprob)
_TO_WORKER = _Union(
    pb.ToWorker,
    prefill=_shape(PrefillJob, pb.PrefillJob),
    decode=_shape(DecodeJob, pb.DecodeJob),
    cancel=_shape(Cancel, pb.Cancel),
    release=_shape(Release, pb.Release),
    proceed=_shape(Proceed, pb.Proceed),
    renew=_shape(Renew, pb.Renew),
)


def encode_to_worker(message: ToWorker) -> bytes:
    return _bytes(_TO_WORKER.pack(message))


def decode_to_worker(data: bytes) -> ToWorker:
    message = _parse(pb.ToWorker, data)
    try:
        word: ToWorker = _TO_WORKER.unpack(message)
    except ValueError as error:
        name = message.WhichOneof("message")
        stream = getattr(getattr(message, name), "stream", None) if name else None
        known = stream is not None and stream < NUMBER_LIMIT
        raise Malformed(str(error), stream if known else None) from None
    return word


# --- the frame: tokens as columns ---

_STARTED = _shape(Started, pb.Started)
_SCORED = _shape(Scored, pb.Scored)
_LENT = _shape(Lent, pb.Lent)
_PREFILLED = _shape(Prefilled, pb.Prefilled)
_ENDED = _shape(Ended, pb.Ended)
_stream_of, _token_of, _logprobs_of = attrgetter("stream"), attrgetter("token"), attrgetter("logprobs")


def encode_frame(frame: Frame) -> bytes:
    tokens = frame.tokens
    try:
        message = pb.Frame(streams=map(_stream_of, tokens), tokens=map(_token_of, tokens))
    except ValueError as error:
        raise ValueError(f"Frame.tokens: {error}") from None
    if any(map(_logprobs_of, tokens)):
        message.has_logprobs.extend(token.logprobs is not None for token in tokens)
        message.logprobs.extend(_TOKEN_LOGPROBS.pack(token.logprobs) for token in tokens if token.logprobs)
    if frame.started:
        message.started.extend(map(_STARTED.pack, frame.started))
    if frame.prefilled:
        message.prefilled.extend(map(_PREFILLED.pack, frame.prefilled))
    if frame.ended:
        message.ended.extend(map(_ENDED.pack, map(_sayable, frame.ended)))
    if frame.scored:
        message.scored.extend(map(_SCORED.pack, frame.scored))
    if frame.lent:
        message.lent.extend(map(_LENT.pack, frame.lent))
    return _bytes(message)


def _sayable(ended: Ended) -> Ended:
    """The cause of a failure comes from anywhere; it is cut and cleaned rather than lost."""
    text = ended.message.encode("utf-8", "replace").decode()
    if len(text) > TEXT_LIMIT:
        text = text[: TEXT_LIMIT - 1] + "…"
    return ended if text == ended.message else structs.replace(ended, message=text)


def decode_frame(data: bytes) -> Frame:
    message = _parse(pb.Frame, data)
    try:
        return Frame(
            started=tuple(map(_STARTED.unpack, message.started)),
            prefilled=tuple(map(_PREFILLED.unpack, message.prefilled)),
            tokens=_tokens(message),
            ended=tuple(map(_ENDED.unpack, message.ended)),
            scored=tuple(map(_SCORED.unpack, message.scored)),
            lent=tuple(map(_LENT.unpack, message.lent)),
        )
    except ValueError as error:
        raise Malformed(str(error)) from None


def _tokens(message: Any) -> tuple[Token, ...]:
    streams, ids = _counts(message.streams), _counts(message.tokens)
    if len(streams) != len(ids):
        raise ValueError(f"Frame.tokens: {len(ids)} beside {len(streams)} streams")
    flags = message.has_logprobs
    if not flags and not message.logprobs:
        return tuple(map(Token, streams, ids))
    if len(flags) != len(ids) or sum(flags) != len(message.logprobs):
        raise ValueError(
            f"Frame.logprobs: {len(flags)} flags for {len(ids)} tokens, "
            f"{sum(flags)} of them set for {len(message.logprobs)} entries"
        )
    entries = map(_TOKEN_LOGPROBS.unpack, message.logprobs)
    return tuple(map(Token, streams, ids, (next(entries) if flag else None for flag in flags)))


# --- events ---

_EVENT = _Union(
    pb.KvEvent,
    stored=_shape(BlocksStored, pb.KvEvent.Stored),
    dropped=_shape(BlocksDropped, pb.KvEvent.Dropped),
    cleared=_shape(Cleared, pb.KvEvent.Cleared),
)
_SHAPES[KvEvent] = _EVENT
_TIERS = {tier.value: tier for tier in Tier}
_KV_EVENTS = _shape(KvEvents, pb.KvEvents)
_KV_SNAPSHOT = _shape(KvSnapshot, pb.KvSnapshot)
_shape(KvDigest, pb.KvDigest)
_LOAD_REPORT = _shape(LoadReport, pb.LoadReport, state=MemberState)
_shape(Dispatch, pb.Dispatch)
_shape(Settled, pb.Settled)
_shape(KeyUse, pb.KeyUse)
_ROUTER_MOVES = _shape(RouterMoves, pb.RouterMoves)


def encode_kv_events(events: KvEvents) -> bytes:
    return _bytes(_KV_EVENTS.pack(events))


def decode_kv_events(data: bytes) -> KvEvents:
    """A hot path too, so without the walk over fields."""
    message = _parse(pb.KvEvents, data)
    try:
        return KvEvents(
            WorkerId(_text(message.worker)),
            Incarnation(_text(message.incarnation)),
            message.sequence,
            tuple(map(_kv_event, message.events)),
        )
    except ValueError as error:
        raise Malformed(f"KvEvents: {error}") from None


def _kv_event(message: Any) -> KvEvent:
    kind = message.WhichOneof("event")
    if kind == "cleared":
        return Cleared()
    if kind is None:
        raise ValueError("KvEvent is none of stored, dropped, cleared")
    word, said = (BlocksStored, message.stored) if kind == "stored" else (BlocksDropped, message.dropped)
    tier = _TIERS.get(said.tier)
    if tier is None:
        raise ValueError(f"{said.tier!r} is no tier")
    return word(_named(said.hashes), tier)


def encode_kv_snapshot(snapshot: KvSnapshot) -> bytes:
    return _bytes(_KV_SNAPSHOT.pack(snapshot))


def decode_kv_snapshot(data: bytes) -> KvSnapshot:
    return _decode(_KV_SNAPSHOT, data)


def encode_snapshot_request(part: int) -> bytes:
    return _bytes(pb.SnapshotRequest(part=part))


def decode_snapshot_request(data: bytes) -> int:
    part = int(_parse(pb.SnapshotRequest, data).part)
    if part >= NUMBER_LIMIT:
        raise Malformed(f"SnapshotRequest.part: {part} is not below {NUMBER_LIMIT}")
    return part


def encode_load_report(report: LoadReport) -> bytes:
    return _bytes(_LOAD_REPORT.pack(report))


def decode_load_report(data: bytes) -> LoadReport:
    return _decode(_LOAD_REPORT, data)


def encode_router_moves(moves: RouterMoves) -> bytes:
    return _bytes(_ROUTER_MOVES.pack(moves))


def decode_router_moves(data: bytes) -> RouterMoves:
    return _decode(_ROUTER_MOVES, data)


def _limit_s(message: Any) -> float:
    limit_s = float(message.limit_s)
    if not 0 <= limit_s < math.inf:
        raise Malformed(f"{message.DESCRIPTOR.name}.limit_s: {limit_s} is no number of seconds")
    return limit_s


def _state(message: Any) -> MemberState:
    try:
        return MemberState(message.state)
    except ValueError as error:
        raise Malformed(f"{message.DESCRIPTOR.name}.state: {error}") from None


def encode_drain_request(limit_s: float) -> bytes:
    return _bytes(pb.DrainRequest(limit_s=limit_s))


def decode_drain_request(data: bytes) -> float:
    return _limit_s(_parse(pb.DrainRequest, data))


def encode_drain_reply(state: MemberState) -> bytes:
    return _bytes(pb.DrainReply(state=state))


def decode_drain_reply(data: bytes) -> MemberState:
    return _state(_parse(pb.DrainReply, data))


def encode_take_role_request(role: Role, limit_s: float) -> bytes:
    return _bytes(pb.TakeRoleRequest(role=role, limit_s=limit_s))


def decode_take_role_request(data: bytes) -> tuple[Role, float]:
    message = _parse(pb.TakeRoleRequest, data)
    try:
        role = Role(message.role)
    except ValueError as error:
        raise Malformed(f"TakeRoleRequest.role: {error}") from None
    return role, _limit_s(message)


def encode_take_role_reply(state: MemberState) -> bytes:
    return _bytes(pb.TakeRoleReply(state=state))


def decode_take_role_reply(data: bytes) -> MemberState:
    return _state(_parse(pb.TakeRoleReply, data))
