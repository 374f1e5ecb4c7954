"""A real S3 server on a loopback port, and a proxy before it that fails as stores do."""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIDfarandole", "s3cr3t/of+farandole"
SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server in a thread; yield its host and port."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"{host}:{port}"
    finally:
        server.stop()


Fault = str | None
"""``slow_down``, ``too_many``, ``error``, ``denied``, ``cut`` (within the answer) or ``drop``."""


@dataclass
class Proxy:
    """Passes requests for reading on, and notes them.

    `fault` is asked for each request: its method, path and number from 1 up.
    """

    target: str
    address: str = ""
    fault: Callable[[str, str, int], Fault] = lambda method, path, number: None
    latency_s: float = 0.0
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    max_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, method: str, within: str = "") -> int:
        """Return how many requests there were, of a method and for a path."""
        return sum(1 for what, path, _ in self.requests if what == method and within in path)

    def reset(self) -> None:
        with self.lock:
            self.requests.clear()
            self.faults.clear()
            self.max_in_flight = self.in_flight


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _any(self) -> None:
        proxy = self.proxy
        with proxy.lock:
            proxy.requests.append((self.command, self.path, self.headers.get("Range")))
            number = len(proxy.requests)
            proxy.in_flight += 1
            proxy.max_in_flight = max(proxy.max_in_flight, proxy.in_flight)
        try:
            self._answer(proxy.fault(self.command, self.path, number))
        finally:
            with proxy.lock:
                proxy.in_flight -= 1

    do_GET = do_HEAD = _any  # noqa: N815

    def _answer(self, fault: Fault) -> None:
        time.sleep(self.proxy.latency_s)
        if fault is not None:
            with self.proxy.lock:
                self.proxy.faults[fault] += 1
        if fault == "drop":
            self.close_connection = True
            return
        status, body = {
            "slow_down": (503, SLOW_DOWN),
            "too_many": (429, SLOW_DOWN),
            "error": (500, b""),
            "denied": (403, DENIED),
        }.get(fault or "", (0, b""))
        headers: list[tuple[str, str]] = []
        length = str(len(body))
        if not status:
            status, headers, body = self._pass_on()
            told = [value for name, value in headers if name.lower() == "content-length"]
            length = told[0] if self.command == "HEAD" and told else str(len(body))
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _pass_on(self) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.proxy.target, timeout=30)
        try:
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""


@contextlib.contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """Run a proxy before an S3 server."""
    proxy = Proxy(target)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", 0), handler)
    proxy.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def options(address: str, **more: object) -> dict[str, object]:
    """Return storage options for a server."""
    return {
        "access_key": KEY,
        "secret_key": SECRET,
        "endpoint_override": f"http://{address}",
        "region": "us-east-1",
        **more,
    }
