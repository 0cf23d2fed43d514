"""Cards, reports, and a worker that does as a script says: the far side of the router's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from fleet.block_hash import HashKeys, block_hashes, short
from fleet.errors import Overloaded
from fleet.events import BlocksStored, KvDigest, KvEvents, KvSnapshot, LoadReport
from fleet.handoff import (
    Cancel,
    DecodeJob,
    Ended,
    Frame,
    KvTicket,
    Lent,
    Prefilled,
    PrefillJob,
    Proceed,
    Release,
    Started,
    Token,
    ToWorker,
)
from fleet.ids import Incarnation, LeaseId, RequestId, WorkerId
from fleet.kv_layout import Fingerprint
from fleet.kv_log import KvLog
from fleet.member import MemberState, Role, WorkerCard
from fleet.request import FinishReason, Request, Sampling, Usage
from fleet.wire import WorkerEnd

PRINT = Fingerprint("weights", "tokens", layers=2, kv_heads=2, head_dim=8, block_size=16, dtype="float32")


def card(
    id: str,
    role: Role = Role.DECODE,
    *,
    life: str = "1",
    state: MemberState = MemberState.READY,
    model: str = "m",
    fingerprint: Fingerprint = PRINT,
    max_tokens: int = 4096,
    blocks: int = 1024,
) -> WorkerCard:
    return WorkerCard(
        id=WorkerId(id),
        incarnation=Incarnation(f"{id}.{life}"),
        role=role,
        state=state,
        address=f"{id}.{life}",
        sessions=f"{id}.{life}",
        transfer=f"loop:{id}",
        model=model,
        fingerprint=fingerprint,
        blocks=blocks,
        max_tokens=max_tokens,
        version="0",
        pid=1,
        host="here",
    )


def report(of: WorkerCard, **figures: object) -> LoadReport:
    base = LoadReport(
        worker=of.id,
        incarnation=of.incarnation,
        state=MemberState.READY,
        running=0,
        waiting=0,
        queued_tokens=0,
        blocks_total=of.blocks,
        blocks_free=of.blocks,
        kv=KvDigest(0, 0, 0),
        prefill_tokens_s=10_000.0,
        decode_step_s=0.01,
        decode_batch=8.0,
        pull_bytes_s=1e9,
    )
    return replace(base, **figures)  # type: ignore[arg-type]


def request(id: str = "r", prompt: int = 100, max_tokens: int = 8, **fields: object) -> Request:
    sampling = fields.pop("sampling", Sampling(max_tokens=max_tokens))
    base = Request(RequestId(id), "m", tuple(range(prompt)), sampling)  # type: ignore[arg-type]
    return replace(base, **fields)  # type: ignore[arg-type]


def answer(n: int) -> int:
    """Token at position `n` of every answer, whoever computes it."""
    return 1000 + n


@dataclass(slots=True)
class Script:
    """What a worker does; times in seconds."""

    prefill_s: float = 0.05
    step_s: float = 0.01
    refuse: bool = False
    """Every job ends at once, Overloaded."""
    die_at: int | None = None
    """The process is gone just before the token of this position."""
    hang_at: int | None = None
    """Nothing more is said of a stream from this position on, while the session lives."""
    fail_at: int | None = None
    """The stream ends FAILED there."""
    error: str = "Internal"
    lose_end: bool = False
    """Dies after the last token, before `Ended`."""
    finish_with_first: FinishReason | None = None
    lease_s: float = 30.0
    keep: bool = True
    """False: a prefill that keeps no KV."""
    lend: bool = False
    """Says `Lent` in the middle of the prompt."""
    die_lending: bool = False
    """The process is gone after that."""
    lend_anew: bool = False
    """What it said there does not stand until the end: the whole is under another lease."""
    early_error: str = ""
    """Jobs whose prompt is still being computed end at once with this error."""
    queued_tokens: int = 0
    """Prompt tokens that its load reports tell of."""


class ScriptedWorker:
    """A real `WorkerService`, whose answers do not depend on who gives them. Caches every prompt it saw."""

    def __init__(self, of: WorkerCard, script: Script | None = None) -> None:
        self.card = of
        self.script = script or Script()
        self.kv = KvLog(of.id, of.incarnation)
        self.cached: set[int] = set()
        self.publish: Callable[[KvEvents], None] = lambda events: None
        self.die: Callable[[], None] = lambda: None
        self.answers = True
        """False: calls beside the path are never answered."""
        self.jobs: list[PrefillJob | DecodeJob] = []
        self.cancels: list[Cancel] = []
        self.proceeds: dict[tuple[int, int], asyncio.Future[tuple[int, ...]]] = {}
        self.releases: list[LeaseId] = []
        self.leases: dict[LeaseId, RequestId] = {}
        self.running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.ids: dict[tuple[int, int], RequestId] = {}
        self.state = MemberState.READY
        self.snapshots = 0

    # -- WorkerService

    def opened(self, end: WorkerEnd) -> None: ...

    def received(self, end: WorkerEnd, message: ToWorker) -> None:
        match message:
            case PrefillJob() | DecodeJob():
                self.jobs.append(message)
                key = (id(end), message.stream)
                self.ids[key] = message.request.id
                self.proceeds[key] = asyncio.get_running_loop().create_future()
                work = self._prefill if isinstance(message, PrefillJob) else self._decode
                task = asyncio.get_running_loop().create_task(work(end, message))  # type: ignore[arg-type]
                self.running[key] = task
                task.add_done_callback(lambda _: (self.running.pop(key, None), self.ids.pop(key, None)))
            case Cancel():
                self.cancels.append(message)
                if (task := self.running.get((id(end), message.stream))) is not None and task.cancel():
                    end.send(Frame(ended=(Ended(message.stream, FinishReason.CANCELLED),)))
            case Proceed(stream, generated):
                self.proceeds[id(end), stream].set_result(generated)
            case Release(lease):
                self.releases.append(lease)
                self.leases.pop(lease, None)

    def closed(self, end: WorkerEnd) -> None:
        for (of, _), task in list(self.running.items()):
            if of == id(end):
                task.cancel()

    def snapshot(self, part: int = 0) -> KvSnapshot:
        self.snapshots += 1
        return self.kv.snapshot(part)

    def status(self) -> LoadReport:
        streams = tuple(dict.fromkeys(self.ids.values()))
        return report(
            self.card,
            state=self.state,
            running=len(self.running),
            queued_tokens=self.script.queued_tokens,
            streams=streams,
            kv=self.kv.digest(),
        )

    async def drain(self, limit_s: float) -> MemberState:
        self.state = MemberState.DRAINING
        return self.state

    # -- the script

    async def _prefill(self, end: WorkerEnd, job: PrefillJob) -> None:
        script = self.script
        if self._refused(end, job.stream):
            return
        end.send(Frame(started=(Started(job.stream, "prefill_started"),)))
        lends = script.lend and job.lend
        await asyncio.sleep(script.prefill_s / 2 if lends else script.prefill_s)
        lease = LeaseId(f"{self.card.id}/{job.request.id}/{job.stream}")
        kv = KvTicket(
            worker=self.card.id,
            incarnation=self.card.incarnation,
            address=self.card.transfer,
            lease=lease,
            fingerprint=self.card.fingerprint.digest(),
            tokens=len(job.request.prompt),
            lease_s=script.lease_s,
        )
        if lends:
            end.send(Frame(lent=(Lent(job.stream, kv),)))
            await asyncio.sleep(script.prefill_s / 2)
            if script.die_lending:
                self.die()
                return
            if script.lend_anew:
                kv = replace(kv, lease=LeaseId(f"{kv.lease}/anew"))
        if not await self._alive(end, job.stream, 0):
            return
        self.store(job.request)
        finish = script.finish_with_first
        ticket = None
        if finish is None and script.keep:
            self.leases[kv.lease] = job.request.id
            ticket = kv
        end.send(Frame(prefilled=(Prefilled(job.stream, answer(0), None, ticket, 0, finish),)))

    async def _decode(self, end: WorkerEnd, job: DecodeJob) -> None:
        if self._refused(end, job.stream):
            return
        if job.ticket is None:
            end.send(Frame(started=(Started(job.stream, "prefill_started"),)))
            await asyncio.sleep(self.script.prefill_s)
        else:
            end.send(Frame(started=(Started(job.stream, "pull_started"), Started(job.stream, "pull_ended"))))
        generated = job.generated
        if job.ticket is not None and not generated:
            if error := self.script.early_error:
                failed = Ended(job.stream, FinishReason.FAILED, error=error, message="not early")
                end.send(Frame(ended=(failed,)))
                return
            generated = await self.proceeds[id(end), job.stream]
        self.store(job.request)
        position, most = len(generated), job.request.sampling.max_tokens
        assert generated == tuple(answer(n) for n in range(position)), "tokens were lost or repeated"
        while position < most:
            await asyncio.sleep(self.script.step_s)
            if not await self._alive(end, job.stream, position):
                return
            end.send(Frame(tokens=(Token(job.stream, answer(position)),)))
            position += 1
        if self.script.lose_end:
            await asyncio.sleep(self.script.step_s)
            self.die()
            return
        usage = Usage(len(job.request.prompt), position, 0)
        end.send(Frame(ended=(Ended(job.stream, FinishReason.LENGTH, usage),)))

    def _refused(self, end: WorkerEnd, stream: int) -> bool:
        if self.script.refuse:
            name, why = Overloaded.__name__, "queue is full"
            end.send(Frame(ended=(Ended(stream, FinishReason.FAILED, None, name, why, retry_after_s=7.0),)))
        return self.script.refuse

    async def _alive(self, end: WorkerEnd, stream: int, position: int) -> bool:
        script = self.script
        if position == script.die_at:
            self.die()
            return False
        if position == script.hang_at:
            await asyncio.get_running_loop().create_future()
        if position == script.fail_at:
            failed = Ended(stream, FinishReason.FAILED, error=script.error, message="as the script says")
            end.send(Frame(ended=(failed,)))
            return False
        return True

    def store(self, of: Request) -> None:
        fingerprint = self.card.fingerprint
        keys = HashKeys(fingerprint.digest(), fingerprint.block_size, of.adapter, of.salt)
        names = [short(name) for name in block_hashes(of.prompt, keys)]
        new = tuple(name for name in names if name not in self.cached)
        self.cached.update(new)
        if new and (events := self.kv.record([BlocksStored(new)])) is not None:
            self.publish(events)
