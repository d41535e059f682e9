"""The page in a real browser, before a coordinator whose target waits where a test wants it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted.target import ScriptedTarget
from tests.support.services.browser import Browser, browser
from tests.support.services.coordinator_harness import Harness, running
from tests.support.services.faults import eventually
from tests.support.services.gateways import gateway, post, raw_request
from tests.support.services.key_files import hash_key

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


class Relay:
    """Carries bytes to a port here, until it is cut."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Break all connections, and take no more."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, far_writer]
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


CONTRAST = """
const parsed = (color) => color.match(/[\\d.]+/g).map(Number);
const light = (color) => {
  const shares = color.slice(0, 3).map((c) => c / 255);
  const linear = shares.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = parsed(getComputedStyle(at).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  }
};
const worst = [21, ""];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || element.disabled || !element.getClientRects().length) continue;
  const [ink, paper] = [light(parsed(getComputedStyle(element).color)), light(behind(element))];
  const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  if (ratio < worst[0]) worst.splice(0, 2, ratio, element.outerHTML.slice(0, 80));
}
return worst;
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """The browser, which complains of nothing but refused requests."""
    chromium.show_as()
    yield chromium
    assert [said for said in chromium.complaints() if "Failed to load resource" not in said] == []


async def seen(look: Callable[[], Any]) -> Any:
    """What a function that talks to the browser returns; the servers run meanwhile."""
    return await asyncio.to_thread(look)


async def is_idle(harness: Harness) -> None:
    async def idle() -> bool:
        return harness.metric("requests_running") == 0

    await eventually(idle, "no request runs")


def held_at(limit: int) -> ScriptedTarget:
    """A target that gives so many tokens and then waits."""
    target = ScriptedTarget()
    target.limit = limit
    return target


async def test_text_streams_until_it_is_stopped_by_the_keyboard(page: Browser) -> None:
    async with running([held_at(20)]) as harness, gateway(harness.address) as one:

        def look() -> None:
            page.open(one.url)
            page.fill("#prompt", "the <img src=x onerror=alert(1)> fox")
            page.press("Control", "Enter")
            page.until("document.querySelector('[data-figure=tokens]')?.textContent === '20'")
            assert page.run("return document.querySelector('#send').disabled;")
            assert (
                page.run("return document.querySelectorAll('.output .t').length;") >= 15
            )  # some are parts of characters
            assert page.text(".output").startswith("the <img src=x onerror=alert(1)> fox")
            assert page.run("return document.querySelectorAll('img').length;") == 0
            page.press("Escape")
            page.until("document.querySelector('#status').textContent.startsWith('Stopped')")
            assert "Stopped after 20 tokens" in page.text(".ending")
            assert page.run("return document.querySelectorAll('.run').length;") == 1  # no second one

        await seen(look)
        await is_idle(harness)


async def test_a_key_is_asked_for_and_kept_nowhere(page: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "k", "tenant": "me", "sha256": hash_key("my-key")}]}))
    async with running([ScriptedTarget()], api_keys_file=keys) as harness, gateway(harness.address) as one:

        def look() -> None:
            page.open(one.url)
            page.click("#send")
            page.until("document.querySelector('#error').textContent.includes('API key')")
            assert page.run("return document.activeElement.id;") == "key"
            assert page.run("return document.activeElement.getAttribute('aria-invalid');") == "true"
            page.fill("#key", "my-key")
            page.fill("#max_tokens", "5")
            page.click("#send")
            page.until("document.querySelector('#status').textContent.startsWith('Done')")
            assert page.text("#error") == ""
            assert page.run("return [localStorage.length, sessionStorage.length, document.cookie];") == [0, 0, ""]
            page.open(one.url)
            assert page.run("return document.querySelector('#key').value;") == ""

        await seen(look)


async def test_a_field_that_is_refused_is_named_and_focused(page: Browser) -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one:

        def look() -> None:
            page.open(one.url)
            for field, value, said in (
                ("temperature", "200", "temperature"),
                ("min_p", "7", "min_p"),
                ("stop_strings", "\n".join(map(str, range(99))), "stop"),
                ("seed", "many", "seed"),
            ):
                page.fill(f"#{field}", value)
                page.click("#send")
                page.until(f"document.querySelector('#error').textContent.includes('{said}')")
                assert page.run("return document.activeElement.id;") == field
                page.fill(f"#{field}", "1" if field == "temperature" else "")

        await seen(look)


async def test_a_full_server_says_when_to_try_again(page: Browser) -> None:
    async with running([held_at(3)], max_running=1, max_waiting=0) as harness, gateway(harness.address) as one:
        body = json.dumps({"prompt": "x", "max_tokens": 9, "stream": True}).encode()
        reader, writer = await raw_request(one, post("/v1/completions", body))
        await reader.readuntil(b"data: ")

        def look() -> None:
            page.open(one.url)
            page.click("#send")
            page.until("document.querySelector('#error').textContent.startsWith('Too many requests')")
            page.until("document.querySelector('#countdown').textContent.startsWith('Try again in')")
            page.until("document.querySelector('#error').textContent.endsWith('You can try again now.')")

        await seen(look)
        writer.close()


async def test_a_connection_that_is_lost_is_told_and_what_came_is_kept(page: Browser) -> None:
    async with running([held_at(20)]) as harness, gateway(harness.address) as one, Relay(one.port) as relay:

        def look() -> None:
            page.open(f"http://127.0.0.1:{relay.port}/")
            page.click("#send")
            page.until("document.querySelector('[data-figure=tokens]')?.textContent === '20'")

        def look_again() -> None:
            page.until("document.querySelector('#error').textContent.startsWith('The connection was lost')")
            assert page.text("[data-figure=tokens]") == "20"
            page.click("#send")
            page.until("document.querySelector('#error').textContent.startsWith('The server cannot be reached')")

        await seen(look)
        relay.cut()
        await seen(look_again)


async def test_it_fits_a_phone_and_reads_well_in_light_and_dark(page: Browser) -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one:

        def look() -> None:
            papers = []
            for dark in (False, True):
                page.show_as(width=360, height=740, dark=dark)
                page.open(one.url)
                assert not page.run("return document.querySelector('#settings').open;")
                page.fill("#prompt", "x" * 300)
                page.click("#send")
                page.until("document.querySelector('#status').textContent.startsWith('Done')")
                page.run("document.querySelector('#settings').open = true; document.querySelector('.bars').focus();")
                assert page.run("return document.documentElement.scrollWidth;") <= 360
                assert page.run("return document.querySelector('#send').offsetHeight;") >= 40
                ratio, where = page.run(CONTRAST)
                assert ratio >= 4.5, where
                papers.append(page.run("return getComputedStyle(document.documentElement).backgroundColor;"))
            assert papers[0] != papers[1]

        await seen(look)


async def test_everything_can_be_reached_by_keyboard_and_is_named(page: Browser) -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one:

        def look() -> None:
            page.open(one.url)
            page.fill("#max_tokens", "6")
            page.run("document.querySelector('#send').focus();")
            page.press("Enter")
            page.until("document.querySelector('#status').textContent.startsWith('Done')")
            page.until("document.activeElement.id === 'send'")
            page.run("document.activeElement.blur(); getSelection().removeAllRanges(); document.body.focus();")
            reached = set()
            for _ in range(40):
                page.press("Tab")
                focused = "document.activeElement"
                reached.add(page.run(f"return {focused}.id || {focused}.className || {focused}.tagName;"))
            wanted = {
                "prompt",
                "compare",
                "send",
                "model",
                "temperature",
                "seed",
                "stop_strings",
                "key",
                "output",
                "bars",
            }
            assert wanted <= reached
            page.run("document.querySelector('.bars').focus();")
            page.press("End")
            chosen = page.run("return document.querySelector('.bars').getAttribute('aria-activedescendant');")
            label = page.run("return document.getElementById(arguments[0]).getAttribute('aria-label');", chosen)
            assert label.startswith("Round 6 of 6: 1 token")
            assert page.text(".round h3") == label
            page.press("ArrowLeft")
            assert page.text(".round h3").startswith("Round 5 of 6")
            unnamed = """[...document.querySelectorAll('input, select, textarea, button, [tabindex]')].filter((one) =>
                one.getClientRects().length && !one.labels?.length && !one.textContent.trim()
                && !one.getAttribute('aria-label')).map((one) => one.outerHTML)"""
            assert page.run(f"return {unnamed};") == []

        await seen(look)


async def test_the_page_is_sent_once_and_not_at_all_where_it_is_switched_off() -> None:
    async with gateway("127.0.0.1:1") as one, one.http() as client:
        first = await client.get("/")
        assert (first.status_code, first.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert first.headers["cache-control"] == "no-cache" and first.headers["x-content-type-options"] == "nosniff"
        again = await client.get("/", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        head = await client.head("/")
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", first.headers["etag"])
        assert (await client.post("/")).status_code == 405
    async with gateway("127.0.0.1:1", page=False) as one, one.http() as client:
        assert (await client.get("/")).status_code == 404
