"""Every word survives the wire unchanged; bytes that are no word raise `Malformed` and nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from fleet.events import (
    BlocksDropped,
    BlocksStored,
    Cleared,
    Dispatch,
    KeyUse,
    KvDigest,
    KvEvents,
    KvSnapshot,
    LoadReport,
    RouterMoves,
    Settled,
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
from fleet.ids import Incarnation, LeaseId, RequestId, WorkerId
from fleet.member import MemberState, Role
from fleet.request import Constraint, ConstraintKind, FinishReason, Request, Sampling, TokenLogprobs, Usage
from fleet.wire import codec
from fleet.wire.codec import NUMBER_LIMIT, SEQUENCE_LIMIT, TEXT_LIMIT, Malformed
from fleet.wire.v1 import worker_pb2 as pb

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

COUNT = st.integers(0, NUMBER_LIMIT - 1)
TOTAL = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=40)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPROB = FINITE | st.just(-math.inf)
COUNTS = st.lists(COUNT, max_size=40).map(tuple)
NAMES = st.lists(TOTAL, max_size=40).map(tuple)


def pairs(values: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[tuple[int, float], ...]]:
    return st.lists(st.tuples(COUNT, values), max_size=8).map(tuple)


def tuples(words: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(words, max_size=6).map(tuple)


# Every field is drawn, so that a field which a message lacks is a failure here. Ids are text.
for kind in (RequestId, WorkerId, Incarnation, LeaseId):
    st.register_type_strategy(kind, TEXT)

SAMPLING = st.builds(
    Sampling,
    max_tokens=COUNT,
    min_tokens=COUNT,
    temperature=FINITE,
    top_p=FINITE,
    top_k=COUNT,
    min_p=FINITE,
    seed=TOTAL,
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    repetition_penalty=FINITE,
    logit_bias=pairs(FINITE),
    stop_token_ids=COUNTS,
    ignore_eos=st.booleans(),
    logprobs=st.integers(-1, 100),
    prompt_logprobs=st.integers(-1, 100),
)
REQUEST = st.builds(
    Request,
    id=TEXT,
    model=TEXT,
    prompt=COUNTS,
    sampling=SAMPLING,
    salt=TEXT,
    adapter=TEXT,
    priority=st.integers(-(2**31), 2**31 - 1),
    deadline_s=FINITE,
    constraint=st.none() | st.builds(Constraint, st.sampled_from(ConstraintKind), TEXT),
)
TICKET = st.builds(
    KvTicket,
    worker=TEXT,
    incarnation=TEXT,
    address=TEXT,
    lease=TEXT,
    fingerprint=TEXT,
    tokens=COUNT,
    lease_s=FINITE,
)
HOLDER = st.builds(Holder, TEXT, TEXT, TEXT, TEXT, COUNT, FINITE)
LOGPROBS = st.builds(TokenLogprobs, logprob=LOGPROB, top=pairs(LOGPROB))
FINISH = st.sampled_from(FinishReason)
TO_WORKER = st.one_of(
    st.builds(PrefillJob, COUNT, REQUEST, st.booleans(), st.none() | HOLDER),
    st.builds(DecodeJob, COUNT, REQUEST, COUNTS, st.none() | TICKET, st.none() | HOLDER),
    st.from_type(Cancel).map(
        lambda cancel: structs.replace(cancel, stream=abs(cancel.stream) % NUMBER_LIMIT)
    ),
    st.builds(Release, TEXT),
    st.builds(Proceed, COUNT, COUNTS),
    st.builds(Renew, TEXT),
)
USAGE = st.builds(Usage, COUNT, COUNT, COUNT)
FRAME = st.builds(
    Frame,
    tuples(st.builds(Started, COUNT, TEXT)),
    tuples(
        st.builds(
            Prefilled, COUNT, COUNT, st.none() | LOGPROBS, st.none() | TICKET, COUNT, st.none() | FINISH
        )
    ),
    tuples(st.builds(Token, COUNT, COUNT, st.none() | LOGPROBS)) | tuples(st.builds(Token, COUNT, COUNT)),
    tuples(st.builds(Ended, COUNT, FINISH, st.none() | USAGE, TEXT, TEXT, FINITE)),
    tuples(st.builds(Scored, COUNT, COUNT, tuples(LOGPROBS))),
    tuples(st.builds(Lent, COUNT, TICKET)),
)
EVENT = st.one_of(st.from_type(BlocksStored), st.from_type(BlocksDropped), st.just(Cleared())).map(
    lambda event: event if isinstance(event, Cleared) else structs.replace(event, hashes=(0, 5, 2**64 - 1))
)
EVENTS = st.builds(KvEvents, TEXT, TEXT, TOTAL, tuples(EVENT))
SNAPSHOT = st.builds(KvSnapshot, TEXT, TEXT, TOTAL, NAMES, NAMES, NAMES, COUNT, COUNT)
LOAD = st.builds(
    LoadReport,
    worker=TEXT,
    incarnation=TEXT,
    state=st.sampled_from(MemberState),
    running=COUNT,
    waiting=COUNT,
    queued_tokens=TOTAL,
    blocks_total=TOTAL,
    blocks_free=TOTAL,
    kv=st.builds(KvDigest, TOTAL, TOTAL, TOTAL),
    prefill_tokens_s=st.none() | FINITE,
    decode_step_s=st.none() | FINITE,
    decode_batch=st.none() | FINITE,
    pull_bytes_s=st.none() | FINITE,
    streams=st.lists(TEXT, max_size=4).map(tuple),
    counters=st.dictionaries(TEXT, TOTAL, max_size=4),
    stalled_s=FINITE,
)
MOVES = st.builds(
    RouterMoves,
    TEXT,
    TEXT,
    TOTAL,
    st.booleans(),
    tuples(st.builds(Dispatch, TEXT, TEXT, TEXT, COUNT, COUNT)),
    tuples(st.builds(Settled, TEXT, TEXT)),
    tuples(st.builds(KeyUse, TEXT, TOTAL, TOTAL, TOTAL)),
)

DECODERS: dict[str, Callable[[bytes], Any]] = {
    name: getattr(codec, name) for name in dir(codec) if name.startswith("decode_")
}


@FEW
@given(TO_WORKER)
def test_messages_to_a_worker_come_back_unchanged(message: ToWorker) -> None:
    assert codec.decode_to_worker(codec.encode_to_worker(message)) == message


@FEW
@given(FRAME)
def test_frames_come_back_unchanged(frame: Frame) -> None:
    back = codec.decode_frame(codec.encode_frame(frame))
    assert back == frame
    assert [hash(token) for token in back.tokens] == [hash(token) for token in frame.tokens]


@FEW
@given(EVENTS, SNAPSHOT, LOAD)
def test_events_come_back_unchanged(events: KvEvents, snapshot: KvSnapshot, load: LoadReport) -> None:
    assert codec.decode_kv_events(codec.encode_kv_events(events)) == events
    assert codec.decode_kv_snapshot(codec.encode_kv_snapshot(snapshot)) == snapshot
    assert codec.decode_load_report(codec.encode_load_report(load)) == load


@FEW
@given(MOVES)
def test_what_a_router_tells_others_comes_back_unchanged(moves: RouterMoves) -> None:
    assert codec.decode_router_moves(codec.encode_router_moves(moves)) == moves


@FEW
@given(st.floats(0, 1e6), st.sampled_from(MemberState))
def test_drain_comes_back_unchanged(limit_s: float, state: MemberState) -> None:
    assert codec.decode_drain_request(codec.encode_drain_request(limit_s)) == limit_s
    assert codec.decode_drain_reply(codec.encode_drain_reply(state)) == state


@FEW
@given(st.sampled_from(Role), st.floats(0, 1e6), st.sampled_from(MemberState))
def test_a_change_of_role_comes_back_unchanged(role: Role, limit_s: float, state: MemberState) -> None:
    asked = codec.encode_take_role_request(role, limit_s)
    assert codec.decode_take_role_request(asked) == (role, limit_s)
    assert codec.decode_take_role_reply(codec.encode_take_role_reply(state)) == state


@FEW
@given(COUNT)
def test_the_part_asked_for_comes_back_unchanged(part: int) -> None:
    assert codec.decode_snapshot_request(codec.encode_snapshot_request(part)) == part


def test_events_that_are_none_name_what_is_wrong() -> None:
    odd = pb.KvEvent(stored=pb.KvEvent.Stored(hashes=b"1234567", tier="device"))
    with pytest.raises(Malformed, match="7 bytes are no names of 8 bytes each"):
        codec.decode_kv_events(pb.KvEvents(events=[odd]).SerializeToString())
    tape = pb.KvEvent(dropped=pb.KvEvent.Dropped(tier="tape"))
    with pytest.raises(Malformed, match="'tape' is no tier"):
        codec.decode_kv_events(pb.KvEvents(events=[tape]).SerializeToString())
    with pytest.raises(Malformed, match="none of stored, dropped, cleared"):
        codec.decode_kv_events(pb.KvEvents(events=[pb.KvEvent()]).SerializeToString())
    with pytest.raises(Malformed, match=r"KvSnapshot\.host: 3 bytes"):
        codec.decode_kv_snapshot(pb.KvSnapshot(host=b"123").SerializeToString())
    with pytest.raises(ValueError, match="no number of 64 bits"):
        codec.encode_kv_snapshot(KvSnapshot(WorkerId("w"), Incarnation("i"), 0, (1 << 64,)))


def test_strategies_draw_every_field() -> None:
    """A field added to a word and forgotten above would not be tested."""
    drawn: dict[Any, int] = {
        Sampling: 15,
        Request: 9,
        KvTicket: 7,
        PrefillJob: 4,
        DecodeJob: 5,
        Started: 2,
        Prefilled: 6,
    }
    drawn |= {Token: 3, Ended: 6, Usage: 3, TokenLogprobs: 2, Frame: 6, Scored: 3, KvEvents: 4, KvSnapshot: 8}
    drawn |= {Lent: 2, Proceed: 2, Renew: 1, Holder: 6}
    drawn |= {RouterMoves: 7, Dispatch: 5, Settled: 2, KeyUse: 4}
    drawn |= {KvDigest: 3, LoadReport: 16, Constraint: 2}
    assert {word: len(word.__match_args__) for word in drawn} == drawn


def test_unknown_is_not_zero() -> None:
    """A figure nobody measured stays None; a measured zero stays zero."""
    report = LoadReport(
        WorkerId("w"), Incarnation("i"), "ready", 0, 0, 0, 0, 0, KvDigest(0, 0, 0), prefill_tokens_s=0.0
    )
    back = codec.decode_load_report(codec.encode_load_report(report))
    assert back.prefill_tokens_s == 0.0
    assert back.decode_step_s is None


def test_an_empty_frame_is_no_bytes_and_no_message_to_a_worker() -> None:
    """Empty bytes are the heartbeat of a session."""
    assert codec.encode_frame(Frame()) == b""
    with pytest.raises(Malformed, match=r"ToWorker is none of prefill, .*, proceed, renew"):
        codec.decode_to_worker(b"")


@FEW
@given(st.binary(max_size=200))
def test_random_bytes_raise_malformed_or_are_a_word(data: bytes) -> None:
    for decode in DECODERS.values():
        with suppress(Malformed):
            decode(data)


@FEW
@given(st.one_of(TO_WORKER, FRAME, LOAD, EVENTS), st.data())
def test_damaged_bytes_raise_malformed_or_are_a_word(word: Any, data: st.DataObject) -> None:
    ways: dict[type, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
        Frame: (codec.encode_frame, codec.decode_frame),
        LoadReport: (codec.encode_load_report, codec.decode_load_report),
        KvEvents: (codec.encode_kv_events, codec.decode_kv_events),
    }
    encode, decode = ways.get(type(word), (codec.encode_to_worker, codec.decode_to_worker))
    damaged = bytearray(encode(word))
    if not damaged:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed):
        decode(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


SAMPLE = Request(RequestId("r"), "m", (1, 2), Sampling(max_tokens=4))


def job(**changes: Any) -> bytes:
    """A prefill job on stream 9, with fields of its message changed behind the codec's back."""
    message = pb.ToWorker.FromString(codec.encode_to_worker(PrefillJob(9, SAMPLE)))
    for name, value in changes.items():
        target = message.prefill.request
        *path, last = name.split("__")
        for step in path:
            target = getattr(target, step)
        if isinstance(value, list):
            getattr(target, last).extend(value)
        else:
            setattr(target, last, value)
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (job(prompt=struct.pack("<2I", 1, NUMBER_LIMIT)), f"Request.prompt: {NUMBER_LIMIT} is not below"),
        (job(prompt=b"12345"), "Request.prompt: 5 bytes are no tokens of 4 bytes each"),
        (job(deadline_s=math.nan), "Request.deadline_s: nan is not a finite number"),
        (job(sampling__temperature=math.inf), "Sampling.temperature: inf is not a finite number"),
        (job(sampling__max_tokens=2**32 - 1), "Sampling.max_tokens"),
        (job(sampling__logit_bias_tokens=[1, 2]), "Sampling.logit_bias: 2 tokens beside 0 values"),
        (job(salt="x" * (TEXT_LIMIT + 1)), "Request.salt: 4097 characters; at most 4096"),
        (job(prompt=bytes(4 * SEQUENCE_LIMIT + 8)), "Request.prompt: 1048578 numbers; at most 1048576"),
        (
            pb.ToWorker(cancel=pb.Cancel(stream=9, reason="bored")).SerializeToString(),
            "Cancel.reason: 'bored' is not a valid CancelReason",
        ),
        (
            pb.ToWorker(prefill=pb.PrefillJob(stream=9)).SerializeToString(),
            "PrefillJob.request: is missing",
        ),
    ],
)
def test_a_bad_message_names_its_field_and_its_stream(data: bytes, wrong: str) -> None:
    with pytest.raises(Malformed) as caught:
        codec.decode_to_worker(data)
    assert wrong in str(caught.value)
    assert caught.value.stream == 9


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (pb.Frame(streams=[1, 2], tokens=[3]), "Frame.tokens: 1 beside 2 streams"),
        (pb.Frame(streams=[2**31], tokens=[3]), "is not below"),
        (pb.Frame(streams=[1], tokens=[3], has_logprobs=[True]), "1 of them set for 0 entries"),
        (
            pb.Frame(
                streams=[1], tokens=[3], has_logprobs=[True], logprobs=[pb.TokenLogprobs(logprob=math.nan)]
            ),
            "TokenLogprobs.logprob: nan is not a log-probability",
        ),
        (pb.Frame(ended=[pb.Ended(stream=1, finish="tired")]), "Ended.finish: 'tired'"),
    ],
)
def test_a_bad_frame_names_its_field(message: Any, wrong: str) -> None:
    with pytest.raises(Malformed) as caught:
        codec.decode_frame(message.SerializeToString())
    assert wrong in str(caught.value)


def test_a_number_that_does_not_fit_names_its_word() -> None:
    with pytest.raises(ValueError, match="KvTicket"):
        codec.encode_to_worker(
            DecodeJob(1, SAMPLE, ticket=KvTicket(WorkerId(""), Incarnation(""), "", LeaseId(""), "", -1, 1.0))
        )
    with pytest.raises(ValueError, match=r"Frame\.tokens"):
        codec.encode_frame(Frame(tokens=(Token(1, -1),)))


def test_the_text_of_a_failure_is_cut_never_refused() -> None:
    long = Frame(ended=(Ended(1, FinishReason.FAILED, error="Internal", message="x" * 9000 + "\udcff"),))
    (ended,) = codec.decode_frame(codec.encode_frame(long)).ended
    assert ended.message == "x" * (TEXT_LIMIT - 1) + "…"
