"""What `make run` shows: `culm run` on a machine where nothing is set up, in a scratch copy.

One prompt has two agents work side by side, each a process of its own. It uses a home of its own
and the embedded model, whatever keys the environment has. What needs permission is answered by the
options below, for the agents, too: edits of Python files and `make test` are allowed, and as nobody
can be asked, the rest is refused.
"""

import difflib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GARDEN = Path(__file__).parent / "garden"
POLICY = ["--approve", "edit:*.py", "--approve", "bash:make test"]
PROMPT = (
    "Have one agent read README.md and run `rm README.md`, and another replace `* 5` by `* 0.5` in "
    "garden.py and run `make test`"
)
RUN_S = 60.0
LEAVE_TRIES, LEAVE_EVERY_S = 300, 0.05


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        home = Path(name)
        scratch = home / "garden"
        shutil.copytree(GARDEN, scratch, ignore=shutil.ignore_patterns("__pycache__"))
        socket = home / "culm.sock"
        # This server goes as soon as nobody needs it; yours stays a minute.
        settings = home / "culm.json"
        settings.write_text('{"detach_grace_s": 0.2, "linger_s": 0}')
        command = ["culm", "run", *POLICY, PROMPT]
        print(f"$ cp -r examples/garden {scratch} && cd {scratch}")
        print(f"$ {shlex.join(command)}", flush=True)
        ran = subprocess.run(
            [
                *(sys.executable, "-m", *command),
                *("--dir", str(scratch), "--host", f"unix://{socket}", "--config", str(settings)),
            ],
            stdin=subprocess.DEVNULL,  # What is piped in here is no part of the prompt.
            env=_environment(home),
            timeout=RUN_S,
        )
        print("\n$ diff -r examples/garden .", flush=True)
        for line in _differences(scratch):
            print(line)
        for _ in range(LEAVE_TRIES):
            if not socket.exists():
                break
            time.sleep(LEAVE_EVERY_S)
        return ran.returncode


def _environment(home: Path) -> dict[str, str]:
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
    own = {"CULM_NO_DISCOVERY": "1", "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    # Without what `make run` says to its children, or the garden's `make` talks of folders.
    around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**around, **folders, **own}


def _differences(scratch: Path) -> list[str]:
    """What the run has left on disk."""
    lines: list[str] = []
    for file in sorted(GARDEN.iterdir()):
        copy = scratch / file.name
        if not copy.is_file():
            lines.append(f"{file.name} is gone")
        elif file.is_file() and (before := file.read_text()) != (after := copy.read_text()):
            names = (f"examples/garden/{file.name}", file.name)
            lines += difflib.unified_diff(
                before.splitlines(), after.splitlines(), *names, n=0, lineterm=""
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
