"""Mutual TLS between the processes of a fleet: one authority, and one certificate for each process.

Both sides show a certificate and check the other's: without one of the fleet's own authority nobody can
ask a worker, nor pass for one.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts."""

    ca: bytes
    """Authorities whose certificates are believed."""
    cert: bytes
    """Of this process, its chain included; names the host that its workers' cards advertise."""
    key: bytes = field(repr=False)

    @classmethod
    def read(cls, ca: Path, cert: Path, key: Path) -> Tls:
        """OSError: a file cannot be read."""
        return cls(ca.read_bytes(), cert.read_bytes(), key.read_bytes())


def client_context(ca: Path, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """For a client that trusts `ca` alone, and shows the certificate if there is one. OSError."""
    context = ssl.create_default_context(cafile=str(ca))
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context
