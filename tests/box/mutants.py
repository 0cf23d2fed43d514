"""Does the fault box catch what it claims? Breaks the product on purpose and plays schedules until one fails.

`python tests/box/mutants.py [PART OF A NAME] [--seeds N] [--seed FIRST]`. A mutant is a few lines of the
source, replaced while it is imported in a process of its own; nothing is written. One line a mutant: after
how many seeds it was caught, and by what. Exit code 1: one survived, or its lines are not there any more.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import signal
import subprocess
import sys
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30
"""Of CPU for one schedule: what takes longer does not end."""

Edit = tuple[str, str, str]
"""File, lines as they are, and as they are in the mutant."""
MUTANTS: dict[str, tuple[Edit, ...]] = {
    "told one less on failover": (
        (
            "router/choosing.py",
            "tuple(known.generated), None, best",
            "tuple(known.generated[: len(known.generated) - bool(known.lost)]), None, best",
        ),
    ),
    "told one more on failover": (
        (
            "router/choosing.py",
            "tuple(known.generated), None, best",
            "(*known.generated, *known.generated[-1:] * bool(known.lost)), None, best",
        ),
    ),
    "max_tokens from zero after failover": (
        (
            "engine/sequence.py",
            "        drawn = len(self.tokens) - self.prompt_length\n",
            "        drawn = len(self.tokens) - self.prompt_length - self.before\n",
        ),
        (
            "engine/sequence.py",
            "    cancelled: bool = False\n",
            ("    before: int = 0\n    cancelled: bool = False\n"),
        ),
        (
            "engine/sequence.py",
            "            arrival=arrival,\n",
            (
                "            arrival=arrival,\n"
                "            before=len(new.generated) if len(new.generated) > 1 else 0,\n"
            ),
        ),
    ),
    "grammar not replayed on failover": (
        (
            "engine/intake.py",
            "self._engine.matcher(constraint, new.generated)",
            "self._engine.matcher(constraint, new.generated if len(new.generated) < 2 else ())",
        ),
    ),
    "close releases no lease": (
        (
            "router/legs.py",
            ("        self.forget_early(reason)\n        self.release()\n        if self._timer"),
            ("        self.forget_early(reason)\n        if self._timer"),
        ),
    ),
    "given-up KV not released": (
        (
            "router/legs.py",
            ("        self.release()\n        self._account.moved(HandoffState.RESERVED, now, why)"),
            (
                "        self._known.ticket = self._held = None\n"
                "        self._account.moved(HandoffState.RESERVED, now, why)"
            ),
        ),
    ),
    "release at first token not said": (
        (
            "router/legs.py",
            "            self.release()  # The decode worker goes on: the KV is there.",
            "            self._known.ticket = self._held = None",
        ),
    ),
    "cancel not sent": (
        (
            "router/link.py",
            "                self._send(Cancel(stream.number, reason))",
            "                pass",
        ),
    ),
    "worker keeps streams of a lost session": (
        (
            "fleet/chassis.py",
            (
                "        for stream in list(outlet.streams.values()):\n"
                "            self._cancel(stream, CancelReason.CLIENT)"
            ),
            "        pass",
        ),
    ),
    "leases never expire": (
        ("kv_transfer/grants.py", "        if due is not None and not self._closed:", "        if False:"),
    ),
    "lease not renewed by its reader": (
        (
            "kv_transfer/pulls.py",
            "                    await connection.renew(ticket.lease)",
            "                    pass",
        ),
    ),
    "quarantine off": (
        (
            "engine/scheduler.py",
            "            self.pool.quarantine(sequence.blocks[cached:])",
            "            self.pool.release(sequence.blocks[cached:])",
        ),
        ("engine/scheduler.py", "_GivenUp(sequence.blocks[cached:], sequence", "_GivenUp([], sequence"),
    ),
    "pull cancelled without its fence": (
        ("kv_transfer/transport.py", ("        await finish(end())\n        raise"), "        raise"),
    ),
    "checksum off": (
        (
            "kv_transfer/transport.py",
            "        if checksum(region.array[block]) != expected:",
            "        if False:",
        ),
    ),
    "KV proven beyond what came": (
        (
            "decode_worker/service.py",
            "= have * size if have < needed else max(ticket.tokens, cached * size)",
            "= max(ticket.tokens, cached * size)",
        ),
    ),
    "KV that was on its way when it was given up is kept": (
        (
            "decode_worker/service.py",
            "                await self._transfer.pull(ticket, pairs, self._pull_limit_s)\n",
            (
                "                here.tokens = (have + len(pairs)) * size\n"
                "                await self._transfer.pull(ticket, pairs, self._pull_limit_s)\n"
            ),
        ),
    ),
    "what was given up is kept without what was before it": (
        (
            "engine/scheduler.py",
            "if len(before) == first else []",
            "if True else []",
        ),
    ),
    "early leg kept when prefill is lost": (
        (
            "router/flow.py",
            (
                "        self.legs.drop(CancelReason.MOVED)\n"
                "        self.legs.forget_early(CancelReason.MOVED)\n"
                "        account.forecast = None"
            ),
            (
                "        self.legs.drop(CancelReason.MOVED)\n"
                "        self.legs._early = None\n"
                "        account.forecast = None"
            ),
        ),
    ),
    "Proceed never sent": (
        ("router/link.py", "        self._send(Proceed(stream.number, generated))", "        pass"),
    ),
    "index keeps a dead life": (
        (
            "router/prefix_index.py",
            "        known = self._workers.pop(worker, None)\n",
            "        known = None\n",
        ),
    ),
    "events of a dead life taken": (
        (
            "router/prefix_index.py",
            "        if message.incarnation != worker.incarnation:",
            "        if False:",
        ),
    ),
    "admission not left": (
        (
            "router/flow.py",
            (
                "        self.flow.turns.forget(self.request.id)\n"
                "        self.flow.admission.leave(self.request.id)\n"
                "        self.account"
            ),
            ("        self.flow.turns.forget(self.request.id)\n        self.account"),
        ),
    ),
    "roster not settled": (
        (
            "router/legs.py",
            "        self._flow.roster.settle(leg.choice.worker, self._known.request.id)\n",
            "",
        ),
    ),
    "early leg not settled": (
        (
            "router/legs.py",
            "            self._let_go(early, reason)\n",
            "            early.link.drop(early.stream, reason)\n",
        ),
    ),
    "end twice": (
        (
            "router/flow.py",
            (
                "        if self.over or not self.begun:\n"
                "            return\n"
                "        self.over = True\n"
                "        overdue"
            ),
            ("        if not self.begun:\n            return\n        self.over = True\n        overdue"),
        ),
    ),
    "deadline timer not armed": (
        (
            "router/legs.py",
            ("        due = self._known.due\n        if self.now is not None and"),
            ("        due = self._loop.time() + 1e6\n        if self.now is not None and"),
        ),
    ),
    "role change forgets leases of the other role": (
        (
            "fleet/roles.py",
            ("        for service in self._services.values():\n            service.lease_ended(lease, why)"),
            "        self.acting.lease_ended(lease, why)",
        ),
    ),
    "role change while work of the role runs": (
        (
            "fleet/roles.py",
            "        return any(service.busy() for service in self._services.values())",
            "        return False",
        ),
    ),
    "events begin anew after a role change": (
        (
            "fleet/chassis.py",
            "        self._turns[role]()\n",
            (
                "        self._turns[role]()\n"
                "        self._kv = KvLog(self.card.id, self.card.incarnation, self.card.blocks)\n"
            ),
        ),
    ),
    "events not numbered after a role change": (
        (
            "fleet/chassis.py",
            "        if message is not None:\n",
            "        if message is not None and self.card.role == self.first_role:\n",
        ),
        (
            "fleet/chassis.py",
            "        self._turns = turns or {}",
            ("        self._turns = turns or {}\n        self.first_role = card.role"),
        ),
    ),
    "scheduler: cancelled sequence keeps its slot": (
        (
            "engine/scheduler.py",
            (
                "        if sequence.slot >= 0:\n"
                "            self._free_slot(sequence)\n"
                "        if sequence.lent"
            ),
            (
                "        if sequence.slot >= 0 and sequence.state is not State.FILLING:\n"
                "            self._free_slot(sequence)\n"
                "        if sequence.lent"
            ),
        ),
    ),
    "scheduler: blocks of a step in flight are given away": (
        (
            "engine/scheduler.py",
            "        if sequence.in_flight:\n            self._flights[-1]",
            "        if False:\n            self._flights[-1]",
        ),
    ),
    "usage counts the last leg only": (
        (
            "router/flow.py",
            "prompt, generated, self",
            "prompt, generated - bool(self.known.lost), self",
        ),
    ),
    "loss before unread tokens": (
        (
            "router/link.py",
            (
                "        while self._urgent is not None or not self._said:\n"
                "            if (error := self._urgent or self.error) is not None:"
            ),
            (
                "        while self._urgent is not None or self.error is not None or not self._said:\n"
                "            if (error := self._urgent or self.error) is not None:"
            ),
        ),
    ),
}


def _mutate(name: str) -> dict[str, str]:
    """By path, the source of the mutant. ValueError when its lines are not there."""
    sources: dict[str, str] = {}
    for file, old, new in MUTANTS[name]:
        path = str(ROOT / file)
        source = sources.get(path) or Path(path).read_text("utf-8")
        if old not in source:
            raise ValueError(f"{file} has no {old.strip().splitlines()[0]!r} any more")
        sources[path] = source.replace(old, new, 1)
    return sources


def _import_as(sources: dict[str, str]) -> None:
    usual = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, module: str) -> CodeType | None:
        if loader.path in sources:
            return compile(sources[loader.path], loader.path, "exec", dont_inherit=True)
        return usual(loader, module)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


class _TooLong(Exception):
    pass


def _too_long(*_: object) -> None:
    raise _TooLong


def hunt(name: str, first: int, most: int) -> int:
    """In a process that has imported nothing of the product yet."""
    try:
        _import_as(_mutate(name))
    except ValueError as error:
        print(f"{name}: {error}")
        return 1
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]
    from drawing import draw
    from playing import play

    signal.signal(signal.SIGVTALRM, _too_long)
    for seed in range(first, first + most):
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            problems = play(draw(seed)).problems
        except _TooLong:
            problems = [f"did not end within {SECONDS} s of CPU"]
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if problems:
            print(f"{name}: caught after {seed - first + 1} by seed {seed}: {problems[0][:120]!r}")
            return 0
    print(f"{name}: SURVIVED {most} seeds")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="?", default="", help="of the names of the mutants that are tried")
    parser.add_argument("--seeds", type=int, default=300, help="at most so many for each")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return hunt(options.part, options.seed, options.seeds)
    found = [name for name in MUTANTS if options.part in name]
    again = [sys.executable, __file__, "--one", "--seeds", str(options.seeds), "--seed", str(options.seed)]
    return max(subprocess.run([*again, name], check=False).returncode for name in found) if found else 1


if __name__ == "__main__":
    sys.exit(main())
