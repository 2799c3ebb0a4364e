"""Recordings of commands on a real terminal with typed input."""

import os
from pathlib import Path

import pytest
from examples.recording import tape
from examples.recording.frames import frames_of
from examples.recording.screen import text_of
from examples.recording.tape import IDLE_S_MAX, Keys, Step, Stuck, play


def shown(steps: list[Step], folder: Path) -> list[str]:
    """Return the lines on the screen at the end."""
    frames = frames_of(play(steps, folder, os.environ, 40, 12), 40, 12)
    return [text for row in frames[-1].rows if (text := text_of(row))]


def test_typed_input_and_output_are_recorded_in_order(folder: Path) -> None:
    steps = [
        Step(
            "printf 'name? '; read name; echo \"hello $name\"",
            [Keys("name?", "Ada\n", pause_s=0.1)],
            shown="greet",
        ),
        Step("stty size && test -w /dev/tty && echo mine", shown="look"),
    ]
    assert shown(steps, folder) == [
        *("$ greet", "name? Ada", "hello Ada"),
        *("$ look", "12 40", "mine", "$"),
    ]


def test_long_pauses_are_shortened(folder: Path) -> None:
    beats = list(play([Step("echo a; sleep 1.2; echo b", read_s=0)], folder, os.environ))
    assert max(beat.pause_s for beat in beats) == IDLE_S_MAX


def test_key_whose_marker_never_appears_is_reported(folder: Path) -> None:
    with pytest.raises(Stuck, match=r"never showed 'allow it\?', but:\nnothing"):
        shown([Step("echo nothing", [Keys("allow it?", "y\n")])], folder)


def test_command_that_does_not_end_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "STEP_S_MAX", 0.5)
    with pytest.raises(Stuck, match="does not end; it shows:\n"):
        shown([Step("echo $$ > pid; sleep 60")], folder)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)
