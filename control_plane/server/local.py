"""The control plane inside `vllm-priority run --policy FILE`: it hands a changed policy to the running Envoy."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.policy.restart import listed, needing_restart
from control_plane.server.discovery_request import decode
from control_plane.server.policy_file import PolicyFile

_STATUS = {"found": 200, "not_modified": 304, "not_found": 404, "busy": 503}


class LocalControlPlane:
    """Serves the filter's configuration on a free loopback port, as a context manager.

    Envoy cannot be given a new configuration on its command line or by a signal, and it may have no folder to watch a
    file in, so it polls this server as it polls `vllm-priority serve`.
    """

    def __init__(self, path: Path) -> None:
        """Load the policy file. PolicyError if it is not valid."""
        self._file = file = PolicyFile(path)
        self._started = file.snapshot.policies

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                try:
                    request = decode("extension_configs", body)
                except BadInput as error:
                    self.send_error(400, str(error))
                    return
                response = file.snapshot.respond(request.client, request.version)
                self.send_response(_STATUS[response.state])
                self.send_header("content-length", str(len(response.body)))
                self.end_headers()
                self.wfile.write(response.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address("127.0.0.1", self._server.server_port)

    def reload(self) -> str:
        """Read the policy file again, and return what became of it in one line. An invalid file changes nothing."""
        loaded = self._file.reload()
        if self._file.problem is not None:
            return f"{self._file.problem.rstrip('.')}. The sidecar keeps its last policy."
        if loaded is None:
            return f"{self._file.path} has not changed"
        found = needing_restart(self._started, self._file.snapshot.policies)
        keys = tuple(dict.fromkeys(key for keys in found.values() for key in keys))
        restart = f". Restart the sidecar for {listed(keys)}" if keys else ""
        return f"loaded {self._file.path}; new requests follow it within 2 s{restart}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
