"""`fetch`: a page of the network as text, from the addresses that were approved."""

import codecs
import re
from contextlib import aclosing, suppress
from typing import Annotated, Literal

from msgspec import Meta, Struct

from culm.clock import time_limit
from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, make_spec, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, ToolContext
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.web.addresses import CheckedTarget, parse_site
from culm.tools.web.http_fetch import (
    LOOKUP_S,
    TIMEOUT_S,
    FetchedPage,
    Network,
    TimeoutSeconds,
    UrlText,
    check,
    open_page,
)
from culm.tools.web.markdown import render
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

BODY_BYTES_MAX = 5 << 20
TEXT_CHARS_MAX = 100_000  # About 25,000 tokens; a page of prose has a tenth.
ERROR_CHARS_MAX = 2000  # Shown of the body of an error.
_META = re.compile(rb"<meta[^>]{1,200}?charset\s*=\s*[\"']?\s*([\w-]{1,40})", re.IGNORECASE)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_HTML = ("text/html", "application/xhtml+xml")
_TEXTS = re.compile(
    r"text/.*|application/(.*\+)?(json|xml|yaml|x-yaml|toml|javascript|ecmascript|x-ndjson|sql"
    r"|x-sh|x-javascript|graphql|x-www-form-urlencoded)|image/svg\+xml|"
)
DESCRIPTION = (
    "Read a page or another text from the network by its URL (GET; http or https). HTML is "
    "returned as Markdown, as plain text or unchanged. Redirects are followed, but not to private "
    "addresses: fetch such an address itself. Binary data is refused; use download for it. No "
    f"proxy and no cookies are used. At most {TEXT_CHARS_MAX} characters are returned."
)

Format = Literal["text", "markdown", "html"]


class FetchArguments(Struct, frozen=True):
    url: UrlText
    format: Annotated[Format, Meta(description="The format for HTML. Default: markdown.")] = (
        "markdown"
    )
    timeout: TimeoutSeconds = 0


SPEC = make_spec(
    "fetch", DESCRIPTION, FetchArguments, ToolFacts(kind="fetch", shown_arguments=("url",))
)


class FetchTool(Struct, frozen=True):
    context: ToolContext
    network: Network
    spec: ToolSpec = SPEC
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, FetchArguments)
            checked = await resolve_target(self.context, self.network, arguments.url)
        except (InvalidArguments, OpenRefused) as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        params = {"url": checked.site.url, "format": arguments.format, "timeout": arguments.timeout}
        action = ResolvedAction(
            call.name,
            "fetch",
            description=f"Fetch {checked.shown}",
            path=str(self.context.paths.root),
            params=params,
            resolved=checked.resolved,
            coverage=checked.coverage("fetch"),
            why=checked.why,
        )
        return CallPlan(action, lambda _: self._run(arguments, checked))

    async def _run(self, arguments: FetchArguments, checked: CheckedTarget) -> CallResult:
        seconds = arguments.timeout or TIMEOUT_S
        try:
            async with (
                time_limit(self.context.clock, seconds),
                open_page(checked, self.network) as page,
            ):
                _check_kind(page)
                body, is_cut = await _read(page)
            return await self._result(arguments, checked, page, body, is_cut=is_cut)
        except OpenRefused as exc:
            return CallResult(str(exc), is_error=True)
        except TimeoutError:
            return CallResult(
                f"{checked.site.url} took more than {seconds} seconds.", is_error=True
            )

    async def _result(
        self,
        arguments: FetchArguments,
        asked: CheckedTarget,
        page: FetchedPage,
        body: bytes,
        *,
        is_cut: bool,
    ) -> CallResult:
        text = _decode(body, page)
        is_bad = not 200 <= page.status < 300
        chars_max = ERROR_CHARS_MAX if is_bad else TEXT_CHARS_MAX
        if arguments.format != "html" and _is_html(page, text):
            text, is_stopped = await self.context.executor.run(
                lambda stop: (
                    render(
                        text,
                        page.site.url,
                        chars_max + 1,
                        stop.is_set,
                        plain=arguments.format == "text",
                    ),
                    stop.is_set(),
                )
            )
            is_cut |= is_stopped
        notes: list[str] = []
        if page.site.url != asked.site.url:
            notes.append(f"(redirected to {page.site.url})")
        if is_cut or len(text) > chars_max:
            notes.append("(this is not all of it)")
        text = text[:chars_max].strip() or "(the page has no text)"
        if is_bad:
            status = f"{page.site.url} answered {page.status} {page.reason}".rstrip()
            text = f"{status}.\n\n{text}"
        return CallResult("\n\n".join((text, *notes)), is_error=is_bad)


def make_fetch(context: ToolContext, network: Network | None = None) -> FetchTool:
    return FetchTool(context, network or Network())


async def resolve_target(context: ToolContext, network: Network, url: str) -> CheckedTarget:
    """Parse a URL and look up its addresses; raises `OpenRefused`."""
    site = parse_site(url)
    try:
        async with time_limit(context.clock, LOOKUP_S):
            return await check(site, network)
    except TimeoutError as exc:
        raise OpenRefused(
            f"The host {site.host} was not found within {LOOKUP_S:g} seconds."
        ) from exc


def _check_kind(page: FetchedPage) -> None:
    if _TEXTS.fullmatch(page.kind):
        return
    size = "" if page.content_length is None else f", {page.content_length} bytes"
    raise OpenRefused(f"{page.site.url} is not text ({shown(page.kind)[:80]}{size}). Use download.")


async def _read(page: FetchedPage) -> tuple[bytes, bool]:
    """Return the body, and whether it was cut."""
    body = bytearray()
    async with aclosing(page.pieces()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > BODY_BYTES_MAX:
                return bytes(body[:BODY_BYTES_MAX]), True
    return bytes(body), False


def _decode(body: bytes, page: FetchedPage) -> str:
    for mark, charset in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(charset, errors="replace")
    if b"\0" in body[:8192] and "utf-16" not in (page.charset or "").lower():
        raise OpenRefused(
            f"{page.site.url} is binary data, although it is declared as text. Use download."
        )
    in_page = _META.search(body[:4096])
    for charset in (page.charset, in_page and in_page[1].decode("ascii", errors="replace")):
        with suppress(LookupError, ValueError):  # Also for a codec that does not produce text.
            if charset:
                return body.decode(charset, errors="replace")
    return body.decode(errors="replace")


def _is_html(page: FetchedPage, text: str) -> bool:
    if page.kind:
        return page.kind in _HTML
    return text[:1000].lstrip().lower().startswith(("<!doctype html", "<html"))
