"""The demo of `make run`: `culm run` without any configuration, in a scratch copy.

One prompt starts two agents in parallel, each in its own process. It uses its own home and the
embedded model, whatever keys the environment has. The options below decide permissions, for the
agents, too: edits of Python files and `make test` are allowed; the rest is refused, because
there is no terminal to ask at.
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
        # This server exits as soon as it is unused; by default it stays for a minute.
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
            stdin=subprocess.DEVNULL,  # Piped input is not part of the prompt.
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
    # Without the variables of `make run`, or the garden's `make` would print folders.
    around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**around, **folders, **own}


def _differences(scratch: Path) -> list[str]:
    """Return the changes that the run has made on disk."""
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
