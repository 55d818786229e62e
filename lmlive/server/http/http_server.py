"""``GET /status`` and ``GET /healthz`` on a loopback port, beside the server on its loop.

``/status`` is the same document as STATUS. ``/healthz`` proves that a worker would be answered: it sends a real PING
through the ROUTER, so it is green only if the socket, the loop and the normal lane all work. Nothing here changes
anything, and nothing here is needed by a worker.

Loop thread, except what its docstring says otherwise. This module imports aiohttp (extra ``ops``): import it only
where HTTP was asked for.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lmlive.clock import Clock
from lmlive.config.keys import ClientKeys
from lmlive.errors import LMLiveError, StartError
from lmlive.protocol.messages import parse_reply
from lmlive.protocol.verbs import Verb
from lmlive.server.asker import Asker
from lmlive.server.turnstile import spare_descriptors

log = logging.getLogger("lmlive.server")

PING_TIMEOUT: Final = 1.0
"""Seconds after which ``/healthz`` calls an unanswered PING a failure."""
_SHUTDOWN_SECONDS: Final = 0.5
_LONGEST_BODY: Final = 1024
_MOST_CONNECTIONS: Final = 64
"""Connections beyond which the oldest goes: half a request must not hold a descriptor and its memory for ever."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """The HTTP side of one server.

    Args:
        status: Reads the server's status on the loop; gives what makes the document of it, in a thread.
        url: Gives the address of the server's own ROUTER; called on the loop.
        host: Loopback address to bind.
        port: Port to bind; 0 picks one.
        clock: What timeouts are measured by.
        keys: With which the ROUTER lets us in; None: it needs none.
    """

    def __init__(
        self,
        status: Callable[[], Callable[[], dict[str, object]]],
        url: Callable[[], str],
        host: str,
        port: int,
        clock: Clock,
        *,
        keys: ClientKeys | None = None,
    ) -> None:
        self._status = status
        self._host = host
        self._port = port
        self._url = url
        self._probe = _Probe(clock, keys)
        self._probing: asyncio.Future[float] | None = None
        # One thread may wait for a PING while the other writes JSON, which takes a while for thousands of instances.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lmlive-http")
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._closed = False

    async def start(self) -> str:
        """Bind, and give the address.

        Raises:
            StartError: The address cannot be bound.
        """
        application = web.Application(middlewares=[_in_json], client_max_size=_LONGEST_BODY)
        application.router.add_get("/status", self._get_status)
        application.router.add_get("/healthz", self._get_healthz)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS, logger=_aiohttp_log)
        await runner.setup()
        self._runner = runner
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(partial(_admit, runner), self._host, self._port)
        except OSError as error:
            await self.close()
            address = f"{self._host}:{self._port}"
            raise StartError(f"http cannot bind {address} ({error.strerror}): choose another", http=address) from error
        port = self._listener.sockets[0].getsockname()[1]
        return f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"

    async def close(self) -> None:
        """Close all connections and end the threads; a PING on its way is waited for, at most its timeout."""
        if self._listener is not None:
            self._listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if not self._closed:
            self._closed = True
            closing = asyncio.get_running_loop().run_in_executor(self._threads, self._probe.close)
            self._threads.shutdown(wait=False)  # after what was submitted
            await closing

    async def _get_status(self, _: web.Request) -> web.Response:
        make = self._status()
        body = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: json.dumps(make()).encode())
        return web.Response(body=body, content_type="application/json", headers=_HEADERS)

    async def _get_healthz(self, _: web.Request) -> web.Response:
        try:
            ping_seconds = await asyncio.shield(self._ping())
        except LMLiveError as error:
            return _answer(503, {"status": "unavailable", "reason": str(error)})
        return _answer(200, {"status": "ok", "ping_ms": round(ping_seconds * 1000, 3)})

    def _ping(self) -> asyncio.Future[float]:
        """Start a PING, or join the one that is on its way: many probes cost no more than one."""
        if self._probing is None or self._probing.done():
            loop = asyncio.get_running_loop()
            self._probing = loop.run_in_executor(self._threads, self._probe.ping, self._url(), PING_TIMEOUT)
        return self._probing


def _admit(runner: web.AppRunner) -> asyncio.BaseProtocol:
    """Give what serves a new connection; where there are many, the one that came first goes for it."""
    server = runner.server
    if server is None or not spare_descriptors():
        return _Refusal()
    for oldest in server.connections[: 1 - _MOST_CONNECTIONS]:
        oldest.force_close()
    return server()


class _Refusal(asyncio.Protocol):
    """Hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.abort()


class _Probe:
    """A connection to our own ROUTER, kept from one PING to the next.

    Its methods run off the loop; the lock serves a close that meets a PING.
    """

    def __init__(self, clock: Clock, keys: ClientKeys | None) -> None:
        self._clock = clock
        self._keys = keys
        self._lock = threading.Lock()
        self._asker: Asker | None = None

    def ping(self, url: str, timeout: float) -> float:
        """Give how many seconds a PING took; off the loop."""
        with self._lock:
            if self._asker is None:
                self._asker = Asker(url, self._clock, self._keys)
            try:
                answer = self._asker.ask(Verb.PING, [None], timeout)
                parse_reply(Verb.PING, answer.payload)
            except LMLiveError:
                self._drop()
                raise
            return answer.seconds

    def close(self) -> None:
        """Close the connection; off the loop."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._asker is not None:
            self._asker.close()
            self._asker = None


def _is_ours(record: logging.LogRecord) -> bool:
    """Keep what the server did wrong; a peer that speaks no HTTP is worth a line for who looks for it."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        log.debug("http refused status=%d error=%s", error.code, " ".join(error.message.split())[:200])
        return False
    return True


_aiohttp_log = logging.getLogger("lmlive.server.http")
_aiohttp_log.addFilter(_is_ours)

_HEADERS: Final = {"Cache-Control": "no-store"}


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer in JSON also where there is nothing to serve."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        text = f"{error.reason}: there are GET /status and GET /healthz"
        return _answer(error.status, {"error": text}, **headers)
    except Exception:
        log.exception("http failed path=%s", request.path)
        return _answer(500, {"error": "the server failed on this request, see its log"})


def _answer(status: int, body: dict[str, object], **headers: str) -> web.Response:
    return web.json_response(body, status=status, headers={**_HEADERS, **headers})
