"""`fetch` reads from the approved address, within bounds, or says why not."""

import asyncio
import gzip
import ssl
from pathlib import Path

import pytest
from aiohttp import web

from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.fetch import BODY_BYTES_MAX, TEXT_CHARS_MAX, make_fetch
from culm.tools.web.http_fetch import LOOKUP_S, Network
from tests.certificates import make_certificate
from tests.support import WAIT_S, FakeClock, run_call
from tests.tools.conftest import ToolHarness, call_of, open_tool_harness, refused, run
from tests.tools.sites import FakeDns, cut_short, endless, open_site, redirect_to, respond_with


async def fetch(
    harness: ToolHarness, url: str, network: Network | None = None, **more: str | int
) -> CallResult:
    async with asyncio.timeout(WAIT_S):
        call = call_of("fetch", {"url": url, **more})
        return await run_call(make_fetch(harness.context, network), call)


async def planned(harness: ToolHarness, url: str, network: Network | None = None) -> CallPlan:
    plan = await make_fetch(harness.context, network).prepare(call_of("fetch", {"url": url}))
    assert isinstance(plan, CallPlan), plan
    return plan


async def test_a_private_address_is_shown_and_pinned_and_a_public_one_is_an_origin(
    harness: ToolHarness,
) -> None:
    names = FakeDns(
        a_example=("1.1.1.1", "1.0.0.1"), b_example=("10.0.0.1 1.1.1.1", "1.1.1.1 10.0.0.1")
    )
    network, root = Network(names.resolve), str(harness.context.paths.root)
    public = (await planned(harness, "https://A.example/x#y", network)).action
    params = {"url": "https://a.example/x", "format": "markdown", "timeout": 0}
    assert public == ResolvedAction(
        "fetch",
        "fetch",
        description="Fetch https://a.example/x",
        path=root,
        params=params,
        resolved={"url": "https://a.example/x"},
        coverage=("fetch:https://a.example:443",),
    )
    assert (await planned(harness, "https://a.example/x", network)).action == public
    private = (await planned(harness, "http://b.example:81", network)).action
    assert private == ResolvedAction(
        "fetch",
        "fetch",
        description="Fetch http://b.example:81/ at 10.0.0.1 (a private network)",
        path=root,
        params={**params, "url": "http://b.example:81/"},
        resolved={"url": "http://b.example:81/", "private": ["10.0.0.1"]},
        coverage=("fetch:b.example:81@10.0.0.1",),
        why="b.example is not on the public network: 10.0.0.1 (a private network)",
    )
    assert (await planned(harness, "http://b.example:81", network)).action.digest == private.digest


async def test_html_is_returned_as_markdown_text_or_html(harness: ToolHarness) -> None:
    page = '<p>Some <b>bold</b> <a href="/x">link</a>'
    async with open_site(
        respond_with(page, kind="text/html; charset=utf-8"), respond_with(page)
    ) as (at, _):
        url = f"http://{at}/"
        assert await fetch(harness, url) == CallResult(f"Some **bold** [link](http://{at}/x)")
        assert await fetch(harness, url, format="text") == CallResult("Some bold link")
        assert await fetch(harness, url, format="html") == CallResult(page)
        assert await fetch(harness, url + "1") == CallResult(page)


async def test_the_connection_uses_the_address_that_was_checked(harness: ToolHarness) -> None:
    async with open_site(respond_with("right")) as (at, seen):
        host, port = at.split(":")
        # A second lookup would return another address, where nothing listens.
        names = FakeDns(moving_example=(host, "127.0.0.9"))
        plan = await planned(harness, f"http://moving.example:{port}", Network(names.resolve))
        assert plan.action.coverage == (f"fetch:moving.example:{port}@127.0.0.1",)
        assert await run(plan) == CallResult("right")
        assert seen == ["moving.example /"]


async def test_a_redirect_to_an_unapproved_target_is_not_followed(
    harness: ToolHarness,
) -> None:
    async with (
        open_site(respond_with("secret")) as (other, seen),
        open_site(
            *(
                redirect_to("/1"),
                respond_with("end"),
                redirect_to(f"http://{other}/"),
                redirect_to("/3"),
            ),
            *(
                redirect_to("http://inner.example/"),
                redirect_to("file:///etc/passwd"),
                respond_with("", 302),
            ),
            redirect_to("/8"),
            redirect_to("http://user:pass@1.1.1.1/"),
        ) as (at, _),
    ):
        names = FakeDns(inner_example=("10.0.0.1",))
        network = Network(names.resolve)
        results = [await fetch(harness, f"http://{at}/{n}", network) for n in (0, *range(2, 8))]
    url = f"http://{at}/"
    unasked = "the redirect was not followed. Fetch that URL itself if it is wanted."
    kind = "127.0.0.1 (this machine)"
    assert results == [
        CallResult(f"end\n\n(redirected to {url}1)"),
        refused(f"{url}2 redirects to http://{other}/, which is {kind}; {unasked}"),
        refused(f"{url}3 redirects more than 5 times."),
        refused(
            f"{url}4 redirects to http://inner.example/, which is 10.0.0.1 (a private network); "
            f"{unasked}"
        ),
        refused(
            f"{url}5 redirects to an invalid URL: file:///etc/passwd: "
            "use an http:// or https:// URL."
        ),
        refused(f"{url}6 answered 302 Found.\n\n(the page has no text)"),
        refused(
            f"{url}8 redirects to an invalid URL: The URL contains a user or a password, "
            "which is not allowed."
        ),
    ]
    assert seen == []


async def test_a_body_is_bounded_also_after_decompression(harness: ToolHarness) -> None:
    bomb = gzip.compress(b"y" * (2 * BODY_BYTES_MAX), 1)
    async with open_site(endless, respond_with(bomb, Content_Encoding="gzip")) as (at, _):
        for n, letter in enumerate("xy"):
            expected = letter * TEXT_CHARS_MAX + "\n\n(this is not all of it)"
            assert await fetch(harness, f"http://{at}/{n}", format="text") == CallResult(expected)


BAD = {
    "is not text (image/png, 3 bytes). Use download.": respond_with(b"abc", kind="image/png"),
    "is binary data, although it is declared as text. Use download.": respond_with(b"a\0b"),
    "answered 404 Not Found.\n\nno *such* page": respond_with(
        "<p>no <i>such</i> page", 404, "text/html"
    ),
    "ended before the response was complete": cut_short,
    "is compressed as br, which is not supported.": respond_with(b"abc", Content_Encoding="br"),
    "is broken.": respond_with(b"abc", Content_Encoding="gzip"),
    "ended before the response was complete.": respond_with(
        gzip.compress(b"a" * 999)[:-9], Content_Encoding="gzip"
    ),
    "cannot be read: the response is not valid HTTP": respond_with("a", X="x" * 20_000),
}


async def test_an_unreadable_response_is_an_error_with_the_reason(harness: ToolHarness) -> None:
    async with open_site(*BAD.values()) as (at, _):
        for n, expected in enumerate(BAD):
            result = await fetch(harness, f"http://{at}/{n}")
            assert result.is_error
            assert expected in result.content
        port = at.partition(":")[2]
    result = await fetch(harness, f"http://{at}/")
    assert result == refused(
        f"http://127.0.0.1:{port}/ cannot be read: no connection (Connection refused)."
    )


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("é".encode(), "text/plain"),
        ("é".encode("latin-1"), "text/plain; charset=ISO-8859-1"),
        ("\ufeffé".encode("utf-16-le"), "text/plain; charset=utf-8"),
        ('<meta charset="windows-1252">é'.encode("cp1252"), "text/html"),
        ("é".encode(), "application/ld+json; charset=nonsense"),
        ("é".encode(), "text/plain; charset=rot13"),
        ("é".encode(), None),
        (gzip.compress("é".encode(), mtime=0), "text/x-python gzip"),
    ],
)
async def test_text_is_decoded_with_its_declared_charset(
    harness: ToolHarness, body: bytes, kind: str | None
) -> None:
    more = {"Content_Encoding": "gzip"} if kind and "gzip" in kind else {}
    async with open_site(respond_with(body, 200, kind, **more)) as (at, _):
        assert await fetch(harness, f"http://{at}/") == CallResult("é")


async def test_invalid_bytes_are_replaced_and_an_empty_page_says_so(harness: ToolHarness) -> None:
    async with open_site(respond_with(b"a\xffb"), respond_with(b"")) as (at, _):
        assert await fetch(harness, f"http://{at}/") == CallResult("a\ufffdb")
        assert await fetch(harness, f"http://{at}/1") == CallResult("(the page has no text)")


async def test_lookup_and_transfer_are_bounded_in_time(folder: Path) -> None:
    clock = FakeClock()
    reached = asyncio.Event()

    async def silent(*_: object) -> web.Response:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def lost(host: str, port: int) -> tuple[str, ...]:
        await silent()
        return ()

    async with open_tool_harness(folder, clock) as harness, open_site(silent) as (at, _):
        for url, network, seconds, expected in (
            (f"http://{at}/", Network(), 7, f"http://{at}/ took more than 7 seconds."),
            (
                "http://a.example",
                Network(lost),
                LOOKUP_S,
                "fetch: The host a.example was not found within 10 seconds.",
            ),
        ):
            reached.clear()
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                task = tasks.create_task(fetch(harness, url, network, timeout=7))
                await reached.wait()
                clock.advance(seconds)
            assert task.result() == refused(expected)
            assert clock.armed() == 0


async def test_an_unknown_host_and_an_invalid_url_are_refused(harness: ToolHarness) -> None:
    async def nowhere(host: str, port: int) -> tuple[str, ...]:
        raise OSError(-2, "Name or service not known")

    assert await fetch(harness, "http://a.example", Network(nowhere)) == refused(
        "fetch: The host a.example was not found: Name or service not known."
    )
    assert (await fetch(harness, "gopher://x")).is_error
    assert "format" in (await fetch(harness, "http://x", format="pdf")).content


async def test_a_wrong_certificate_is_refused_with_the_reason(
    harness: ToolHarness, tmp_path: Path
) -> None:
    cert, key = await make_certificate(tmp_path, "DNS:good.example", WAIT_S)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=cert)
    names = FakeDns(good_example=("127.0.0.1",), bad_example=("127.0.0.1",))
    async with open_site(respond_with("hello"), redirect_to("http://good.example/"), tls=ours) as (
        at,
        seen,
    ):
        port = at.partition(":")[2]
        good, bad = f"https://good.example:{port}/", f"https://bad.example:{port}/"
        trusted = Network(names.resolve, trusting)
        assert await fetch(harness, good, trusted) == CallResult("hello")
        other = await fetch(harness, bad, trusted)
        unknown = await fetch(harness, good, Network(names.resolve))
        lower = await fetch(harness, good + "1", trusted)
    assert other.content.startswith(f"{bad} cannot be read: its certificate is not accepted (")
    assert "bad.example" in other.content.partition("accepted")[2]
    assert unknown == refused(
        f"{good} cannot be read: its certificate is not accepted (self-signed certificate)."
    )
    assert "which is not encrypted; the redirect was not followed." in lower.content
    assert seen == ["good.example /", "good.example /1"]
