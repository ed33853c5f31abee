"""An upstream that keeps what arrives, and a judge of what arrived. Plain sockets: nothing in between tidies it up."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Number = tuple[str, str]
"""("int" or "float", the text as it stands in the JSON)."""


@dataclass(frozen=True)
class Arrived:
    """One request as the upstream saw it."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What the client got: status 0 where the connection ended without an answer."""

    status: int
    body: bytes
    seconds: float


class Recorder:
    """Answers 200 to every request and keeps the last one. A context manager; `port` is where it listens."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self._arrived: dict[str, Arrived] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def take(self, path: str) -> Arrived | None:
        """The last request on that path, once."""
        return self._arrived.pop(path, None)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = _Reader(connection)
        with connection:
            try:
                while (arrived := reader.request()) is not None:
                    self._arrived[arrived.path] = arrived
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            except (OSError, ValueError):
                return

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Reader:
    """HTTP/1.1 messages off one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = bytearray()

    def _more(self) -> bool:
        data = self._connection.recv(1 << 20)
        self._left += data
        return bool(data)

    def _line(self) -> bytes:
        while (at := self._left.find(b"\r\n")) < 0:
            if not self._more():
                raise ValueError("the connection ended in a line")
        line = bytes(self._left[:at])
        del self._left[: at + 2]
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self._left) < size:
            if not self._more():
                raise ValueError("the connection ended in a body")
        data = bytes(self._left[:size])
        del self._left[:size]
        return data

    def head(self) -> tuple[str, list[tuple[str, str]]]:
        """The start line and the headers."""
        start = self._line().decode("latin-1")
        headers = []
        while line := self._line().decode("latin-1"):
            name, _, value = line.partition(":")
            headers.append((name.lower(), value.strip()))
        return start, headers

    def body(self, headers: list[tuple[str, str]]) -> bytes:
        """The body by its framing."""
        fields = dict(headers)
        if fields.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self._line(), 16):
                parts.append(self._exactly(size))
                self._line()
            self._line()
            return b"".join(parts)
        return self._exactly(int(fields.get("content-length", "0")))

    def request(self) -> Arrived | None:
        if not self._left and not self._more():
            return None
        start, headers = self.head()
        return Arrived(start.split(" ")[1], headers, self.body(headers))


class Client:
    """One keep-alive connection that sends one request after another."""

    def __init__(self, port: int, timeout: float = 60) -> None:
        self._port, self._timeout = port, timeout
        self._socket: socket.socket | None = None

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send it and wait for the answer."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=self._timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = [f"POST {path} HTTP/1.1", "host: bench", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
        started = time.monotonic()
        try:
            self._socket.sendall(head)
            self._socket.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before the end: the answer says why
        try:
            reader = _Reader(self._socket)
            start, fields = reader.head()
            status = int(start.split(" ")[1])
            answer = reader.body(fields)
        except (OSError, ValueError, IndexError):
            status, answer, fields = 0, b"", []
        elapsed = time.monotonic() - started
        if status != 200 or ("connection", "close") in fields:
            self.close()
        return Answer(status, answer, elapsed)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


TRAPS: dict[str, Any] = {
    "seed": 9007199254740993,
    "stop": [],
    "logit_bias": {},
    "presence_penalty": 1.0,
    "zeta": 1,
    "alpha": 2,
}
"""Members that decoding and encoding again is known to change; put into every probed body, at its top level."""


def trapped(data: bytes) -> bytes:
    """The body with TRAPS in front of its own members."""
    own = data.lstrip()[1:]
    return json.dumps(TRAPS, separators=(",", ":")).encode()[:-1] + (b"," if own.lstrip()[:1] != b"}" else b"") + own


def faults(sent: bytes, answer: Answer, arrived: Arrived | None, priority: int) -> list[str]:
    """What is wrong with what arrived, in words; empty where it is right.

    Right: answered with 200, one top-level `priority` with the header's value (a number or a text: vLLM takes both),
    every other member there with its value, numbers with their text, in its order. White space and escapes may differ.
    """
    if answer.status != 200:
        return [f"refused: {answer.status}" if answer.status else "no answer"]
    if arrived is None:
        return ["nothing arrived"]
    try:
        before, after = _parsed(sent), _parsed(arrived.body)
    except ValueError:
        return ["not JSON any more"]
    found: list[str] = []
    values = [value for name, value in after.members if name == "priority"]
    if values not in ([("int", str(priority))], [str(priority)]):
        found.append("priority not moved" if not values else "priority wrong")
    _compare(before.without("priority"), after.without("priority"), found)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Object:
    """Members in their order: a dict would hide duplicates, and a list would equal an array's."""

    members: list[tuple[str, Any]]

    def without(self, name: str) -> "_Object":
        return _Object([pair for pair in self.members if pair[0] != name])


def _parsed(data: bytes) -> _Object:
    value = json.loads(
        data,
        object_pairs_hook=_Object,
        parse_int=lambda text: ("int", text),
        parse_float=lambda text: ("float", text),
    )
    if not isinstance(value, _Object):
        raise ValueError("no object")
    return value


def _compare(before: Any, after: Any, found: list[str]) -> None:
    """Add what differs to `found`. Numbers are (kind, text) tuples, so that 1 and 1.0 differ."""
    if before == after:
        return
    if isinstance(before, _Object) and isinstance(after, _Object):
        names, names_after = [name for name, _ in before.members], [name for name, _ in after.members]
        if sorted(names) != sorted(names_after):
            found.append("members lost or added")
            return
        if names != names_after:
            found.append("order changed")
        values = dict(after.members)
        for name, value in before.members:
            _compare(value, values[name], found)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            _compare(one, other, found)
    elif isinstance(before, tuple) and isinstance(after, tuple):
        large = before[0] == "int" and len(before[1]) > 15
        found.append("large integers changed" if large else f"{before[1]} became {after[1]}"[:40])
    elif before == [] and after == _Object([]):
        found.append("[] became {}")
    elif before == _Object([]) and after == []:
        found.append("{} became []")
    else:
        found.append("values changed")
