"""HTTP/1.1 answers and the events in them, from bytes cut anywhere. Pure.

A client that measures a stream by the token has a few microseconds for each event; general clients take tens.
"""

from __future__ import annotations

from collections.abc import Iterable

_HEAD_LIMIT = 64 * 1024
_LINE_LIMIT = 16 * 1024 * 1024


class BadAnswer(ValueError):
    """What came is not HTTP/1.1 as it is written (RFC 9112)."""


class Answer:
    """One response. `feed` takes bytes as they come and gives back the body's, without its framing."""

    __slots__ = ("_buffer", "_left", "_state", "done", "headers", "keep", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """By name in small letters; of several of one name, the last."""
        self.keep = True
        """Whether the connection serves a next request after this one."""
        self.done = False
        self._buffer = b""
        self._state = "head"
        self._left = 0

    @property
    def begun(self) -> bool:
        """Whether any of it has come."""
        return self._state != "head" or bool(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Raises `BadAnswer`. Bytes behind the end are an error too: nobody asked for them."""
        if self._state == "head":
            self._buffer += data
            data = self._head()
            if self._state == "head":
                return b""
        if self._state == "chunks":
            return self._chunks(data)
        if self._state == "length":
            self._left -= len(data)
            if self._left < 0:
                raise BadAnswer("more bytes than its content-length says")
            self.done = not self._left
        elif self._state == "over" and data:
            raise BadAnswer("bytes behind the end of an answer")
        return data

    def closed(self) -> bool:
        """The connection has ended; whether the answer is whole."""
        if self._state == "close":
            self.done = True
        return self.done

    def _head(self) -> bytes:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise BadAnswer("a head without an end")
            return b""
        lines = self._buffer[:end].split(b"\r\n")
        rest = self._buffer[end + 4 :]
        self._buffer = b""
        version, _, status = lines[0].partition(b" ")
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status[:3].isdigit():
            raise BadAnswer(f"no status line of HTTP/1.1: {lines[0][:80]!r}")
        self.status = int(status[:3])
        if 100 <= self.status < 200:
            # An interim answer; the real one follows.
            self._buffer = rest
            return self._head()
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadAnswer(f"no header: {line[:80]!r}")
            self.headers[name.strip().lower()] = value.strip()
        said = self.headers.get(b"connection", b"").lower()
        self.keep = b"close" not in said and (version == b"HTTP/1.1" or b"keep-alive" in said)
        length = self.headers.get(b"content-length")
        if b"chunked" in self.headers.get(b"transfer-encoding", b"").lower():
            self._state = "chunks"
        elif self.status in (204, 304) or length == b"0":
            self._state, self.done = "over", True
        elif length is None:
            self._state, self.keep = "close", False
        elif length.isdigit():
            self._state, self._left = "length", int(length)
        else:
            raise BadAnswer(f"content-length is {length[:40]!r}")
        return rest

    def _chunks(self, data: bytes) -> bytes:
        """`_left` is what is missing of a chunk with the line break behind it; 0: a size line is next."""
        body: list[bytes] = []
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        at, size, left = 0, len(data), self._left
        while at < size:
            if self.done:
                raise BadAnswer("bytes behind the end of an answer")
            if left > 2:
                taken = data[at : at + left - 2]
                body.append(taken)
                at += len(taken)
                left -= len(taken)
            elif left > 0:
                if size - at < left:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise BadAnswer("a chunk that does not end where it says")
                at, left = at + 2, 0
            else:
                end = data.find(b"\r\n", at)
                if end < 0:
                    if size - at > _HEAD_LIMIT:
                        raise BadAnswer("a size of a chunk without an end")
                    break
                line = data[at:end]
                at = end + 2
                if left == 0:
                    left = _chunk_size(line) + 2
                    if left == 2:
                        left = -1  # the last chunk: trailers, then an empty line
                elif not line:
                    self.done = True
        self._left, self._buffer = left, data[at:]
        return b"".join(body)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        if not digits.isalnum():
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadAnswer(f"{line[:40]!r} is no size of a chunk") from None


class Events:
    """The data lines of server-sent events. One line is one event there, as every such server writes it."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """What stands behind `data:` in each line that has come whole."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LINE_LIMIT:
            raise BadAnswer("a line of an event stream without an end")
        # A break by \r alone is possible by the book, and written by nobody.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def closed(self) -> Iterable[bytes]:
        """The last line, where the stream ended without a line break."""
        rest, self._rest = self._rest, b""
        return [rest[5:].strip()] if rest.startswith(b"data:") else []
