"""A worker as a user writes it: an executor, and `culm.fleet.serve`.

`python -m tests.live.fleet_program <mode>` prints its endpoint on stdout. The first word of an
assignment selects what it does: `listen`, `ask` or `park`.
"""

import asyncio
import sys

from culm import fleet
from culm.fleet.worker_server.connection import ConnectTimeout, Mode

MODES: dict[str, Mode] = {"hasty": fleet.ServeOnce(accept_s=0.05), "service": fleet.ServeMany()}
ASKED = {"tool_name": "Bash", "resource": "git push", "question": "May I?"}


class UserExecutor:
    async def run(
        self,
        spec: fleet.RunSpec,
        events: fleet.EventSink,
        steer: fleet.SteerInbox,
        cancel: fleet.CancelToken,
        host: fleet.RunHost,
    ) -> fleet.Outcome:
        match spec.assignment.split()[0]:
            case "listen":
                return fleet.completed(f"steered: {(await steer.next()).text}")
            case "ask":
                return fleet.completed(f"approved: {await host.ask(ASKED)}")
            case "park":
                await events.emit({"type": "token", "content": spec.assignment})
                await cancel.wait()
                return fleet.CANCELLED
            case other:
                return fleet.failed(f"unknown assignment: {other}")


async def main(mode: str) -> None:
    def announce(endpoint: str) -> None:
        print(endpoint, flush=True)  # noqa: T201 - tests read it

    try:
        await fleet.serve(UserExecutor(), mode=MODES[mode], token="a-token", on_ready=announce)
    except ConnectTimeout as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
