"""Hosts that are network namespaces of this machine, and a network between them whose every way can be bad.

Each host has one TUN interface. A thread of this process carries the packets between them and applies what
was said of the way from one host to another: cut (silently, as when a cable is pulled: no FIN, no RST),
delay, loss, bandwidth. `tc netem` would do the same, but many kernels of small virtual machines have none;
this needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 9000
_QUEUE_S = 0.5
"""Of a slow way: what would wait for longer is dropped, as in a router with a full buffer."""

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Why no network can be made here; empty when one can."""
    if os.geteuid():
        return "needs root, to make network namespaces"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    name = f"pdfleet-{os.getpid()}-probe"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return "needs `ip`, of iproute2"
    except subprocess.CalledProcessError as error:
        return f"cannot make a network namespace: {error.stderr.strip()}"
    return ""


@dataclass
class Way:
    """From one host to another. Changed at any time; holds for packets from then on."""

    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0
    """Share of the packets, each drawn by itself."""
    bytes_s: float = 0.0
    """0: no limit."""
    free_at: float = 0.0
    dropped: int = 0


class Network:
    """Hosts by name, in order: `10.66.0.1`, `10.66.0.2`, …; a context manager.

    The first is the one the test itself is on. It gets an address in the network, and no namespace: a thread
    that entered one would leave behind those that gRPC has started in it before, for other tests.
    """

    def __init__(self, hosts: Sequence[str], seed: int = 1) -> None:
        self.hosts = tuple(hosts)
        self._prefix = f"pdfleet-{os.getpid()}"
        self._chance = random.Random(seed)
        self._ways = {(a, b): Way() for a in range(len(hosts)) for b in range(len(hosts)) if a != b}
        self._tuns: list[int] = []
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: str) -> str:
        return f"10.66.0.{self.hosts.index(host) + 1}"

    def ways(self, some: Sequence[str], others: Sequence[str]) -> list[Way]:
        """Both directions between the hosts of two groups."""
        pairs = [(self.hosts.index(a), self.hosts.index(b)) for a in some for b in others if a != b]
        return [self._ways[way] for a, b in pairs for way in ((a, b), (b, a))]

    def everybody_but(self, *hosts: str) -> list[str]:
        return [host for host in self.hosts if host not in hosts]

    @contextlib.contextmanager
    def partition(self, some: Sequence[str], others: Sequence[str]) -> Iterator[None]:
        """Nothing passes between the two groups, and nobody is told."""
        ways = self.ways(some, others)
        for way in ways:
            way.cut = True
        try:
            yield
        finally:
            for way in ways:
                way.cut = False

    @contextlib.contextmanager
    def bad(
        self,
        some: Sequence[str],
        others: Sequence[str],
        *,
        delay_s: float = 0.0,
        loss: float = 0.0,
        bytes_s: float = 0.0,
    ) -> Iterator[None]:
        ways = self.ways(some, others)
        for way in ways:
            way.delay_s, way.loss, way.bytes_s = delay_s, loss, bytes_s
        try:
            yield
        finally:
            for way in ways:
                way.delay_s = way.loss = way.bytes_s = 0.0

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, and the threads and processes that it starts, are on that host."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(f"/run/netns/{self.namespace(host)}")
            yield
        finally:
            _set_namespace(own)
            os.close(own)

    def __enter__(self) -> Network:
        try:
            for host in self.hosts:
                self._make(host)
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        self._remove()

    def _make(self, host: str) -> None:
        device, within = "net0", contextlib.nullcontext()
        words: tuple[str, ...] = ()
        if host == self.hosts[0]:
            device = f"net{os.getpid()}"
        else:
            name = self.namespace(host)
            _ip("netns", "add", name)
            words, within = ("-n", name), self.inside(host)
        with within:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._tuns.append(tun)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip(*words, "address", "add", f"{self.address(host)}/24", "dev", device)
        _ip(*words, "link", "set", device, "mtu", str(_MTU), "up")
        _ip(*words, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for tun in self._tuns:
            os.close(tun)
        for end in (self._wake, self._waker):
            os.close(end)
        for host in self.hosts[1:]:
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True, check=False)

    def _carry(self) -> None:
        """The switch: until something is written to `_waker`."""
        late: list[tuple[float, int, int, bytes]] = []
        count = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, -1)
            for number, tun in enumerate(self._tuns):
                selector.register(tun, selectors.EVENT_READ, number)
            while True:
                wait = max(0.0, late[0][0] - monotonic()) if late else None
                for key, _ in selector.select(wait):
                    if key.data == -1:
                        return
                    for packet in _packets(self._tuns[key.data]):
                        target = packet[19] - 1
                        way = self._ways.get((key.data, target))
                        if way is None:  # to nobody, or not IPv4
                            continue
                        due = self._due(way, len(packet))
                        if due is None:
                            way.dropped += 1
                        else:
                            count += 1
                            heapq.heappush(late, (due, count, target, packet))
                now = monotonic()
                while late and late[0][0] <= now:
                    _, _, target, packet = heapq.heappop(late)
                    with contextlib.suppress(OSError):  # its queue is full, as a host's may be
                        os.write(self._tuns[target], packet)

    def _due(self, way: Way, size: int) -> float | None:
        """When a packet arrives; None: never."""
        if way.cut or (way.loss and self._chance.random() < way.loss):
            return None
        now = monotonic()
        if way.bytes_s:
            if way.free_at > now + _QUEUE_S:
                return None
            way.free_at = max(now, way.free_at) + size / way.bytes_s
            return way.free_at + way.delay_s
        return now + way.delay_s


def _packets(tun: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            packet = os.read(tun, _MTU + 100)
        except BlockingIOError:
            return
        if len(packet) >= 20 and packet[0] >> 4 == 4:
            yield packet


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _enter(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        _set_namespace(handle)
    finally:
        os.close(handle)


def _set_namespace(handle: int) -> None:
    if _libc.setns(handle, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
