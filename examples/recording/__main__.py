"""Record the scenario into docs/recording.svg, or into the given file.

With a name that ends in .txt it writes each picture as text.
"""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from examples.recording.frames import Frame, frames_of
from examples.recording.scenario import COLUMNS, ROWS, STEPS, TITLE
from examples.recording.screen import text_of
from examples.recording.svg import svg_of
from examples.recording.tape import play

ROOT = Path(__file__).parent.parent.parent
GARDEN = ROOT / "examples" / "garden"
SVG_BYTES_MAX = 150_000  # A README must load on slow networks, too.
LEAVE_TRIES, LEAVE_EVERY_S = 300, 0.05


def main() -> int:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "recording.svg"
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        home = Path(name).resolve()
        scratch = home / "garden"
        shutil.copytree(GARDEN, scratch, ignore=shutil.ignore_patterns("__pycache__"))
        settings = home / "config" / "culm" / "culm.json"
        settings.parent.mkdir(parents=True)
        # The server stays from one step to the next, and exits soon after the last.
        settings.write_text('{"detach_grace_s": 2, "linger_s": 5}')
        played = play(STEPS, scratch, _environment(home), COLUMNS, ROWS)
        # Show the random home folder as ~.
        beats = [replace(beat, data=beat.data.replace(bytes(home), b"~")) for beat in played]
        _wait_for_the_server(home)
    frames = frames_of(beats, COLUMNS, ROWS)
    text = _pages(frames) if file.suffix == ".txt" else svg_of(frames, TITLE)
    size, seconds = len(text.encode()), sum(frame.duration_s for frame in frames)
    print(f"{file.name}: {len(frames)} pictures, {seconds:.1f} s, {size:,} bytes")
    if file.suffix == ".svg" and size > SVG_BYTES_MAX:
        print(f"hint: {SVG_BYTES_MAX:,} bytes are the limit; shorten the scenario", file=sys.stderr)
        return 1
    file.write_text(text)
    return 0


def _environment(home: Path) -> dict[str, str]:
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
    own = {
        "HOME": str(home),
        "CULM_NO_DISCOVERY": "1",
        "XDG_RUNTIME_DIR": str(home),
        "PYTHON": sys.executable,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**around, **folders, **own}


def _wait_for_the_server(home: Path) -> None:
    """Wait until the server has exited, before its folder is removed."""
    for _ in range(LEAVE_TRIES):
        if not any(home.glob("culm-*.sock")):
            break
        time.sleep(LEAVE_EVERY_S)


def _pages(frames: list[Frame]) -> str:
    return "".join(
        f"--- {frame.duration_s:.2f} s\n" + "\n".join(map(text_of, frame.rows)).rstrip() + "\n"
        for frame in frames
    )


if __name__ == "__main__":
    sys.exit(main())
