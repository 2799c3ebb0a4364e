"""`fetch` reads from the address that was asked about, within bounds, or says why not."""

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
from tests.support import WAIT_S, FakeClock, carried_out
from tests.tools.conftest import Desk, call_of, open_desk, refused, run
from tests.tools.sites import Names, cut_short, endless, leads_to, open_site, says


async def fetch(
    desk: Desk, url: str, network: Network | None = None, **more: str | int
) -> CallResult:
    async with asyncio.timeout(WAIT_S):
        call = call_of("fetch", {"url": url, **more})
        return await carried_out(make_fetch(desk.context, network), call)


async def planned(desk: Desk, url: str, network: Network | None = None) -> CallPlan:
    plan = await make_fetch(desk.context, network).prepare(call_of("fetch", {"url": url}))
    assert isinstance(plan, CallPlan), plan
    return plan


async def test_a_private_address_is_shown_and_bound_and_a_public_one_is_an_origin(
    desk: Desk,
) -> None:
    names = Names(
        a_example=("1.1.1.1", "1.0.0.1"), b_example=("10.0.0.1 1.1.1.1", "1.1.1.1 10.0.0.1")
    )
    network, root = Network(names.resolve), str(desk.context.inside.root)
    public = (await planned(desk, "https://A.example/x#y", network)).action
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
    assert (await planned(desk, "https://a.example/x", network)).action == public
    private = (await planned(desk, "http://b.example:81", network)).action
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
    assert (await planned(desk, "http://b.example:81", network)).action.digest == private.digest


async def test_html_comes_as_markdown_as_text_or_as_it_is(desk: Desk) -> None:
    page = '<p>Some <b>bold</b> <a href="/x">link</a>'
    async with open_site(says(page, kind="text/html; charset=utf-8"), says(page)) as (at, _):
        url = f"http://{at}/"
        assert await fetch(desk, url) == CallResult(f"Some **bold** [link](http://{at}/x)")
        assert await fetch(desk, url, format="text") == CallResult("Some bold link")
        assert await fetch(desk, url, format="html") == CallResult(page)
        assert await fetch(desk, url + "1") == CallResult(page)


async def test_the_connection_goes_to_the_address_that_was_checked(desk: Desk) -> None:
    async with open_site(says("right")) as (at, seen):
        host, port = at.split(":")
        # Asked again, DNS would lead elsewhere, where nobody answers.
        names = Names(moving_example=(host, "127.0.0.9"))
        plan = await planned(desk, f"http://moving.example:{port}", Network(names.resolve))
        assert plan.action.coverage == (f"fetch:moving.example:{port}@127.0.0.1",)
        assert await run(plan) == CallResult("right")
        assert seen == ["moving.example /"]


async def test_redirects_are_followed_by_hand_and_not_to_what_was_not_asked_for(
    desk: Desk,
) -> None:
    async with (
        open_site(says("secret")) as (other, seen),
        open_site(
            *(leads_to("/1"), says("end"), leads_to(f"http://{other}/"), leads_to("/3")),
            *(leads_to("http://inner.example/"), leads_to("file:///etc/passwd"), says("", 302)),
            leads_to("/8"),
            leads_to("http://user:pass@1.1.1.1/"),
        ) as (at, _),
    ):
        names = Names(inner_example=("10.0.0.1",))
        network = Network(names.resolve)
        results = [await fetch(desk, f"http://{at}/{n}", network) for n in (0, *range(2, 8))]
    url = f"http://{at}/"
    unasked = "that was not asked for. Ask for that address itself if it is wanted."
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
            f"{url}5 redirects to what cannot be followed: file:///etc/passwd is no URL that "
            "begins with http:// or https://."
        ),
        refused(f"{url}6 answered 302 Found.\n\n(the page has no text)"),
        refused(
            f"{url}8 redirects to what cannot be followed: A URL with a user or a password in it "
            "is not used."
        ),
    ]
    assert seen == []


async def test_a_body_is_bounded_also_when_it_was_small_before_it_was_unpacked(desk: Desk) -> None:
    bomb = gzip.compress(b"y" * (2 * BODY_BYTES_MAX), 1)
    async with open_site(endless, says(bomb, Content_Encoding="gzip")) as (at, _):
        for n, letter in enumerate("xy"):
            expected = letter * TEXT_CHARS_MAX + "\n\n(this is not all of it)"
            assert await fetch(desk, f"http://{at}/{n}", format="text") == CallResult(expected)


BAD = {
    "is no text (image/png, 3 bytes). Use download.": says(b"abc", kind="image/png"),
    "is binary data, though it says it is text. Use download.": says(b"a\0b"),
    "answered 404 Not Found.\n\nno *such* page": says("<p>no <i>such</i> page", 404, "text/html"),
    "ended within its answer": cut_short,
    "is compressed as br, which was not asked for.": says(b"abc", Content_Encoding="br"),
    "is broken.": says(b"abc", Content_Encoding="gzip"),
    "ended within its answer.": says(gzip.compress(b"a" * 999)[:-9], Content_Encoding="gzip"),
    "cannot be read: no HTTP that can be read": says("a", X="x" * 20_000),
}


async def test_what_cannot_be_read_is_said_in_words(desk: Desk) -> None:
    async with open_site(*BAD.values()) as (at, _):
        for n, expected in enumerate(BAD):
            result = await fetch(desk, f"http://{at}/{n}")
            assert result.is_error
            assert expected in result.content
        port = at.partition(":")[2]
    result = await fetch(desk, f"http://{at}/")
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
async def test_text_is_decoded_as_it_says_itself(desk: Desk, body: bytes, kind: str | None) -> None:
    more = {"Content_Encoding": "gzip"} if kind and "gzip" in kind else {}
    async with open_site(says(body, 200, kind, **more)) as (at, _):
        assert await fetch(desk, f"http://{at}/") == CallResult("é")


async def test_bytes_that_are_no_text_are_replaced(desk: Desk) -> None:
    async with open_site(says(b"a\xffb"), says(b"")) as (at, _):
        assert await fetch(desk, f"http://{at}/") == CallResult("a\ufffdb")
        assert await fetch(desk, f"http://{at}/1") == CallResult("(the page has no text)")


async def test_time_is_bounded_for_looking_up_and_for_all_of_the_rest(folder: Path) -> None:
    clock = FakeClock()
    reached = asyncio.Event()

    async def silent(*_: object) -> web.Response:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def lost(host: str, port: int) -> tuple[str, ...]:
        await silent()
        return ()

    async with open_desk(folder, clock) as desk, open_site(silent) as (at, _):
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
                task = tasks.create_task(fetch(desk, url, network, timeout=7))
                await reached.wait()
                clock.advance(seconds)
            assert task.result() == refused(expected)
            assert clock.armed() == 0


async def test_a_name_that_is_nowhere_and_a_url_that_is_none_are_refused(desk: Desk) -> None:
    async def nowhere(host: str, port: int) -> tuple[str, ...]:
        raise OSError(-2, "Name or service not known")

    assert await fetch(desk, "http://a.example", Network(nowhere)) == refused(
        "fetch: The host a.example was not found: Name or service not known."
    )
    assert (await fetch(desk, "gopher://x")).is_error
    assert "format" in (await fetch(desk, "http://x", format="pdf")).content


async def test_a_wrong_certificate_is_refused_with_the_reason(desk: Desk, tmp_path: Path) -> None:
    cert, key = await make_certificate(tmp_path, "DNS:good.example", WAIT_S)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=cert)
    names = Names(good_example=("127.0.0.1",), bad_example=("127.0.0.1",))
    async with open_site(says("hello"), leads_to("http://good.example/"), tls=ours) as (at, seen):
        port = at.partition(":")[2]
        good, bad = f"https://good.example:{port}/", f"https://bad.example:{port}/"
        trusted = Network(names.resolve, trusting)
        assert await fetch(desk, good, trusted) == CallResult("hello")
        other = await fetch(desk, bad, trusted)
        unknown = await fetch(desk, good, Network(names.resolve))
        lower = await fetch(desk, good + "1", trusted)
    assert other.content.startswith(f"{bad} cannot be read: its certificate is not accepted (")
    assert "bad.example" in other.content.partition("accepted")[2]
    assert unknown == refused(
        f"{good} cannot be read: its certificate is not accepted (self-signed certificate)."
    )
    assert "where nothing is encrypted; that is not followed." in lower.content
    assert seen == ["good.example /", "good.example /1"]
