import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lmlive.clock import MonotonicClock
from lmlive.config import ServerConfig
from lmlive.errors import StartError
from lmlive.server.http import http_server
from lmlive.server.http.http_server import HttpServer
from lmlive.server.server import LivenessServer
from tests.cli.fake_router import answering, fake_router


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def get(browser: aiohttp.ClientSession, url: str, method: str = "GET") -> tuple[int, Any]:
    async with browser.request(method, url) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


def http_beside(url: str) -> HttpServer:
    return HttpServer(lambda: lambda: {"server": {}}, lambda: url, "127.0.0.1", 0, MonotonicClock())


async def test_a_real_server_shows_its_status_and_its_health(run_dir: Path, browser: aiohttp.ClientSession) -> None:
    async with LivenessServer(ServerConfig(run_dir=run_dir, http="127.0.0.1:0", pool_bytes="1MiB")) as server:
        assert server.http_url is not None
        status, document = await get(browser, f"{server.http_url}/status")
        assert status == 200
        now = server.status().to_dict()
        assert document.keys() == now.keys()
        assert document["server"]["epoch"] == json.loads(json.dumps(now))["server"]["epoch"]

        frames = server.status().wire.frames
        status, document = await get(browser, f"{server.http_url}/healthz")
        assert (status, document["status"]) == (200, "ok")
        assert document["ping_ms"] > 0
        assert server.status().wire.frames == frames + 1  # it came through the ROUTER


async def test_what_is_not_there_is_told_in_json(run_dir: Path, browser: aiohttp.ClientSession) -> None:
    http = http_beside(f"ipc://{run_dir}/none")
    base = await http.start()
    try:
        for path in ("/", "/metrics", "/status/", "/../etc/passwd", "/healthz%00"):
            status, document = await get(browser, base + path)
            assert (status, list(document)) == (404, ["error"])
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with browser.request(method, f"{base}/status", data=b"x" * 4096) as response:
                assert response.status == 405
                assert "GET" in response.headers["Allow"]
                assert "GET /status" in (await response.json())["error"]
    finally:
        await http.close()


async def test_a_status_that_fails_is_told_without_its_text(
    run_dir: Path, browser: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    http = HttpServer(
        lambda: lambda: {"secret": {1, 2}}, lambda: f"ipc://{run_dir}/none", "127.0.0.1", 0, MonotonicClock()
    )
    base = await http.start()
    try:
        status, document = await get(browser, f"{base}/status")
    finally:
        await http.close()
    assert (status, list(document)) == (500, ["error"])
    assert "secret" not in document["error"]
    assert "http failed path=/status" in caplog.text


async def test_a_server_that_does_not_answer_is_unhealthy(
    run_dir: Path, browser: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "PING_TIMEOUT", 0.1)
    url = f"ipc://{run_dir}/router.sock"
    http = http_beside(url)
    base = await http.start()
    try:
        status, document = await get(browser, f"{base}/healthz")
        assert (status, document) == (503, {"status": "unavailable", "reason": f"no server at {url}"})

        usual = answering()
        mute = True
        with fake_router(run_dir, lambda header: None if mute else usual(header)):
            status, document = await get(browser, f"{base}/healthz")
            assert (status, document["status"]) == (503, "unavailable")
            assert "did not answer PING within 0.1 s" in document["reason"]
            mute = False
            monkeypatch.setattr(http_server, "PING_TIMEOUT", 5.0)
            assert (await get(browser, f"{base}/healthz"))[0] == 200
    finally:
        await http.close()


async def test_many_probes_share_one_ping(run_dir: Path, browser: aiohttp.ClientSession) -> None:
    pings = 0
    usual = answering()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def respond(header: Any) -> bytes | None:
        nonlocal pings
        pings += 1
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return usual(header)

    with fake_router(run_dir, respond) as url:
        http = http_beside(url)
        base = await http.start()
        try:
            probes = [asyncio.ensure_future(get(browser, f"{base}/healthz")) for _ in range(8)]
            assert (await get(browser, f"{base}/status"))[0] == 200  # not kept waiting by them
            gate.set()
            answers = await asyncio.gather(*probes)
        finally:
            gate.set()
            await http.close()
    assert {status for status, _ in answers} == {200}
    assert pings < 8


async def test_a_probe_that_goes_away_disturbs_nobody(run_dir: Path, browser: aiohttp.ClientSession) -> None:
    usual = answering()
    asked = asyncio.Event()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def respond(header: Any) -> bytes | None:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return usual(header)

    with fake_router(run_dir, respond) as url:
        http = http_beside(url)
        base = await http.start()
        try:
            probe = asyncio.ensure_future(get(browser, f"{base}/healthz"))
            await asked.wait()
            probe.cancel()
            gate.set()
            assert (await get(browser, f"{base}/healthz"))[0] == 200
        finally:
            gate.set()
            await http.close()


@pytest.mark.parametrize(
    "request_bytes",
    [bytes(range(128, 256)), b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"GET /status HTTP/9.x\r\n\r\n"],
    ids=["bytes", "long", "version"],
)
async def test_what_is_no_http_is_a_quiet_line_in_the_log(
    run_dir: Path, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lmlive")
    http = http_beside(f"ipc://{run_dir}/none")
    base = await http.start()
    try:
        host, port = base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_bytes + b"\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.")
        writer.close()
        await writer.wait_closed()
    finally:
        await http.close()
    [line] = [record for record in caplog.records if record.name.startswith("lmlive")]
    assert (line.levelno, line.exc_info) == (logging.DEBUG, None)
    assert "http refused" in line.getMessage()
    assert "\n" not in line.getMessage()


async def test_where_many_connections_stand_the_oldest_goes_for_a_new_one(
    run_dir: Path, browser: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmlive.server.http.http_server._MOST_CONNECTIONS", 4)
    async with LivenessServer(ServerConfig(run_dir=run_dir, http="127.0.0.1:0", pool_bytes="1MiB")) as server:
        assert server.http_url is not None
        host, port = server.http_url.removeprefix("http://").split(":")
        half = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\n")
            half.append((reader, writer))
        async with browser.get(f"{server.http_url}/healthz") as answer:
            assert answer.status == 200
        for reader, _ in half[:3]:
            assert await reader.read() == b""
        for _, writer in half:
            writer.close()


async def test_without_descriptors_a_connection_is_closed_at_once(
    run_dir: Path, browser: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LivenessServer(ServerConfig(run_dir=run_dir, http="127.0.0.1:0", pool_bytes="1MiB")) as server:
        monkeypatch.setattr("lmlive.server.http.http_server.spare_descriptors", lambda: False)
        with pytest.raises(aiohttp.ClientError):
            await browser.get(f"{server.http_url}/healthz")


async def test_a_port_in_use_is_a_failed_start(run_dir: Path) -> None:
    first = http_beside(f"ipc://{run_dir}/none")
    port = int((await first.start()).rpartition(":")[2])
    try:
        second = HttpServer(lambda: dict, lambda: "", "127.0.0.1", port, MonotonicClock())
        with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
            await second.start()
        await second.close()
    finally:
        await first.close()
        await first.close()


async def test_ipv6_is_written_with_brackets(run_dir: Path, browser: aiohttp.ClientSession) -> None:
    http = HttpServer(lambda: dict, lambda: "", "::1", 0, MonotonicClock())
    try:
        base = await http.start()
    except StartError:
        pytest.skip("no IPv6 here")
    try:
        assert base.startswith("http://[::1]:")
        assert (await get(browser, f"{base}/status"))[0] == 200
    finally:
        await http.close()
