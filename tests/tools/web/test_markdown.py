"""HTML becomes readable Markdown, even if the HTML is broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.web.markdown import render

BASE = "https://example.com/docs/page.html"


def markdown(text: str, chars_max: int = 10_000, *, plain: bool = False) -> str:
    return render(text, BASE, chars_max, lambda: False, plain=plain)


CASES = {
    "<h1>One <em>two</em></h1><p>Text\n  over   lines.</p>": "# One *two*\n\nText over lines.",
    "<title>T &amp; U</title><nav>no</nav><script>x<b></script><p>y": "# T & U\n\ny",
    '<a href="../a b?x=1&amp;y">here </a>now': "[here](https://example.com/a%20b?x=1&y) now",
    '<a href="#x">up</a> <a href="javascript:x()">run</a>': "up run",
    "<ul><li>a<li>b<ul><li>c</ul><li><p>d</p><p>e</p></ul>f": ("- a\n- b\n  - c\n- d\n\n  e\n\nf"),
    '<ol start="9"><li>a</li><li>b</li></ol>': "9. a\n10. b",
    "<blockquote><p>a<p>b<blockquote>c</blockquote></blockquote>d": "> a\n>\n> b\n>\n> > c\n\nd",
    '<pre><code class="language-py">a\n  b  &lt;c&gt;\n</code></pre>': "```py\na\n  b  <c>\n```",
    "<pre>```</pre>": "````\n```\n````",
    "use <code>a `b`</code> and<b> bold </b>x": "use `` a `b` `` and **bold** x",
    "<table><tr><th>a<th>b<tr><td>1|2<td><p>3</p><p>4</p></table>": (
        "| a | b |\n| --- | --- |\n| 1\\|2 | 3 4 |"
    ),
    "<table><tr><td><table><tr><td>in</table></table>": "in",
    '<img src="/i.png" alt="An image"><img src="x">': "![An image](https://example.com/i.png)",
    "a<br>b<hr>c": "a\nb\n\n---\n\nc",
    "<b>a<p>b</b>c</p>": "**a**\n\n**b**c",
    "1 < 2 & 3 &copy; &#x41; &bogus; <!-- <p> -->4": "1 < 2 & 3 © A &bogus; 4",
    "<p>a</p></ul></li></table></b></pre><!-- never": "a",
    "": "",
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_a_page_is_rendered_as_markdown(text: str, expected: str) -> None:
    assert markdown(text) == expected


def test_plain_text_has_no_markup() -> None:
    text = '<h2>A</h2><p><b>b</b> <a href="/c">c</a><ul><li>d</ul><pre>e</pre>'
    assert markdown(text, plain=True) == "A\n\nb c\n\n- d\n\ne"


PIECES = st.sampled_from(
    [
        *("<ul>", "<li>", "<ol start=3>", "</ul>", "<table>", "<tr>", "<td>", "</table>", "<pre>"),
        *("</pre>", "<b>", "</b>", '<a href="x">', "</a>", "<blockquote>", "<h1>", "</h1>"),
        *("<svg>", "</svg>", "<!--", "-->", "<title>", "</title>", "text ", "\n", "&lt;", "</li>"),
        *("<br>", "<code>", "`", "<", ">", '"', "<a ", "<script>", "\0", "</blockquote>"),
        "&#" + "9" * 5000,
    ]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=40), st.booleans())
def test_any_page_gives_a_bounded_result(pieces: list[str], plain: bool) -> None:  # noqa: FBT001
    assert len(markdown("".join(pieces), 200, plain=plain)) <= 200


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<!--",
            "<a ",
            "<a b='",
            '<a b="',
            "</a",
            "<![CDATA[",
            "<ul><li>",
            "<blockquote>",
            "<b>x",
        ),
        *("<table><tr><td>", "&", "<script", "<script>", "<svg>", "`", "<title>", "<pre>", "< "),
    ],
)
def test_a_page_of_one_repeated_piece_is_rendered_quickly(piece: str) -> None:
    # Pytest's timeout is the bound: quadratic time would take minutes.
    markdown(piece * (100_000 // len(piece)), 100_000)


def test_rendering_stops_when_time_is_up() -> None:
    assert render("<p>a" * 5000, BASE, 10**6, lambda: True, plain=False) == ""
