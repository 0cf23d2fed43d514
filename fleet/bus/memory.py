"""The bus within one process: for tests and virtual time, with faults to order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from fleet.bus import BusMessage
from fleet.bus.mailbox import LIMIT, Mailbox, matches
from fleet.virtual_time import outside, true_time


class MemoryHub:
    """What the broker is to NATS; every process of a simulated fleet takes its own `bus()`.

    `delay_s` is the way from a publisher to a reader, in seconds; `up = False` is a broker that is away;
    `lose`, given a subject, tells whether this one message is lost; `late`, given a subject, how many seconds
    later than usual each copy of this one message comes: one copy, on time, where nothing is wrong.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.up = True
        self.lose: Callable[[str], bool] = lambda subject: False
        self.late: Callable[[str], tuple[float, ...]] = lambda subject: (0.0,)
        self.tap: Callable[[str, int], None] = lambda subject, size: None
        """Told of every message before it is sent."""
        self.lost = 0
        """Messages that `up`, `lose` or a cut bus kept from everybody."""
        self._readers: dict[MemoryBus, None] = {}
        """Most workers only speak."""
        self._way: deque[BusMessage] = deque()
        self._last_due = 0.0

    def bus(self) -> MemoryBus:
        return MemoryBus(self)

    def send(self, message: BusMessage) -> None:
        self.tap(message.subject, len(message.data))
        if not self.up or self.lose(message.subject):
            self.lost += 1
            return
        loop = asyncio.get_running_loop()
        for late_s in self.late(message.subject):
            if late_s > 0:
                outside(loop.call_later, self.delay_s + late_s, self._arrive, message)
            elif self.delay_s <= 0 and not self._way:
                self._arrive(message)
            else:
                # A timer takes whatever is oldest on the way, so that a smaller delay overtakes nothing.
                self._last_due = max(self._last_due, true_time() + self.delay_s)
                self._way.append(message)
                outside(loop.call_at, self._last_due, self._arrive_next)

    def reads(self, bus: MemoryBus, reads: bool) -> None:
        """From now on, or no more."""
        if reads:
            self._readers[bus] = None
        else:
            self._readers.pop(bus, None)

    def _arrive_next(self) -> None:
        self._arrive(self._way.popleft())

    def _arrive(self, message: BusMessage) -> None:
        if not self.up:
            self.lost += 1
            return
        for bus in self._readers:
            bus.receive(message)


class MemoryBus:
    """A process's connection to the hub. `mute`: nothing goes out, `deaf`: nothing comes in, `cut`: both."""

    def __init__(self, hub: MemoryHub) -> None:
        self.mute = self.deaf = False
        self._hub = hub
        self._boxes: list[Mailbox] = []
        self._taking: dict[str, tuple[Mailbox, ...]] = {}
        """Subject → the mailboxes that take it, learned as messages come."""

    @property
    def cut(self) -> bool:
        return self.mute and self.deaf

    @cut.setter
    def cut(self, cut: bool) -> None:
        self.mute = self.deaf = cut

    @property
    def connected(self) -> bool:
        return self._hub.up and not self.cut

    async def publish(self, subject: str, data: bytes) -> None:
        if self.mute:
            self._hub.lost += 1
        else:
            self._hub.send(BusMessage(subject, data))

    async def subscribe(self, subject: str, limit: int = LIMIT) -> Mailbox:
        box = Mailbox(subject, limit, self._forget)
        self._boxes.append(box)
        self._taking.clear()
        self._hub.reads(self, True)
        return box

    def receive(self, message: BusMessage) -> None:
        if self.deaf:
            return
        boxes = self._taking.get(message.subject)
        if boxes is None:
            boxes = tuple(box for box in self._boxes if matches(box.subject, message.subject))
            self._taking[message.subject] = boxes
        for box in boxes:
            box.add(message)

    async def close(self) -> None:
        for box in list(self._boxes):
            await box.close()

    async def _forget(self, box: Mailbox) -> None:
        self._boxes.remove(box)
        self._taking.clear()
        if not self._boxes:
            self._hub.reads(self, False)
