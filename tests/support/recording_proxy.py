"""A proxy between an operator and the API server: it sees every call, and can decide when the operator dies."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web
from kubernetes import client, config

_HOP_BY_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})

Hook = Callable[[str, str], None]
Answered = Callable[[str, str, int], None]


class RecordingProxy:
    """Forwards calls to the cluster that KUBECONFIG names, with the rights of a token.

    `before` and `after` are called around each writing call except those to leases, with its method and path; `after`
    also gets the status of the answer. An exception from either ends the connection without an answer.
    A watch of a plural in `silent` stays open but delivers nothing; `watched` has the plurals of all watches so far.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self.before: Hook = lambda method, path: None
        self.after: Answered = lambda method, path, status: None
        self.silent: set[str] = set()
        self.watched: set[str] = set()
        self.url = ""
        self._configuration = client.Configuration()
        config.load_config(client_configuration=self._configuration)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()

    def kubeconfig(self, folder: Path) -> Path:
        """Writes a kubeconfig that points to the proxy."""
        cluster = {"name": "proxy", "cluster": {"server": self.url}}
        context = {"name": "proxy", "context": {"cluster": "proxy", "user": "nobody"}}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "users": [{"name": "nobody", "user": {"username": "nobody", "password": "none"}}],
            "contexts": [context],
            "current-context": "proxy",
        }
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(document))
        return file

    def run(self) -> None:
        """Serves until `stop`."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    def wait(self) -> None:
        """Returns once it serves."""
        assert self._ready.wait(20)

    def stop(self) -> None:
        """Stops serving."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        trust = ssl.create_default_context(cafile=self._configuration.ssl_ca_cert)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
            self._trust = trust
            application = web.Application(client_max_size=1 << 24)
            application.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stopping.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        counts = request.method in _WRITES and "/leases" not in request.path
        if counts:
            self.before(request.method, request.path)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        headers["Authorization"] = f"Bearer {self._token}"
        async with self._session.request(
            request.method,
            self._configuration.host + request.path_qs,
            headers=headers,
            data=await request.read() or None,
            ssl=self._trust,
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            if counts:
                await answer.read()
                self.after(request.method, request.path, answer.status)
            await response.prepare(request)
            if counts:
                await response.write(await answer.read())
            else:
                watched = request.path.rpartition("/")[2] if "watch" in request.query else ""
                self.watched.add(watched)
                dead = False
                async for chunk in answer.content.iter_any():
                    dead = dead or watched in self.silent
                    if not dead:
                        await response.write(chunk)
            await response.write_eof()
            return response


@contextmanager
def recording_proxy(token: str) -> Iterator[RecordingProxy]:
    """Serves in a thread while the body runs."""
    proxy = RecordingProxy(token)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    proxy.wait()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(20)
