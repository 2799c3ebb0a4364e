"""What the recording shows: edit `STEPS`, and record it anew with `python -m examples.recording`.

The commands run in a scratch copy of `examples/garden`, with a home of its own and the embedded
model. A step may have keys, which are typed as soon as something stands on the screen:

    Step("culm run 'Run `make test`'", keys=[Keys(after="allow it?", text="y\\n")])
"""

from examples.recording.tape import Keys, Step

TITLE = "culm"
COLUMNS, ROWS = 100, 26  # As wide as a page on a code forge shows without making it smaller.

STEPS = (
    Step("culm run 'What is in this directory?'", read_s=2.5),
    Step(
        "culm run 'Have one agent read README.md, "
        "and another replace `* 5` by `* 0.5` in garden.py and run `make test`'",
        keys=[
            Keys(after="allow it?", text="s\n", pause_s=1.5),
            Keys(after="allow it?", text="y\n", pause_s=1.5),
        ],
        read_s=3.0,
    ),
    Step(f"culm agents | cut -c -{COLUMNS - 1}", read_s=3.0),
)
