"""Draws a fault schedule from a seed.

Faults come at drawn times or with the k-th message of some link, so that they fall between any two steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from faults import KINDS
from schedules import (
    CONSTRAINTS,
    DEADLINE_S,
    OUTGROWN,
    ROOMY,
    SAFE_ROUTER,
    SAFE_WORKER,
    TIGHT,
    Client,
    Fault,
    Schedule,
)
from whole_fleet import MODEL

from engine.latency_runner import ToyModel, reference_tokens
from engine.settings import EngineSettings
from fleet.ids import RequestId
from fleet.request import Request, Sampling
from kv_transfer.loopback import Damage
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings

FAR = {"to worker": 60, "to router": 120, "bus": 60, "registry": 20, "kv": 30}
"""Links, and with how late a message of each a fault may come."""
NEAR = {"tokens": 25, "to worker": 12, "to router": 40, "kv": 15}
"""The same, of the messages of one worker; `tokens`: those to routers while it decodes."""
LONG = 200
"""Tokens asked for by clients that will leave: whoever goes on working for them is seen to."""


def draw(seed: int) -> Schedule:
    chance = random.Random(seed)
    prefill, decode = chance.choice([(1, 1), (1, 2), (1, 2), (2, 2), (0, 2), (2, 1)])
    routers = chance.choice([1, 1, 1, 2])
    safe = chance.random() < 0.5
    rough = chance.random() < 0.3
    memory = chance.choice(
        ["roomy", "tight", "tight"] if rough else ["roomy", "roomy", "roomy", "tight", "tight", "outgrows"]
    )
    longest = chance.choice([24, 60])
    blocks = {"roomy": ROOMY, "tight": TIGHT, "outgrows": OUTGROWN}[memory]
    outgrows = memory == "outgrows" and longest == 60
    busy = chance.random() < 0.1
    max_batch = chance.choice([2, 4, 8])
    engine = EngineSettings(
        block_size=4,
        max_batch=max_batch,
        max_step_tokens=max_batch + chance.choice([4, 8, 16]),
        max_waiting=2 if busy and not safe else 64,
        short_prompt_share=chance.choice([0.0, 0.25]),
        prefix_cache=chance.random() < 0.9,
    )
    cost = (
        CostSettings() if chance.random() < 0.3 else CostSettings(local_prefill_tokens=0, local_advantage=1e9)
    )
    # A draw of its own, so that the seeds from before play as they did but for this.
    borrowing = random.Random(seed ^ 0xB0220)
    if borrows := borrowing.random() < 0.5:
        # Whatever is cached elsewhere is brought, and any queue is a reason to go elsewhere.
        cost = replace(cost, borrow_s=0.0, borrow_advantage=1e-9, tie_s=0.0, tie_share=0.0)
    transfer = TransferSettings(
        lease_s=0.6 if rough else chance.choice([2.0, 2.0, 0.6]),
        connect_s=1.0,
        checksum=not rough,
        borrow_limit_s=2.0 if borrows else 0.0,
    )
    if random.Random(seed ^ 0x0E11A).random() < 0.4:
        engine = replace(engine, overlap="on")
    schedule = Schedule(
        seed, prefill, decode, routers, blocks, 2e7 if rough else 2e8, engine, transfer, cost, rough,
        {}, (), (), safe=safe and not outgrows, outgrows=outgrows, borrows=borrows,
    )  # fmt: skip
    clocks = {}
    if chance.random() < 0.4:
        for name in (*schedule.workers, *schedule.router_names):
            clocks[name] = chance.choice([0.0, 60.0, -60.0, chance.uniform(-1e5, 1e5)])
    clients = _clients(schedule, chance, longest, busy)
    if borrows:
        clients = _with_second_turns(clients, borrowing, longest)
    # A draw of its own, like the one before.
    rushing = random.Random(seed ^ 0x25054)
    if rush := rough and memory == "tight" and rushing.random() < 0.5:
        clients = _with_a_rush(clients, rushing, schedule.router_names)
        engine = replace(engine, max_batch=8, max_step_tokens=14, prefix_cache=True)
        schedule = replace(schedule, engine=engine, rush=True)
    schedule = replace(schedule, clocks=clocks, clients=clients)
    count = chance.choice([0, 1, 1, 2, 2, 3, 4, 5])
    faults = tuple(fault for _ in range(count) for fault in _faults(schedule, chance))
    if rush:
        faults += tuple(_leaves_while_it_pulls(schedule, rushing) for _ in range(4))
    return replace(schedule, faults=faults)


def _clients(schedule: Schedule, chance: random.Random, longest: int, busy: bool) -> tuple[Client, ...]:
    roots = [
        tuple(chance.randrange(1000) for _ in range(chance.randrange(4, longest // 2 + 1))) for _ in range(2)
    ]
    clients = []
    for number in range(chance.randrange(12, 24) if busy else chance.randrange(3, 8)):
        head = chance.choice(roots) if chance.random() < 0.5 else ()
        tail = tuple(
            chance.randrange(1000) for _ in range(chance.randrange(1, max(2, longest - len(head) + 1)))
        )
        leaves, vanishes = chance.random() < 0.1, chance.random() < 0.1
        long = (leaves or vanishes) and schedule.blocks == ROOMY
        some, many = chance.randrange(1, 25), chance.randrange(8, 41)
        sampling = Sampling(
            max_tokens=LONG if long else chance.choice([1, 2, some, some, many, many]),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(1 << 32),
            stop_token_ids=tuple(range(32, 40)) if not long and chance.random() < 0.3 else (),
            min_tokens=chance.choice([0, 0, 0, 6]),
        )
        request = Request(
            RequestId(f"r{number}"),
            MODEL,
            head + tail,
            sampling,
            salt=chance.choice(["", "", "tenant"]),
            priority=chance.choice([0, 0, 0, 1]),
            deadline_s=DEADLINE_S if chance.random() < 0.9 else chance.uniform(0.02, 2.0),
            constraint=chance.choice(CONSTRAINTS) if chance.random() < 0.2 and not long else None,
        )
        clients.append(
            Client(
                at=chance.uniform(0.0, 0.1 if busy else 0.4 if schedule.rough else 1.0),
                router=chance.choice(schedule.router_names),
                request=request,
                stop_after=chance.randrange(1, 20) if leaves else None,
                vanish_after=chance.uniform(0.0, 1.0) if vanishes else None,
            )
        )
    return tuple(clients)


def _with_second_turns(
    clients: tuple[Client, ...], chance: random.Random, longest: int
) -> tuple[Client, ...]:
    """Some come back later with what they were answered, often at another worker and several at once."""
    turns = []
    for number, client in enumerate(clients):
        first = client.request
        known = (*first.prompt, *reference_tokens(first.prompt, first.sampling, model=ToyModel()))
        for again in range(chance.choice([0, 1, 1, 2])):
            prompt = (*known, *(chance.randrange(1000) for _ in range(chance.randrange(1, 8))))
            if len(prompt) <= longest:
                request = replace(first, id=RequestId(f"r{number}.{again}"), prompt=prompt)
                turns.append(replace(client, at=client.at + chance.uniform(0.3, 2.5), request=request))
    return (*clients, *turns)


def _with_a_rush(
    clients: tuple[Client, ...], chance: random.Random, routers: Sequence[str]
) -> tuple[Client, ...]:
    """More comes at once than there is room for: some begin like one that was there before, and leave while
    their KV is on its way; others wait for their place."""
    at = chance.uniform(1.0, 2.0)
    root = tuple(chance.randrange(1000) for _ in range(chance.randrange(12, 30)))
    rush = []

    def comes(number: int, at: float, prompt: tuple[int, ...], vanish_after: float | None) -> None:
        request = Request(
            RequestId(f"rush{number}"), MODEL, prompt, Sampling(max_tokens=chance.randrange(1, 9)),
            deadline_s=DEADLINE_S,
        )  # fmt: skip
        rush.append(Client(at, chance.choice(routers), request, vanish_after=vanish_after))

    comes(0, at - 0.6, root, None)
    for number in range(1, 9):
        begins_alike = number % 2 == 1
        head = root if begins_alike else ()
        tail = tuple(chance.randrange(1000) for _ in range(60 - len(head)))
        leaves = chance.uniform(0.0, 0.7) if begins_alike else None
        comes(number, at + chance.uniform(0.0, 0.2), head + tail, leaves)
    return (*clients, *rush)


def _leaves_while_it_pulls(schedule: Schedule, chance: random.Random) -> Fault:
    who = (chance.choice(schedule.clients).request.id,)
    decode = f"decode-{chance.randrange(schedule.decode)}"
    return Fault("vanish", who, lasts=0.01, at=0.0, link="kv", of=decode, count=chance.randrange(8, 40))


def _faults(schedule: Schedule, chance: random.Random) -> Iterator[Fault]:
    """One fault; or the two halves of one, such as a worker lost and brought back."""
    workers, routers = schedule.workers, schedule.router_names
    if schedule.safe:
        workers = tuple(name for name in workers if name != SAFE_WORKER)
        routers = tuple(name for name in routers if name != SAFE_ROUTER)
    weights = [kind.rough if schedule.rough else kind.weight for kind in KINDS.values()]
    kind, weight = chance.choices(list(KINDS.items()), weights)[0]
    who: tuple[str, ...] = ()
    match weight.target:
        case "worker":
            # Those that decode have the more to lose.
            decoders = tuple(name for name in workers if name.startswith("decode"))
            who = (chance.choice(workers + decoders),) if workers else ()
        case "prefill":
            sources = [name for name in schedule.workers if schedule.borrows or name.startswith("prefill")]
            who = (chance.choice(sources),) if sources else ()
        case "process":
            # What lies between a process and the control plane never stops it from serving.
            victims = (*workers, *schedule.router_names)
            who = (chance.choice(victims),)
        case "router":
            who = (chance.choice(routers),) if routers else ()
        case "session":
            pairs = [
                (router, worker)
                for router in schedule.router_names
                for worker in schedule.workers
                if not (schedule.safe and (router, worker) == (SAFE_ROUTER, SAFE_WORKER))
            ]
            who = chance.choice(pairs) if pairs else ()
        case "client":
            who = (chance.choice(schedule.clients).request.id,)
        case "kv pair":
            pairs = [
                (reader, source)
                for reader in schedule.workers
                for source in schedule.workers
                if (schedule.borrows and reader != source)
                or (reader.startswith("decode") and source.startswith("prefill"))
            ]
            who = chance.choice(pairs) if pairs else ()
    if weight.target != "fleet" and not who:
        return
    fault = Fault(
        kind,
        who,
        lasts=chance.choice([0.01, 0.1, 0.5, 1.0, 2.0, 3.5, 6.0]),
        at=chance.uniform(0.0, 2.0),
        detail=chance.choice(details) if (details := _details(schedule, kind)) else "",
        amount=chance.random(),
    )
    where, near = chance.random(), [name for name in who if name in schedule.workers]
    if weight.target == "client":
        near = [name for name in schedule.workers if name.startswith("decode")]
    if where < 0.6 and near:
        # In the middle of its own work: between two tokens of a stream, two parts of a prompt or of its KV.
        link = chance.choice(["kv" if schedule.rough else "tokens", *NEAR])
        fault = replace(
            fault, at=0.0, link=link, of=chance.choice(near), count=chance.randrange(1, NEAR[link]),
            after=chance.choice([0.0, 0.0, 0.01, 0.1]),
        )  # fmt: skip
    elif where < 0.75:
        link = chance.choice(list(FAR))
        fault = replace(fault, at=0.0, link=link, count=chance.randrange(1, FAR[link]))
    yield fault


def _details(schedule: Schedule, kind: str) -> tuple[str, ...]:
    """Without checksums nothing could notice damage on the way."""
    unseen = {damage.value for damage in Damage} if kind == "kv" and schedule.rough else set[str]()
    return tuple(detail for detail in KINDS[kind].details if detail not in unseen)
