"""The channels of one run to its host: steering messages, asks and host calls.

All of them end with the run: waits then fail, and nothing more is accepted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol, cast

from msgspec import Raw

from culm.clock import format_time, parse_time
from culm.errors import TooLarge
from culm.fleet.executor import ApprovalUnavailable, HostCallFailed, RunEnded, SteerMessage
from culm.fleet.protocol.worker import ApprovalAnswered, HostCallReplied
from culm.fleet.worker_server.base import ServingSettings
from culm.fleet.worker_server.sanitize import ASKED_BYTES_MAX, fit
from culm.wire.codec import Json

log = logging.getLogger(__name__)

ASK_S: Final = 300.0  # For an answer, if the executor sets no deadline.
ID_CHARS_MAX: Final = 256  # For a tool call id.
STEERS_MAX: Final = 64  # Not admitted yet; a host that sends more does not wait for admissions.


class RunInbox:
    """Implements `SteerInbox`."""

    def __init__(self, steers: tuple[SteerMessage, ...]) -> None:
        self._steers: deque[SteerMessage] = deque(steers)
        self._has_dropped = False
        self._changed = asyncio.Event()
        self._is_over = False

    async def next(self) -> SteerMessage:
        while not self._steers:
            if self._is_over:
                raise RunEnded("the run is over")
            self._changed.clear()
            await self._changed.wait()
        return self._steers.popleft()

    def take_nowait(self) -> list[SteerMessage]:
        taken = list(self._steers)
        self._steers.clear()
        return taken

    def put(self, steer: SteerMessage) -> None:
        if len(self._steers) >= STEERS_MAX:
            if not self._has_dropped:
                log.warning("messages to a run are dropped: %d wait already", STEERS_MAX)
                self._has_dropped = True
            return
        self._steers.append(steer)
        self._changed.set()

    def end(self) -> None:
        self._is_over = True
        self._steers.clear()
        self._changed.set()


class HostRequests(Protocol):
    """Sends one run's requests to its host."""

    async def room(self) -> None:
        """Wait until a request has room."""
        ...

    def send_ask(self, ask_id: str, body: Raw) -> bool:
        """Return True if it was queued; otherwise it is too late, or too many are open."""
        ...

    def send_call(self, call_id: str, tool_call_id: str, args: Raw) -> bool: ...

    def withdraw(self, open_id: str) -> None:
        """The answer is no longer awaited."""
        ...


class ConnectedHost:
    """Implements `RunHost`."""

    def __init__(self, requests: HostRequests, settings: ServingSettings) -> None:
        self._requests = requests
        self._settings = settings
        self._asks: dict[str, asyncio.Future[bool]] = {}
        self._calls: dict[str, asyncio.Future[Json]] = {}
        self._is_over = False

    @property
    def takes_calls(self) -> bool:
        return self._settings.host_calls

    async def ask(self, body: Mapping[str, Json]) -> bool:
        now_s = self._settings.clock.now_s()
        given = body.get("deadline")
        deadline_s = parse_time(given) if isinstance(given, str) else None
        if deadline_s is None:
            deadline_s = now_s + ASK_S
            body = {**body, "deadline": format_time(deadline_s)}
        elif deadline_s <= now_s:
            return False
        try:
            payload = Raw(fit(body, ASKED_BYTES_MAX))
        except TooLarge as exc:
            return self._refuse_ask(exc.message)
        ask_id = f"sa-{self._settings.ids.ask()}"  # Not guessable, because people answer by it.
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def refuse() -> None:
            if not answer.done():
                log.info("an ask was not answered in time and is refused")
                answer.set_result(False)

        timer = self._settings.clock.call_later(deadline_s - now_s, refuse)
        try:
            await self._requests.room()
            if self._is_over or answer.done():
                return False
            if not self._requests.send_ask(ask_id, payload):
                return self._refuse_ask("too many asks wait already")
            self._asks[ask_id] = answer
            return await answer
        finally:
            timer.cancel()
            self._asks.pop(ask_id, None)
            self._requests.withdraw(ask_id)

    def _refuse_ask(self, why: str) -> bool:
        """Refuse an ask; only our own executors get the reason, by an exception."""
        log.warning("an ask is refused: %s", why)
        if self.takes_calls:
            raise ApprovalUnavailable(why)
        return False

    async def call(self, args: Mapping[str, Json], tool_call_id: str = "") -> Json:
        if not self._settings.host_calls:
            raise HostCallFailed("this host does not accept calls")
        if args.get("op") == "agent" and self._settings.depth >= self._settings.depth_max:
            raise HostCallFailed(f"agents nest at most {self._settings.depth_max} deep")
        try:
            payload = Raw(fit(args, ASKED_BYTES_MAX))
        except TooLarge as exc:
            raise HostCallFailed(exc.message) from exc
        call_id = f"sa-{self._settings.ids.ask()}"
        reply: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        try:
            await self._requests.room()
            if self._is_over:
                raise RunEnded("the run is over")
            if not self._requests.send_call(call_id, tool_call_id[:ID_CHARS_MAX], payload):
                raise HostCallFailed("too many calls to the host wait already")
            self._calls[call_id] = reply
            return _result_of(await reply)
        finally:
            self._calls.pop(call_id, None)
            self._requests.withdraw(call_id)

    def on_answer(self, answer: ApprovalAnswered | HostCallReplied) -> None:
        waiting = (self._asks if isinstance(answer, ApprovalAnswered) else self._calls).pop(
            answer.id, None
        )
        if waiting is None or waiting.done():
            log.warning("an answer arrived that is no longer awaited: %s", answer.id[:64])
        elif isinstance(answer, ApprovalAnswered) and answer.reason and not answer.approved:
            waiting.set_exception(ApprovalUnavailable(answer.reason))
        elif isinstance(answer, ApprovalAnswered):
            waiting.set_result(answer.approved)
        else:
            waiting.set_result(answer.result)

    def end(self) -> None:
        """Refuse all open and future requests."""
        self._is_over = True
        for ask in self._asks.values():
            if not ask.done():
                ask.set_result(False)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(RunEnded("the run is over"))


def _result_of(reply: Json) -> Json:
    """Unpack a host's reply, `{"result": …}` or `{"error": "…"}`."""
    if not isinstance(reply, dict):
        raise HostCallFailed("the host's answer cannot be read")
    fields = cast("dict[str, Json]", reply)
    if "error" in fields:
        raise HostCallFailed(str(fields["error"]))
    if "result" not in fields:
        raise HostCallFailed("the host's answer cannot be read")
    return fields["result"]
