"""Mutual TLS between the processes of a fleet: one authority, and one certificate for each process.

Both sides show a certificate and check the other's: without one of the fleet's own authority nobody can
ask a worker, nor pass for one.
"""

from __future__ import annotations

import os
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

    def server(self) -> ssl.SSLContext:
        """For sockets of our own: whoever connects must show a certificate of the authority. OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._filled(context)

    def client(self) -> ssl.SSLContext:
        """The other end: the certificate shown must also name the host that was asked for. OSError."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.ca.decode())
        # OpenSSL's loader wants a file: this one is memory, and its name only this process's.
        held = os.memfd_create("tls")
        try:
            os.write(held, self.cert.rstrip() + b"\n" + self.key)
            context.load_cert_chain(f"/proc/self/fd/{held}")
        finally:
            os.close(held)
        return context


def client_context(ca: Path, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """For a client that trusts `ca` alone, and shows the certificate if there is one. OSError."""
    context = ssl.create_default_context(cafile=str(ca))
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context
