"""A URL has one reading only, and no private address passes for a public one."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.files.safe_open import OpenRefused
from culm.tools.web.addresses import (
    UrlTarget,
    check_redirect,
    classify_addresses,
    find_private_kind,
    join_site,
    parse_site,
)

SPELLINGS = {
    "http://example.com": "http://example.com:80",
    "HTTPS://Example.COM./a?b#c": "https://example.com:443",
    "http://example.com?a=b#c": "http://example.com:80",
    "http://example.com:8080/": "http://example.com:8080",
    "http://bücher.example/": "http://xn--bcher-kva.example:80",
    "http://2130706433/": "http://127.0.0.1:80",
    "http://0x7f.1/": "http://127.0.0.1:80",
    "http://0177.0.0.1/": "http://127.0.0.1:80",
    "http://127.1./": "http://127.0.0.1:80",
    "http://１２７.0.0.1/": "http://127.0.0.1:80",
    "http://127。0。0。1/": "http://127.0.0.1:80",
    "http://[::FFFF:127.0.0.1]:81/": f"http://[{ipaddress.IPv6Address('::ffff:7f00:1')}]:81",
    "https://[0:0::1]": "https://[::1]:443",
}
INVALID_URLS = (
    *("", "example.com", "ftp://example.com/", "file:///etc/passwd", "//example.com", "http://"),
    *("http://user@example.com/", "http://u:p@example.com/", "http://:@example.com/"),
    *("http://example.com\\@127.0.0.1/", "http://exam ple.com/", "http://example.com/\nx"),
    *("http://[fe80::1%25eth0]/", "http://[::1", "http://[::1]x/", "http://1.2.3.4.5/"),
    *("http://256.1.1.1/", "http://0x/", "http://09.0.0.1/", "http://a..b/", "http://a%2eb/"),
    *("http://example.com:0/", "http://example.com:99999/", "http://exa\u202emple.com/"),
    *("http://" + "a" * 64 + ".com/", "http://" + "a." * 200 + "com/", "http://x/" + "a" * 5000),
)
PRIVATE = {
    "this machine": ("127.0.0.1", "127.255.0.9", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"),
    "a private network": ("10.0.0.1", "172.31.0.1", "192.168.1.1", "fd00:ec2::254", "fec0::1"),
    "a provider's inner network": ("100.64.0.1", "100.100.100.200", "::ffff:100.127.0.1"),
    "the metadata of a cloud machine": ("169.254.169.254", "64:ff9b::a9fe:a9fe"),
    "the local link": ("169.254.1.1", "fe80::1", "2002:a9fe:0101::1"),
    "the inner service of a cloud": ("168.63.129.16",),
    "a multicast group": ("224.0.0.1", "ff02::1", "239.1.1.1"),
    "a reserved network": (
        *("240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "203.0.113.9", "192.0.0.8"),
        *("2001:db8::1", "100::1", "5f00::1", "4000::1", "192.88.99.1"),
    ),
}
PUBLIC = ("1.1.1.1", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "64:ff9b::101:101")


@pytest.mark.parametrize(("text", "origin"), SPELLINGS.items())
def test_every_spelling_of_a_url_has_the_same_origin(text: str, origin: str) -> None:
    site = parse_site(text)
    assert site.origin == origin
    assert "#" not in site.url
    assert parse_site(site.url) == site


@pytest.mark.parametrize("text", INVALID_URLS)
def test_an_ambiguous_url_is_refused(text: str) -> None:
    with pytest.raises(OpenRefused) as caught:
        parse_site(text)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@given(st.one_of(st.text(), st.from_regex(r"https?://[^/]{0,20}(:[0-9]+)?/.*")))
def test_a_parsed_url_parses_to_itself(text: str) -> None:
    try:
        site = parse_site(text)
    except OpenRefused:
        return
    assert parse_site(site.url) == site


@pytest.mark.parametrize(
    ("address", "kind"), [(one, kind) for kind, all_of in PRIVATE.items() for one in all_of]
)
def test_a_private_address_is_recognized_in_every_form(address: str, kind: str) -> None:
    assert find_private_kind(address) == kind


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_public(address: str) -> None:
    assert find_private_kind(address) is None


@given(st.ip_addresses(v=4))
def test_an_embedded_ipv4_address_is_as_private_as_itself(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    forms = (f"::ffff:{inner}", f"64:ff9b::{inner}", f"2002:{number >> 16:x}:{number & 65535:x}::1")
    kinds = {find_private_kind(form) for form in (str(inner), *forms)}
    assert len(kinds) == 1


def site(url: str) -> UrlTarget:
    return parse_site(url)


@pytest.mark.parametrize(
    ("asked", "location", "addresses", "is_followed"),
    [
        (("http://a.example", "1.1.1.1"), "https://b.example/x", ("1.0.0.1",), True),
        (("http://a.example", "1.1.1.1"), "//b.example/x", ("1.0.0.1", "10.0.0.1"), False),
        (("http://a.example", "1.1.1.1"), "/x", ("127.0.0.1",), False),
        (("https://a.example", "1.1.1.1"), "http://a.example/", ("1.1.1.1",), False),
        (("http://a.example:8", "10.0.0.1"), "/x", ("10.0.0.1",), True),
        (("http://a.example:8", "10.0.0.1"), "/x", ("10.0.0.2",), False),
        (("http://a.example:8", "10.0.0.1"), "http://a.example:9/", ("10.0.0.1",), False),
        (("http://a.example:8", "10.0.0.1"), "http://b.example:8/", ("10.0.0.1",), False),
        (("http://a.example:8", "10.0.0.1"), "http://b.example:8/", ("1.1.1.1",), True),
    ],
)
def test_a_redirect_is_followed_only_within_the_approval(
    asked: tuple[str, str], location: str, addresses: tuple[str, ...], *, is_followed: bool
) -> None:
    first = classify_addresses(site(asked[0]), (asked[1],))
    found = classify_addresses(join_site(first.site, location), addresses)
    if is_followed:
        check_redirect(first, first.site, found)
    else:
        with pytest.raises(OpenRefused, match="Fetch that URL itself"):
            check_redirect(first, first.site, found)
