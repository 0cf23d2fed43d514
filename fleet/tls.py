"""Mutual TLS between the processes of a fleet: one authority, and one certificate for each process.

Both sides show a certificate and check the other's: without one of the fleet's own authority nobody can
ask a worker, nor pass for one. Files are read again for each connection: certificates are renewed while
processes run.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts, and whose name they are to bear."""

    ca: bytes
    """Authorities whose certificates are believed."""
    cert: bytes
    """Of this process, its chain included; names the host that its workers' cards advertise, or `name`."""
    key: bytes = field(repr=False)
    name: str = ""
    """Which certificates of all processes bear: each is held to it, whatever its host. Empty: a worker's
    names its host, and a caller's may bear any name."""
    files: Files | None = field(default=None, repr=False, compare=False)
    """Where the texts come from; None: they stay as they are."""

    @classmethod
    def read(cls, ca: Path, cert: Path, key: Path, name: str = "") -> Tls:
        """OSError: a file cannot be read."""
        found = cls(ca.read_bytes(), cert.read_bytes(), key.read_bytes(), name)
        return replace(found, files=Files(ca, cert, key, found))

    def now(self) -> Tls:
        """As its files are by now; as they last were, where they are none."""
        return self if self.files is None else self.files.read()

    def server(self) -> ssl.SSLContext:
        """For sockets of our own: whoever connects must show a certificate of the authority. OSError. Whether
        that bears the fleet's name is for the listener to ask (`admits`)."""
        context = self._filled(ssl.PROTOCOL_TLS_SERVER)
        if self.files is not None:
            held = [(self, context)]

            def renew(connection: ssl.SSLObject, name: str, first: ssl.SSLContext) -> None:
                tls = self.now()
                if tls != held[0][0]:
                    held[0] = (tls, tls._filled(ssl.PROTOCOL_TLS_SERVER))
                connection.context = held[0][1]

            # Called in each handshake, also where the caller names nobody.
            context.sni_callback = renew
        return context

    def client(self) -> ssl.SSLContext:
        """The other end, for one connection: the certificate shown must also bear `expects`. OSError."""
        return self.now()._filled(ssl.PROTOCOL_TLS_CLIENT)

    def expects(self, host: str) -> str:
        """What the certificate that `host` shows must name."""
        return self.name or host

    def admits(self, names: Iterable[str]) -> bool:
        """Whether a caller whose certificate bears these names may ask. `*` stands for one label."""
        if not self.name:
            return True
        wanted = self.name.lower()
        any_of_them = f"*.{wanted.partition('.')[2]}"
        return any(one.lower() in (wanted, any_of_them) for one in names)

    def _filled(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.ca.decode())
        _load_pair(context, self.cert, self.key)
        return context


class Files:
    """What was last read of them that is of use."""

    def __init__(self, ca: Path, cert: Path, key: Path, first: Tls) -> None:
        self._paths = (ca, cert, key)
        self._last = first
        self._refused: tuple[bytes, ...] = ()

    def read(self) -> Tls:
        """The last ones where these are none, such as a new certificate beside an old key: whoever writes the
        three is not done yet."""
        last = self._last
        try:
            ca, cert, key = texts = tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            log.warning("TLS goes on with what was read before: %s", error)
            return last
        if texts in ((last.ca, last.cert, last.key), self._refused):
            return last
        found = replace(last, ca=ca, cert=cert, key=key, files=self)
        try:
            found._filled(ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ValueError) as error:
            self._refused = texts
            log.warning("TLS goes on with what was read before: %s: %s", self._paths[1], error)
            return last
        self._last = found
        log.info("TLS: %s was renewed", self._paths[1])
        return found


def names_in(certificate: dict[str, object] | None) -> list[str]:
    """Those that a certificate bears, as `getpeercert` tells it."""
    found = (certificate or {}).get("subjectAltName", ())
    assert isinstance(found, tuple)
    return [value for kind, value in found if kind == "DNS"]


def _load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """OpenSSL's loader wants a file: this one is memory, and its name only this process's. OSError."""
    held = os.memfd_create("tls")
    try:
        os.write(held, cert.rstrip() + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)


def renewed(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Looks in each handshake whether the files of a server's context are others by now; from the next one on
    it shows what they say. Files that are of no use change nothing."""
    held = [(cert.read_bytes(), key.read_bytes())]

    def look(connection: ssl.SSLObject, name: str, shown: ssl.SSLContext) -> None:
        try:
            pair = (cert.read_bytes(), key.read_bytes())
            if pair == held[0]:
                return
            held[0] = pair
            # A context is of no use after a pair that is none: they are tried in another one.
            _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *pair)
            _load_pair(context, *pair)
            log.info("TLS: %s was renewed", cert)
        except (OSError, ValueError) as error:
            log.warning("TLS goes on with what was read before: %s: %s", cert, error)

    context.sni_callback = look


def client_context(ca: Path, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """For a client that trusts `ca` alone, and shows the certificate if there is one. OSError."""
    context = ssl.create_default_context(cafile=str(ca))
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context
