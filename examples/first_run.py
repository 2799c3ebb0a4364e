"""What `make run` shows: `culm run` on a machine where nothing is set up.

It uses a home of its own and the embedded model, whatever keys the environment has.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = (
    "List the files in docs, count the lines in README.md and search for 'make run' in Makefile."
)
RUN_S = 60.0
LEAVE_TRIES, LEAVE_EVERY_S = 300, 0.05


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        home = Path(name)
        socket = home / "culm.sock"
        # This server goes as soon as nobody needs it; yours stays a minute.
        settings = home / "culm.json"
        settings.write_text('{"detach_grace_s": 0.2, "linger_s": 0}')
        command = ["run", "--host", f"unix://{socket}", "--config", str(settings), PROMPT]
        print(f"$ culm run {PROMPT!r}", flush=True)
        ran = subprocess.run(
            [sys.executable, "-m", "culm", *command],
            stdin=subprocess.DEVNULL,  # What is piped in here is no part of the prompt.
            env=_environment(home),
            timeout=RUN_S,
        )
        for _ in range(LEAVE_TRIES):
            if not socket.exists():
                break
            time.sleep(LEAVE_EVERY_S)
        return ran.returncode


def _environment(home: Path) -> dict[str, str]:
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
    return {**os.environ, **folders, "CULM_NO_DISCOVERY": "1"}


if __name__ == "__main__":
    sys.exit(main())
