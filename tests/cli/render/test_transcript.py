"""A conversation as a Markdown page: complete, with all content contained."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.render.transcript import (
    contained,
    fenced,
    markdown_of,
    markdown_of_run,
    plain,
    quoted,
)
from culm.ids import MessageId, SessionId
from culm.wire.messages import (
    Binary,
    BinaryPart,
    Finish,
    FinishPart,
    Message,
    Part,
    Role,
    Session,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)


def message(role: Role, *parts: Part, model: str = "") -> Message:
    provider = "demo" if model else ""
    session_id = SessionId("s")
    return Message(MessageId("m"), role, session_id, list(parts), model, provider)


def text_part(text: str) -> TextPart:
    return TextPart(Text(text))


LOOK = ToolCallPart(ToolCall("c", "bash", '{"command":"ls"}', finished=True))
SEEN = ToolResultPart(ToolResult("c", "bash", "a\n```\nb"))
TALK = [
    message(
        "user", text_part("What is *here*?"), BinaryPart(Binary("a/b.png", "image/png", b"12"))
    ),
    message("assistant", text_part("Let me look."), LOOK, model="demo-1"),
    message("tool", SEEN),
    message(
        "assistant", text_part("Two."), FinishPart(Finish("canceled", 0, "Stopped")), model="demo-1"
    ),
]

PAGE = """\
# A \\# title

- Session: `s`
- Date: 1970-01-01 00:00 UTC
- Model: demo/demo-1
- Cost: $0.0100

## User

> What is *here*?

Attachment: a/b.png (image/png, 2 bytes)

## Assistant (demo/demo-1)

Let me look.

**Call:** bash

```json
{
  "command": "ls"
}
```

**Result:** bash

````
a
```
b
````

## Assistant (demo/demo-1)

Two.

*Ended: canceled: Stopped*
"""


def test_page_names_roles_and_puts_results_below_their_calls() -> None:
    session = Session(SessionId("s"), title="A # title", cost=0.01)
    steps: list[int] = []
    assert "".join(markdown_of(session, TALK, step=steps.append)) == PAGE
    assert steps == [1] * len(TALK)


def test_result_without_its_call_is_shown_in_place() -> None:
    page = "".join(markdown_of(Session(SessionId("s")), [message("tool", SEEN)]))
    assert page.endswith("## Tool\n\n**Result:** bash\n\n````\na\n```\nb\n````\n")


def test_transcript_of_a_run_has_its_prompt_once() -> None:
    alone = "".join(markdown_of_run("Hi.", TALK[3:]))
    assert alone.startswith("# Hi.\n\n## User\n\n> Hi.\n\n## Assistant (demo/demo-1)\n")
    assert "".join(markdown_of_run("What is *here*?", TALK)).count("## User") == 1


@given(st.text("`~ab \n\x1b"))
def test_content_cannot_end_its_fence(text: str) -> None:
    first, *inner, last = fenced(text, "sh").split("\n")
    fence = first.removesuffix("sh")
    assert (last, set(fence)) == (fence, {"`"})
    assert all(len(run) < len(fence) for run in re.findall("`+", "\n".join(inner)))
    assert "\x1b" not in "".join(inner)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n```py\nb", "a\n```py\nb\n```"),
        ("````\n```\nb", "````\n```\nb\n````"),
        ("~~~\n```\nb", "~~~\n```\nb\n~~~"),
        ("```\na\n``` x", "```\na\n``` x\n```"),
        ("```\na\n```", "```\na\n```"),
        ("``` a`b", "``` a`b"),  # Not a fence: a backtick follows it.
        ("<!-- a", "\\<!-- a"),
        ("<PRE>a", "\\<PRE>a"),
        ("```\n<!-- a\n```", "```\n<!-- a\n```"),
        ("a <b> \x1b[2Jc", "a <b> [2Jc"),
    ],
)
def test_open_blocks_of_a_text_are_closed_at_its_end(text: str, shown: str) -> None:
    assert contained(text) == shown


def test_headings_are_moved_below_the_message_heading() -> None:
    text = "# A\n##### B\n#c\nD\n---\nE\n==\n\n---\n```\n# in code\n```"
    shown = "### A\n###### B\n#c\nD\n\\---\nE\n\\==\n\n---\n```\n# in code\n```"
    assert contained(text, 2) == shown


def test_quote_marks_every_line_and_plain_escapes_markup() -> None:
    assert quoted("a\n\n# b") == "> a\n>\n> # b"
    assert plain("*a*\n[b](c)") == "\\*a\\* \\[b\\](c)"
