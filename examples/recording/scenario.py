"""The scenario of the recording: edit `STEPS`, and record with `python -m examples.recording`.

The commands run in a scratch copy of `examples/garden`, with their own home and the embedded
model. A step may have keys, which are typed as soon as a text is on the screen:

    Step("culm run 'Run `make test`'", keys=[Keys(after="allow it?", text="y\\n")])
"""

from examples.recording.tape import Keys, Step

TITLE = "culm"
COLUMNS, ROWS = 100, 26  # The width that a page of a code host shows without scaling.

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
