"""A coarse model of a fleet, for many hours of a planner's time in seconds: NOT the simulator of the product.

Prompts and answers are a fluid: no request is told from another, no cache, no router. Per tick: Poisson
arrivals, prompts worked off at a fixed speed, answers in progress by their mean length. Good for what
decisions do over hours; whether requests are served in time is shown by `fleetctl sim --planner`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from fleet.targets import Mode
from planner.decide import State, decide
from planner.words import Ages, Asked, ClassSeen, Observation, Plan, PlannerSettings, PoolSeen, WorkerSeen

SPEED = 8000.0
"""Prompt tokens a second of a prefill worker."""
BASE_S, EACH_S = 0.010, 0.0004
"""Of a decode step, and of each sequence in it."""


@dataclass
class Worker:
    id: str
    role: str
    ready_at: float
    since: float = 0.0
    turned: bool = False
    """It was of the other role before."""


@dataclass
class FluidFleet:
    settings: PlannerSettings
    rate: Callable[[float], float]
    prompt: Callable[[float], float] = lambda now: 2000.0
    answer: Callable[[float], float] = lambda now: 200.0
    budget: int = 32
    cold_start_s: float = 60.0
    turn_s: float = 5.0
    ttft_ms: float = 2000.0
    tpot_ms: float = 40.0
    seed: int = 0
    mode: Mode = Mode.ACT
    ages: Callable[[float], Ages] = lambda now: Ages(0.0, 0.5, 0.3)
    slow_first_s: float = 0.0
    """For which a new worker reports a twentieth of its speed."""
    never_ready: bool = False
    """No worker that is started ever becomes ready."""
    workers: list[Worker] = field(default_factory=list)
    plans: list[tuple[float, Plan]] = field(default_factory=list)
    counts: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = State(self.settings)
        self.noise = np.random.default_rng(self.seed)
        self.now = 0.0
        self.wanted = {"prefill": 1, "decode": 1}
        self.made = 0
        self.short_since: dict[str, float | None] = {"prefill": None, "decode": None}
        self.queue = 0.0
        self.progress = 0.0
        self.held = 0.0
        self.attained = self.counted = 0.0
        self.worker_s = 0.0
        self._follow(cold=False)

    def start_with(self, prefill: int, decode: int) -> FluidFleet:
        self.wanted = {"prefill": prefill, "decode": decode}
        self._follow(cold=False)
        return self

    def _of(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def _ready(self, role: str) -> list[Worker]:
        return [worker for worker in self._of(role) if worker.ready_at <= self.now]

    def _follow(self, cold: bool = True) -> None:
        for role, count in self.wanted.items():
            have = self._of(role)
            for worker in sorted(have, key=lambda one: -one.ready_at)[: max(0, len(have) - count)]:
                self.workers.remove(worker)
            for _ in range(count - len(have)):
                self.made += 1
                wait = math.inf if self.never_ready and cold else self.cold_start_s if cold else 0.0
                self.workers.append(Worker(f"{role}-{self.made}", role, self.now + wait, self.now))

    def run(self, seconds: float) -> FluidFleet:
        until = self.now + seconds
        while self.now < until:
            self.tick()
        return self

    def tick(self) -> Plan:
        step = self.settings.interval_s
        self.now += step
        now, prompt, answer = self.now, self.prompt(self.now), self.answer(self.now)
        arrived = int(self.noise.poisson(self.rate(now) * step))
        prefill, decode = len(self._ready("prefill")), len(self._ready("decode"))
        computed = min(self.queue + arrived * prompt, prefill * SPEED * step)
        wait_s = self.queue / (prefill * SPEED) if prefill else math.inf
        self.queue += arrived * prompt - computed
        batch = self.progress / decode if decode else 0.0
        step_s = BASE_S + EACH_S * batch
        done = min(self.progress, self.progress * step / (answer * step_s)) if decode else 0.0
        self.progress += computed / prompt - done
        ttft_s = wait_s + prompt / SPEED
        late = arrived if ttft_s * 1000 > self.ttft_ms else 0
        slow = 0 if late or step_s * 1000 <= self.tpot_ms else arrived
        self.attained += arrived - late - slow
        self.counted += arrived
        self.worker_s += len(self.workers) * step
        self.counts.append((now, self.wanted["prefill"], self.wanted["decode"]))
        asked = Asked(
            step,
            arrived,
            int(arrived * prompt),
            arrived * prompt * prompt * 1.5,
            int(done),
            int(done * prompt),
            0,
            int(done * answer),
            waiting=int(self.queue / prompt) if not prefill else 0,
            waiting_tokens=int(self.queue) if not prefill else 0,
            held=int(self.queue / prompt) if not prefill else 0,
            running=int(self.queue / prompt + self.progress),
            classes={
                "standard": ClassSeen(
                    self.ttft_ms, self.tpot_ms, arrived, arrived - late - slow, late + slow, late, slow
                )
            },
        )
        plan = decide(self.observation(asked, step_s), self.state, now)
        self.plans.append((now, plan))
        if self.mode is Mode.ACT:
            self.apply(plan)
        return plan

    def observation(self, asked: Asked, step_s: float) -> Observation:
        pools = {}
        for role in ("prefill", "decode"):
            ready, want = len(self._ready(role)), self.wanted[role]
            self.short_since[role] = (self.short_since[role] or self.now) if ready < want else None
            short = self.short_since[role]
            turning = sum(one.turned and one.ready_at > self.now for one in self._of(role))
            pools[role] = PoolSeen(
                want, ready, max(0, want - ready), 0, 0.0 if short is None else self.now - short, turning
            )
        seen = []
        for worker in self.workers:
            if worker.ready_at > self.now:
                continue
            ready_s = self.now - worker.ready_at
            slow = 20.0 if worker.ready_at > 0 and ready_s < self.slow_first_s else 1.0
            size = max(1, len(self._ready(worker.role)))
            if worker.role == "prefill":
                seen.append(
                    WorkerSeen(worker.id, "prefill", ready_s, asked.arrived > 0,
                               queued_tokens=int(self.queue / size), prefill_tokens_s=SPEED / slow)
                )  # fmt: skip
            else:
                batch = self.progress / size
                seen.append(
                    WorkerSeen(worker.id, "decode", ready_s, batch > 0.5, running=round(batch),
                               decode_step_s=step_s * slow, decode_batch=max(1.0, batch), kv_tokens=400_000)
                )  # fmt: skip
        return Observation(
            self.mode, self.budget, pools["prefill"], pools["decode"], asked, self.ages(self.now), tuple(seen)
        )

    def apply(self, plan: Plan) -> None:
        for role in plan.turns:
            other = "decode" if role == "prefill" else "prefill"
            worker = self._ready(other)[0]
            worker.role, worker.ready_at, worker.turned = role, self.now + self.turn_s, True
        self.wanted = {"prefill": plan.prefill, "decode": plan.decode}
        self._follow()

    def reversals(self, role: int, after: float = 0.0) -> int:
        """How often a count turned from rising to falling or back. `role`: 0 prefill, 1 decode."""
        counts = [row[1 + role] for row in self.counts if row[0] > after]
        moves = [b - a for a, b in pairwise(counts) if a != b]
        return sum(a * b < 0 for a, b in pairwise(moves))

    @property
    def attainment(self) -> float:
        return self.attained / self.counted
