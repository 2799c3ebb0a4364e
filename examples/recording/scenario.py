"""What the recording shows: edit `STEPS`, and record it anew with `python -m examples.recording`.

The commands run in a scratch copy of `examples/garden`, with a home of its own and the embedded
model. A step may have keys, which are typed as soon as something stands on the screen:

    Step("culm run 'Run `make test`'", keys=[Keys(after="allow it?", text="y\\n")])
"""

from examples.recording.tape import Keys, Step

TITLE = "culm"
COLUMNS, ROWS = 100, 26  # As wide as a page on a code forge shows without making it smaller.

STEPS = (
    Step(
        "culm run 'Have one agent read README.md, "
        "and another replace `* 5` by `* 0.5` in garden.py and run `make test`'",
        keys=[
            Keys(after="allow it?", text="s\n", pause_s=1.2),
            Keys(after="allow it?", text="y\n", pause_s=1.2),
        ],
        read_s=2.5,
    ),
    Step(
        "culm",
        keys=[
            Keys(after="›", text="How many Python files are there?\n"),
            Keys(after=".py`.\n›", text="!make test 2>&1 | tail -1\n"),
            Keys(after="OK\n›", text="/quit\n"),
        ],
        read_s=0.5,
    ),
    Step("culm sessions && culm agents", read_s=3.0),
)
