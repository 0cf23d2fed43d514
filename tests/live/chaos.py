"""Load on a fleet of processes while random ones are killed, frozen, drained: every answer is compared.

`Chaos.run` does it all; `tests/live/test_chaos.py` is a small share of it, `benchmarks/soak.py` the rest.
Faults, prompts and leaving clients are drawn from one seed. How they interleave with the fleet's own timing
is the machine's business: a seed names an experiment, not a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from processes import Fleet, Process, Watcher, all_up, until

from engine.latency_runner import reference_tokens
from fleet.errors import FleetError
from fleet.member import MemberState, Role
from fleet.request import Sampling

WORDS = ("river", "stone", "cloud", "paper", "engine", "garden", "letter", "winter", "market", "bridge")


@dataclass(frozen=True, slots=True)
class Question:
    number: int
    body: dict[str, Any]
    leaves_after: int | None
    """Pieces of text after which the client closes its socket; None: it stays."""

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


class Oracle(Protocol):
    """Asks, and knows the answer that an undisturbed fleet gives."""

    def question(self, number: int) -> dict[str, Any]: ...

    def answer(self, number: int) -> str: ...


class LatencyOracle:
    """The latency model's text is a function of prompt, seed and length, computed here a second time."""

    def __init__(self, seed: int, tokens: int, prompt_words: int = 60) -> None:
        self._seed = seed
        self._tokens = tokens
        self._words = prompt_words

    def question(self, number: int) -> dict[str, Any]:
        chance = random.Random(f"{self._seed}/{number}")
        # A third begins like others, so that prefixes are found, matched and pulled in part.
        shared = [*WORDS * 3] if number % 3 == 0 else []
        words = shared + [chance.choice(WORDS) for _ in range(chance.randrange(1, self._words))]
        drawn = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
        return {
            "model": "latency",
            "prompt": " ".join(words),
            "max_tokens": chance.randrange(1, self._tokens + 1),
            "ignore_eos": True,
            **drawn,
        }

    def answer(self, number: int, tokens: int | None = None) -> str:
        """`tokens`: of another length than it would be asked for."""
        body = self.question(number)
        length = tokens or body["max_tokens"]
        sampling = Sampling(length, temperature=body["temperature"], seed=body.get("seed", 0))
        return bytes(reference_tokens(list(body["prompt"].encode()), sampling)).decode()


class CalmOracle:
    """A real model's answers, each asked for once before anything is disturbed. `learn` first."""

    def __init__(self, model: str, tokens: int, kinds: int, prompt_words: int = 0) -> None:
        """`prompt_words` more than those of the bare question, which are about 20 tokens."""
        self._model = model
        self._tokens = tokens
        self._kinds = kinds
        self._words = prompt_words
        self._known: dict[int, str] = {}

    def question(self, number: int) -> dict[str, Any]:
        kind = number % self._kinds
        drawn = {"temperature": 0} if kind % 2 else {"temperature": 0.8, "seed": kind}
        # The number comes first: no two kinds have a block in common.
        more = "".join(f"{WORDS[(kind * 7 + word * word) % len(WORDS)]} " for word in range(self._words))
        more = f"{kind}: {more}" if more else ""
        return {
            "model": self._model,
            "prompt": f"{more}List {kind + 3} facts about the number {kind}, the river and the stone:",
            "max_tokens": self._tokens,
            "ignore_eos": True,
            **drawn,
        }

    def answer(self, number: int) -> str:
        return self._known[number % self._kinds]

    async def learn(self, address: tuple[str, int]) -> None:
        for kind in range(self._kinds):
            heard = await ask(address, Question(kind, self.question(kind), None))
            assert heard.outcome == "whole", heard.told
            self._known[kind] = heard.text


@dataclass(slots=True)
class Heard:
    """One attempt at one question."""

    outcome: str = "cut"
    """whole, left, refused (or nobody there; may be asked again), failed, or cut: the connection ended."""
    text: str = ""
    told: str = ""
    """The error, as the fleet told it."""
    longest_gap_s: float = 0.0
    """Between two pieces of text, or before the first."""


async def ask(
    address: tuple[str, int], question: Question, spoken: Callable[[], None] = lambda: None
) -> Heard:
    """Never raises for what the other side does; waits for ever, as a client without limits would. `spoken`
    is called at each piece of a streamed answer."""
    heard = Heard()
    data = json.dumps(question.body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    except OSError as error:
        heard.outcome, heard.told = "refused", str(error)
        return heard
    try:
        writer.write(head.encode() + data)
        status = (await reader.readline()).split()
        while (await reader.readline()).strip():
            pass
        if len(status) < 2:
            return heard
        if status[1] != b"200":
            heard.told = (await reader.read()).decode(errors="replace")
            heard.outcome = "refused" if status[1] in (b"429", b"503") else "failed"
        elif question.streamed:
            await _follow(reader, question, heard, spoken)
        else:
            choice = json.loads(await reader.read())["choices"][0]
            heard.text, heard.outcome = choice["text"], "whole"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        heard.told = heard.told or f"{type(error).__name__}: {error}"
    finally:
        writer.transport.abort()
    return heard


async def _follow(
    reader: asyncio.StreamReader, question: Question, heard: Heard, spoken: Callable[[], None]
) -> None:
    clock = asyncio.get_running_loop().time
    last, pieces, finish = clock(), 0, ""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            heard.outcome = "whole" if finish else "failed"
            return
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            heard.outcome, heard.told = "failed", json.dumps(event["error"])
            return
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
            if text := choice.get("text"):
                now = clock()
                heard.longest_gap_s, last = max(heard.longest_gap_s, now - last), now
                heard.text += text
                pieces += 1
                spoken()
        if question.leaves_after is not None and pieces >= question.leaves_after:
            heard.outcome = "left"
            return


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    """kill, freeze, drain (SIGTERM, and soon back), scale (the same, for longer), turn (another role, and
    back), empty (killed, and all its data lost)."""
    victim: str
    seconds: float
    """For which it is away, or frozen."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """How often what happens to whom. Victims in `spared` are frozen, never ended."""

    every_s: float = 4.0
    """Between two faults, on average; 0: none."""
    freeze_s: float = 8.0
    """Longest freeze."""
    away_s: float = 2.0
    """Longest pause between an end and the next start."""
    scale_s: float = 30.0
    """Longest time for which a fleet that was scaled down is one worker smaller."""
    spared: frozenset[str] = frozenset()
    worker_faults: tuple[str, ...] = ("kill", "kill", "freeze", "drain")
    server_faults: bool = True
    """Whether etcd and NATS are among the victims."""
    most: int = 0
    """Faults in all; 0: as long as requests come. On a machine on which a worker needs longer to start than
    faults are apart, requests would else never have one to end at."""

    def draw(self, chance: random.Random, fleet: Fleet) -> Fault:
        routers = [name for name in fleet.http if name not in self.spared]
        others = (["etcd", "nats"] if self.server_faults else []) + routers
        victim = chance.choice(others if others and chance.random() < 0.3 else fleet.workers())
        kinds = {"etcd": ("kill", "freeze", "empty"), "nats": ("kill", "freeze")}.get(
            victim, ("kill", "freeze") if victim in fleet.http else self.worker_faults
        )
        kind = "freeze" if victim in self.spared else chance.choice(kinds)
        longest = {"freeze": self.freeze_s, "scale": self.scale_s, "turn": self.scale_s}.get(
            kind, self.away_s
        )
        return Fault(kind, victim, chance.uniform(0.05, longest))


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    """In all; 0: as many as come in `seconds`."""
    seconds: float
    rate: float
    """Requests a second, at random moments."""
    most: int = 256
    """Under way at once; the next ones wait."""
    leaving: float = 0.05
    """Share of the streaming clients that close their socket in the middle."""
    limit_s: float = 120.0
    """After which a request that has not ended hangs."""


@dataclass
class Result:
    """What is printed. A run is good when `wrong` is empty; its entries say what, where and why."""

    seed: int
    ended: int = 0
    left: int = 0
    asked_again: int = 0
    """Attempts that a lost router cut, or that were refused before a word: asked again, as clients do."""
    moved: int = 0
    """Times a router went on with a request at another worker, by its log."""
    recomputed: int = 0
    """Hand-offs whose KV did not come, so that a worker computed the prompt; of the lives that were seen."""
    pulls: int = 0
    longest_gap_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("seed", "ended", "left", "asked_again", "moved")}
        return {
            **shown,
            "pulls": self.pulls,
            "recomputed": self.recomputed,
            "longest_gap_s": round(self.longest_gap_s, 3),
            "faults": dict(sorted(self.faults.items())),
            "wrong": len(self.wrong),
        }


class Chaos:
    def __init__(
        self, fleet: Fleet, watcher: Watcher, oracle: Oracle, load: Load, trouble: Trouble, seed: int
    ) -> None:
        self.fleet = fleet
        self.watcher = watcher
        self.oracle = oracle
        self.load = load
        self.trouble = trouble
        self.result = Result(seed)
        self.gaps: list[float] = []
        """The longest of each streamed answer, seconds."""
        self.under_way = 0
        self.started = 0
        self._busy: set[str] = set()
        self._counts: dict[str, tuple[int, int]] = {}
        """Pulls and recomputed ones of each life of a worker, as last seen."""

    async def run(self) -> Result:
        """Load with faults; then calm, and everything has to be whole again."""
        loop = asyncio.get_running_loop()
        chance = random.Random(self.result.seed)
        faults = asyncio.create_task(self._make_trouble(random.Random(chance.random())))
        counting = asyncio.create_task(self._count())
        asking: set[asyncio.Task[None]] = set()
        places = asyncio.Semaphore(self.load.most)
        end = loop.time() + self.load.seconds
        try:
            while self.started < self.load.requests if self.load.requests else loop.time() < end:
                await asyncio.sleep(chance.expovariate(self.load.rate))
                await places.acquire()
                task = asyncio.create_task(self._serve(self._question(chance)))
                asking.add(task)
                task.add_done_callback(lambda done: (places.release(), asking.discard(done)))
                for ended in (faults, counting):
                    if ended.done():
                        ended.result()
            await asyncio.gather(*asking)
        finally:
            faults.cancel()
            counting.cancel()
            await asyncio.gather(faults, counting, return_exceptions=True)
        await self._all_back()
        return self.result

    def _question(self, chance: random.Random) -> Question:
        self.started += 1
        body = self.oracle.question(self.started)
        streamed = chance.random() < 0.75
        leaves = streamed and chance.random() < self.load.leaving
        body["stream"] = streamed
        return Question(self.started, body, chance.randrange(1, 30) if leaves else None)

    async def _serve(self, question: Question) -> None:
        """Until it has its answer, at whichever router is there."""
        result = self.result
        self.under_way += 1
        routers = list(self.fleet.http)
        try:
            async with asyncio.timeout(self.load.limit_s):
                for attempt in range(1_000_000):
                    router = routers[(question.number + attempt) % len(routers)]
                    process = self.fleet.processes[router]
                    starts = process.starts
                    heard = await ask(self.fleet.address(router), question)
                    if heard.outcome in ("whole", "left"):
                        return self._judge(question, heard)
                    lost = process.starts != starts or not process.alive or router in self._busy
                    if (heard.outcome == "cut" and lost) or heard.outcome == "refused":
                        result.asked_again += 1
                        await asyncio.sleep(0.2)
                        continue
                    result.wrong.append(f"request {question.number}: {heard.outcome}: {heard.told[:300]}")
                    return
        except TimeoutError:
            result.wrong.append(f"request {question.number} hangs, at {router}")
        finally:
            result.ended += 1
            self.under_way -= 1

    def _judge(self, question: Question, heard: Heard) -> None:
        result = self.result
        right = self.oracle.answer(question.number)
        if question.streamed:
            self.gaps.append(heard.longest_gap_s)
            result.longest_gap_s = max(result.longest_gap_s, heard.longest_gap_s)
        if heard.outcome == "left":
            result.left += 1
            good = right.startswith(heard.text)
        else:
            good = heard.text == right
        if not good:
            result.wrong.append(f"request {question.number}: {heard.text!r}, not {right!r}")

    # -- faults

    async def _make_trouble(self, chance: random.Random) -> None:
        if not self.trouble.every_s:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        async with asyncio.TaskGroup() as group:
            while not self.trouble.most or self.result.faults.total() < self.trouble.most:
                await asyncio.sleep(chance.expovariate(1 / self.trouble.every_s))
                fault = self.trouble.draw(chance, self.fleet)
                if fault.victim not in self._busy:
                    self._busy.add(fault.victim)
                    self.result.faults[f"{fault.kind} {re.sub('-.*', '', fault.victim)}"] += 1
                    group.create_task(self._do(fault))

    async def _do(self, fault: Fault) -> None:
        if fault.kind == "turn":
            return await self._turn(fault)
        server = {"etcd": self.fleet.etcd, "nats": self.fleet.nats}.get(fault.victim)
        begin, end = server_steps(server, fault.kind) if server else self._steps(fault)
        beginning = asyncio.create_task(asyncio.to_thread(begin))
        try:
            await asyncio.shield(beginning)
            await asyncio.sleep(fault.seconds)
        finally:
            # Also when the run is over: whatever was stopped goes on.
            await beginning
            await asyncio.to_thread(end)
            self._busy.discard(fault.victim)

    async def _turn(self, fault: Fault) -> None:
        wire, victim = self.watcher.wire, fault.victim
        own = Role.PREFILL if victim.startswith("prefill") else Role.DECODE
        other = Role.DECODE if own is Role.PREFILL else Role.PREFILL

        async def turned(role: Role) -> bool:
            card = await self.watcher.card(victim)
            if card is None:
                return False
            if card.role is role and card.state is MemberState.READY:
                return True
            with contextlib.suppress(FleetError):
                await wire.take_role(card.address, role, 5.0, 5.0)
            return False

        try:
            for role in (other, own):
                await until(partial(turned, role), 90.0, lambda: f"{victim} takes no other role")
                await asyncio.sleep(fault.seconds if role is other else 0.0)
        except AssertionError as error:
            self.result.wrong.append(str(error))
        finally:
            self._busy.discard(victim)

    def _steps(self, fault: Fault) -> tuple[Callable[[], object], Callable[[], object]]:
        process = self.fleet.processes[fault.victim]
        if fault.kind == "freeze":
            return lambda: process.signal(signal.SIGSTOP), lambda: process.signal(signal.SIGCONT)
        if fault.kind == "kill":
            return process.kill, process.start
        return lambda: drained(process, self.result.wrong), process.start

    async def _count(self) -> None:
        """Counters of workers that will be killed are lost with them: looked at all the time."""
        while True:
            for worker in self.fleet.workers():
                if worker not in self._busy:
                    await self._look(worker)
            await asyncio.sleep(1.0)

    async def _look(self, worker: str) -> None:
        report = await self.watcher.report(worker)
        if report is not None:
            counters = report.counters
            self._counts[report.incarnation] = (
                counters.get("pulls", 0), counters.get("pulls_recomputed", 0),
            )  # fmt: skip

    async def _all_back(self) -> None:
        """Everybody is there again, nobody holds anything."""
        result = self.result
        try:
            await all_up(self.fleet, self.watcher)
            rest: dict[str, str] = {}

            async def at_rest() -> bool:
                nonlocal rest
                rest = await self.watcher.unrest()
                return not rest

            await until(at_rest, 60.0, lambda: f"not at rest: {rest}")
        except AssertionError as error:
            result.wrong.append(str(error))
        for worker in self.fleet.workers():
            await self._look(worker)
        result.pulls = sum(pulls for pulls, _ in self._counts.values())
        result.recomputed = sum(recomputed for _, recomputed in self._counts.values())
        for name, process in self.fleet.processes.items():
            log = process.log.read_text(errors="replace")
            if name in self.fleet.http:
                result.moved += len(re.findall(r" W router\.flow: request \S+: ", log))
            result.wrong += [f"{name}: {line}" for line in defects(log)]


def server_steps(server: Any, kind: str) -> tuple[Callable[[], object], Callable[[], object]]:
    if kind == "freeze":
        return server.pause, server.resume
    return server.kill, server.start if kind == "kill" else server.restart_empty


def drained(process: Process, wrong: list[str]) -> None:
    """SIGTERM, and it leaves by itself, with a good code."""
    said = process.since_start()
    process.signal(signal.SIGTERM)
    code = process.stopped()
    # Before it served it had nothing to drain, and no ear for signals.
    if code and " serves " in said:
        wrong.append(f"{process.name} left with code {code} when it was to drain\n{process.tail()}")


def defects(log: str) -> list[str]:
    """What no fault from outside excuses, each with the lines after it."""
    signs = (
        " C ",
        "Traceback",
        "AssertionError",
        "never retrieved",
        "never awaited",
        "Fatal",
        "Segmentation",
    )
    lines = log.splitlines()
    found = [
        "\n".join(lines[number : number + 30])
        for number, line in enumerate(lines)
        if any(sign in line for sign in signs)
    ]
    # A reader that breaks inside the NATS client is one of the ways in which a connection ends.
    return [told for told in found if "/nats/aio/client.py" not in told.partition("\n")[2].partition("\n")[0]]
