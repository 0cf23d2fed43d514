"""What an operator may set about moving KV, each with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

TRANSPORTS = ("shm", "ucx", "loopback")


@dataclass(frozen=True, slots=True)
class TransferSettings:
    transport: str = "auto"
    """`auto` (shm and ucx, the best that both sides share), or a comma list of shm, ucx, loopback."""
    lease_s: float = 10.0
    """Seconds that blocks stay pinned without a renewal; what a dead reader costs at most. Readers renew
    at a third of it, so a slow but living one loses nothing."""
    chunk_bytes: int = 4 << 20
    """Most bytes a request; bounds what a cancel waits for. Several of 4 MiB are copied, verified and asked
    for at the same time: pulls of 8 to 12 MiB took half the time of those in one request."""
    in_flight_bytes: int = 32 << 20
    """Most bytes requested and not yet arrived, for each source."""
    checksum: bool = True
    """xxh3_64 of each block, sealed at grant and verified by the reader; 13–21 GB/s, so leave it on."""
    bind: str = "127.0.0.1"
    """Address that ucx listens on; left at this, that of `control.bind`. On another one than loopback, UCX's
    data ports take the interfaces that UCX_NET_DEVICES names (all of them by default)."""
    advertise: str = ""
    """Host written into tickets; empty is `bind`, or `control.advertise` where `bind` is left as it is."""
    folder: str = ""
    """Where shm makes its private 0700 folder; empty is the system's temporary folder."""
    borrow_limit_s: float = 2.0
    """Longest that bringing a cached beginning from another worker may take, seconds, and never longer than
    to compute it is expected to take; then it is computed. 0: nothing is brought so."""
    connect_s: float = 5.0
    """Seconds until an unanswered connection or greeting counts as failed."""
    fence_s: float = 0.25
    """Seconds that a cancelled or overdue request may take to end by itself; then its path is closed."""

    def __post_init__(self) -> None:
        if self.transport != "auto":
            unknown = [name for name in self.names() if name not in TRANSPORTS]
            if unknown or not self.names():
                raise ValueError(
                    f"transport: {self.transport!r} is not auto or a comma list of {', '.join(TRANSPORTS)}"
                )
        for name in ("lease_s", "connect_s", "fence_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be more than 0 seconds, not {getattr(self, name)}")
        if not self.borrow_limit_s >= 0:
            raise ValueError(f"borrow_limit_s: must not be negative, not {self.borrow_limit_s}")
        if self.bind in ("", "0.0.0.0", "::") and not self.advertise:
            raise ValueError(f"advertise: must be set when bind is {self.bind!r}, which readers cannot reach")
        if not 1 << 12 <= self.chunk_bytes <= 32 << 20:
            raise ValueError(f"chunk_bytes: must be 4 KiB to 32 MiB, not {self.chunk_bytes}")
        if self.in_flight_bytes < self.chunk_bytes:
            raise ValueError("in_flight_bytes: must be at least chunk_bytes")

    def listening(self, bind: str, advertise: str) -> TransferSettings:
        """These, at the addresses of the process where they name none of their own."""
        if self.bind != "127.0.0.1" or self.advertise:
            return self
        return replace(self, bind=bind, advertise=advertise)

    def names(self) -> tuple[str, ...]:
        """Transports to start, the most wanted first."""
        if self.transport == "auto":
            return ("shm", "ucx")
        return tuple(name.strip() for name in self.transport.split(",") if name.strip())
