"""The messages of one workspace: stored whole, or open and growing by deltas.

Owns the open messages. Deltas are published as soon as the tail has them, and reach the database
in chunks; every other change is published after its commit. The run that writes a message is only
an id here.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from culm.clock import Clock, Timer
from culm.errors import MessageNotFound, StoreBusy
from culm.events.hub import TransientEvent
from culm.ids import Ids, MessageId, SessionId
from culm.run.draft import Draft, DraftEnd, PendingWrites, check_part, check_size, put_parts
from culm.store.base import Connection, Tx, Unit, together
from culm.store.messages import (
    CapturedMessage,
    TextChunk,
    add_chunks,
    add_message,
    capture,
    delete_message,
    find_message,
    save_message,
)
from culm.store.store import Store
from culm.store.text_tail import CARRIED_CHARS_MAX, ShownOutput, TailRecord
from culm.wire.codec import clean, decode, encodable, encode
from culm.wire.events import CallOutput, MessageDelta
from culm.wire.messages import (
    Finish,
    FinishPart,
    Growing,
    Message,
    Part,
    RawMessage,
    Role,
    close_parts,
    growing_of,
)

CHUNK_S = 3.0  # Until then, only the tail has the text of an open message.
CHUNK_CHARS = 1 << 20  # A message with more text than this is stored earlier.
MAINTAIN_S = 0.5  # The interval at which the tail is emptied, if it can be.
RETRY_S = 1.0  # The retry interval while the store cannot write.


class Messages:
    """All messages of one workspace."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ids: Ids,
        publish_delta: Callable[[MessageDelta], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._open: dict[MessageId, Draft] = {}
        self._chunk_timer: Timer | None = None
        self._chunk_due_s = 0.0
        self._tail = store.tail
        self._tail_timer: Timer | None = None
        self._tail_erased_to = -1  # The last file that may have deleted text.
        self._stopped = False
        self._writes = PendingWrites()
        self._publish_delta = publish_delta

    # --- changing: each method returns when its change is submitted, its future when it is durable

    def compose(
        self,
        session_id: SessionId,
        role: Role,
        parts: list[Part],
        *,
        run_id: str = "",
        finish: Finish | None = None,
        model: str = "",
        provider: str = "",
    ) -> tuple[Message, Unit]:
        """Build a message that is complete from the start, and the unit that adds it."""
        ending = FinishPart(Finish("stop", 0) if finish is None else finish)
        message = self._new(session_id, role, [*map(encodable, parts), ending], run_id)
        message.model, message.provider = model, provider
        return message, add_message(capture(message), is_open=False)

    def add(
        self, session_id: SessionId, role: Role, parts: list[Part]
    ) -> tuple[Message, asyncio.Future[None]]:
        """Add a message that is complete from the start."""
        message, unit = self.compose(session_id, role, parts)
        return message, self._writes.track(self._store.write(together(unit)))

    def open(
        self,
        session_id: SessionId,
        *,
        run_id: str = "",
        model: str = "",
        provider: str = "",
        summary: bool = False,
        before: Unit | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> tuple[Draft, asyncio.Future[None]]:
        """Open an assistant message that will grow; `before` is part of its transaction."""
        message = self._new(session_id, "assistant", [], run_id)
        message.model, message.provider, message.is_summary_message = model, provider, summary
        draft = Draft(message)
        self._open[message.id] = draft
        captured = capture(message)
        unit = together(before, add_message(captured, is_open=True))
        return draft, self._submit(draft, captured, unit, on_commit)

    def reopen(self, message: Message) -> Draft:
        """Continue an open message of an earlier server."""
        draft = Draft(message)
        draft.measure()
        self._open[message.id] = draft
        return draft

    def append(self, draft: Draft, part: int, kind: Growing, text: str) -> None:
        """Append text to a part; `part` may be the next one. Ignored once the message has ended."""
        if draft.ended or self._stopped or not text:
            return
        text = clean(text)
        check_size(draft.size + len(text))
        parts = draft.message.parts
        if part == len(parts):
            check_part(part)
            draft.add_part(kind)
        assert growing_of(parts[part]) == kind, "a part keeps its kind"
        offset = draft.lengths[part]
        draft.pieces.setdefault(part, []).append(text)
        draft.lengths[part] = offset + len(text)
        draft.size += len(text)
        draft.loose += len(text)
        message = draft.message
        delta = MessageDelta(message.id, message.session_id, message.rev, part, kind, offset, text)
        if not draft.is_pending:
            self._publish_delta(delta)
        else:
            draft.held_deltas.append(delta)
            if draft.damaged:
                self._arm(RETRY_S)
        if draft.tail_from is None:
            draft.tail_from = self._tail.number
        if self._chunk_timer is None:
            self._arm(CHUNK_S)
        if draft.loose >= CHUNK_CHARS:
            self._store_text([draft])

    def put(self, draft: Draft, part: int, value: Part) -> asyncio.Future[None]:
        """Set a part or add the next one, for example when a call begins or reasoning ends."""
        return self.put_all(draft, {part: value})

    def put_all(
        self, draft: Draft, parts: Mapping[int, Part], *, after: Unit | None = None
    ) -> asyncio.Future[None]:
        """Set several parts at once, with `after` in the same transaction."""
        check_part(max(parts))
        return self._change(draft, lambda message: put_parts(message, parts), after=after)

    def clear(self, draft: Draft, *, model: str = "", provider: str = "") -> asyncio.Future[None]:
        """Remove all parts, for a retry, or for another model if one is named."""

        def change(message: Message) -> None:
            if model:
                message.model, message.provider = model, provider
            message.parts.clear()
            message.rev += 1

        return self._change(draft, change)

    def finish(
        self,
        draft: Draft,
        finish: Finish,
        *,
        before: Unit | None = None,
        after: Unit | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        """End the message: it stops growing, and its unfinished parts are closed.

        `before` and `after` are part of the transaction, and `on_commit` runs when it is durable.
        If the store cannot write, the end is retried until it can or the workspace closes, whether
        or not the future failed; `draft.gone` is set then.
        """
        draft.end = DraftEnd(before, after, on_commit)

        def change(message: Message) -> None:
            close_parts(message.parts, int(self._clock.now_s()))
            message.parts.append(FinishPart(finish))
            message.rev += 1

        return self._change(draft, change, is_open=False)

    def delete(self, message_id: MessageId) -> asyncio.Future[None]:
        """Delete a message. Writes to it that are still in flight have no effect."""
        draft = self._open.get(message_id)
        if draft is not None:
            if not draft.is_pending:
                draft.published = encode(draft.visible())
            draft.deleting += 1

        def failed(_: Exception) -> None:
            if draft is not None:
                draft.deleting -= 1
                self._after_write(draft)

        def deleted(_: None) -> None:
            self.forget(message_id)
            self._erase_tail()

        return self._writes.track(self._store.write(delete_message(message_id), deleted, failed))

    def forget_session(self, session_id: SessionId) -> None:
        """Drop the open messages of a deleted session."""
        for draft in list(self._open.values()):
            if draft.message.session_id == session_id:
                self.forget(draft.message.id)
        self._erase_tail()

    async def flush(self) -> None:
        """Submit all open text to the store and wait for every write in flight.

        Raises `StoreBusy` if some of it could not be stored.
        """
        while True:
            self._store_text(list(self._open.values()))
            if not self._writes:
                break
            await self._writes.wait()
            if any(draft.damaged for draft in self._open.values()):
                raise StoreBusy("open messages are not stored")

    async def stop(self) -> None:
        """Stop all growth and store the open text. Raises `StoreBusy` like `flush`."""
        self._stopped = True
        try:
            await self.flush()
            has_outputs = any(draft.outputs for draft in self._open.values())
        finally:
            for message_id in list(self._open):
                self.forget(message_id)
            for timer in (self._chunk_timer, self._tail_timer):
                if timer is not None:
                    timer.cancel()
        if not has_outputs:  # The next start needs them for a run that could not end.
            await self._tail.clear()

    # --- the tail

    def record(self, deltas: Sequence[MessageDelta]) -> bool:
        """Write text to the tail; return False if that fails.

        It must not be sent then: the whole message is stored and sent when the disk works again.
        """
        drafts = [self._open.get(delta.message_id) for delta in deltas]
        if not self._write_tail(deltas):
            for draft in drafts:
                # A change in flight contains the text already.
                if draft is not None and not draft.in_flight:
                    draft.damage(draft.send())
            self._arm(RETRY_S)
            return False
        for draft, delta in zip(drafts, deltas, strict=True):
            if draft is not None:
                draft.show(delta)
        return True

    def record_output(self, draft: Draft, call_id: str, text: str) -> CallOutput | None:
        """Write output of a running call to the tail; None if it must not be sent.

        After a crash the recovery adds it to the result of the call.
        """
        if draft.ended or self._stopped:
            return None
        shown = draft.outputs.setdefault(call_id, ShownOutput(tail_from=self._tail.number))
        offset, text = shown.length, shown.held + clean(text)
        if not self._write_tail([draft.output_record(call_id, offset, text)]):
            shown.hold(text)
            return None
        shown.held = ""
        shown.add(offset, text)
        return CallOutput(draft.message.session_id, call_id, offset, text)

    def forget_output(self, draft: Draft, call_id: str) -> None:
        """Drop the output of a call whose result is committed."""
        if draft.outputs.pop(call_id, None) is not None:
            self._arm_tail()

    def _write_tail(self, texts: Sequence[MessageDelta | TailRecord]) -> bool:
        try:
            self._tail.write(texts)
        except OSError as exc:
            self._store.record_tail_failure(exc)
            return False
        self._arm_tail()
        return True

    def _arm_tail(self) -> None:
        if self._tail_timer is None and not self._stopped:
            self._tail_timer = self._clock.call_later(MAINTAIN_S, self._maintain_tail)

    def _erase_tail(self) -> None:
        """Empty the files that may have deleted text; what is still needed goes to the other."""
        self._tail_erased_to = self._tail.number
        self._arm_tail()

    def _maintain_tail(self) -> None:
        self._tail_timer = None
        erases = self._tail.has(self._tail_erased_to)
        if self._tail.is_large or erases:
            self._store_all_text()
            self._carry_over_outputs()
        drafts = self._open.values()
        texts = [draft.tail_from for draft in drafts if draft.tail_from is not None]
        outputs = [output.tail_from for draft in drafts for output in draft.outputs.values()]
        has_more = self._tail.maintain(min(texts + outputs, default=None))
        if outputs and not texts and not erases:
            has_more = self._tail.is_working  # The end of a call arms the timer again.
        if has_more:
            self._arm_tail()

    def _carry_over_outputs(self) -> None:
        """Write the output of running calls again, because a call may outlive many files."""
        old = [
            (draft, call_id, output)
            for draft in self._open.values()
            for call_id, output in draft.outputs.items()
            if output.tail_from < self._tail.number
        ]
        records: list[TailRecord] = []
        for draft, call_id, output in old:
            text = output.text[-CARRIED_CHARS_MAX // len(old) :]
            records.append(draft.output_record(call_id, output.length - len(text), text))
        if records and self._write_tail(records):
            for _, _, output in old:
                output.tail_from = self._tail.number

    def _committed(self, draft: Draft, number: int) -> None:
        """Note a commit of the text that was submitted when the tail wrote to file `number`."""
        is_whole = not (draft.loose or draft.in_flight or draft.chunk_in_flight)
        draft.tail_from = None if is_whole else number

    # --- the state that clients have

    def open_ids(self) -> list[tuple[MessageId, SessionId]]:
        return [(draft.message.id, draft.message.session_id) for draft in self._open.values()]

    def find_shown(self, message_id: MessageId) -> TransientEvent | None:
        draft = self._open.get(message_id)
        if draft is None:
            return None
        payload = draft.published if draft.is_pending else encode(draft.visible())
        return (
            None
            if payload is None
            else TransientEvent("message", draft.message.session_id, payload)
        )

    async def read(
        self, query: Callable[[Connection], list[RawMessage]]
    ) -> tuple[list[RawMessage], int]:
        """Read messages, open ones as published, with the sequence number of the read."""
        were_open = set(self._open)
        rows, seq = await self._store.read_published(query)
        return await self._overlay(rows, were_open), seq

    async def _overlay(self, rows: list[RawMessage], were_open: set[MessageId]) -> list[RawMessage]:
        changed = were_open | set(self._open)
        if not changed:
            return rows
        result: list[RawMessage] = []
        for row in rows:
            present: RawMessage | None = row
            if (shown := self.find_shown(row.id)) is not None:
                present = decode(shown.payload, RawMessage)
            elif row.id in changed:
                # It ended after the read, and that was published: an older version would undo it.
                present = await self._store.read(find_message(row.id))
            if present is not None:
                result.append(present)
        return result

    # --- writing

    def _new(self, session_id: SessionId, role: Role, parts: list[Part], run_id: str) -> Message:
        message = Message(self._ids.message(), role, session_id, parts, run_id=run_id)
        message.created_at = message.updated_at = int(self._clock.now_s())
        return message

    def _change(
        self,
        draft: Draft,
        change: Callable[[Message], None],
        *,
        is_open: bool = True,
        after: Unit | None = None,
    ) -> asyncio.Future[None]:
        message = draft.fold()
        if draft.ended:
            raise MessageNotFound(message.id)
        if not draft.is_pending:
            draft.published = encode(draft.visible())
        change(message)
        message.updated_at = int(self._clock.now_s())
        return self._save(draft, is_open=is_open, after=after)

    def _save(
        self, draft: Draft, *, is_open: bool, after: Unit | None = None
    ) -> asyncio.Future[None]:
        draft.ended = draft.ended or not is_open
        captured = capture(draft.fold())
        unit = save_message(captured, is_open=is_open)
        end = draft.end
        if end is None:
            return self._submit(draft, captured, together(unit, after))
        return self._submit(draft, captured, together(end.before, unit, end.after), end.on_commit)

    def _submit(
        self,
        draft: Draft,
        captured: CapturedMessage,
        unit: Callable[[Tx], None],
        on_commit: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        number, file = draft.send(), self._tail.number
        draft.in_flight += 1
        draft.held_deltas.clear()  # The captured message includes them.
        draft.measure()

        def published(_: None) -> None:
            draft.in_flight -= 1
            draft.published = captured.payload
            draft.last_published = number
            self._committed(draft, file)
            if on_commit is not None:
                on_commit()
            self._after_write(draft)

        def failed(error: Exception) -> None:
            draft.in_flight -= 1
            draft.last_failed = max(draft.last_failed, number)
            was_never_stored = draft.published is None and not draft.in_flight
            if was_never_stored or not isinstance(error, StoreBusy):
                self.forget(draft.message.id)  # It was never stored, or is gone.
            else:
                self._arm(RETRY_S)

        return self._writes.track(self._store.write(unit, published, failed))

    def _after_write(self, draft: Draft) -> None:
        if draft.damaged:
            self._arm(RETRY_S)
        if draft.is_pending or draft.message.id not in self._open:
            return
        if draft.ended:
            self.forget(draft.message.id)
            return
        held_deltas, draft.held_deltas = draft.held_deltas, []
        for delta in held_deltas:
            self._publish_delta(delta)
        if draft.loose:
            self._arm(CHUNK_S)

    def _store_text(self, drafts: Iterable[Draft]) -> None:
        """Submit the text added since the last time to the store."""
        chunks: list[TextChunk] = []
        for draft in drafts:
            if draft.damaged and not draft.in_flight:
                self._save(draft, is_open=not draft.ended)
            elif draft.loose and not (draft.ended or draft.in_flight or draft.chunk_in_flight):
                chunks += draft.take_chunks()
        if chunks:
            self._write_chunks(chunks)

    def _write_chunks(self, chunks: list[TextChunk]) -> None:
        file = self._tail.number
        drafts = [self._open[message_id] for message_id in {chunk.message_id for chunk in chunks}]
        sent = [(draft, draft.send()) for draft in drafts]
        for draft in drafts:
            draft.chunk_in_flight = True

        def stored(_: None) -> None:
            for draft in drafts:
                draft.chunk_in_flight = False
                self._committed(draft, file)
            for chunk in chunks:
                if (draft := self._open.get(chunk.message_id)) is not None:
                    draft.show_stored(chunk)
            if any(draft.loose for draft in drafts):
                self._arm(CHUNK_S)

        def failed(_: Exception) -> None:
            for draft, number in sent:
                draft.chunk_in_flight = False
                draft.damage(number)
            self._arm(RETRY_S)

        self._writes.track(self._store.write(add_chunks(chunks), stored, failed))

    def _arm(self, delay_s: float) -> None:
        """Submit loose text to the store within `delay_s`."""
        if self._stopped:
            return
        due_s = self._clock.monotonic_s() + delay_s
        if self._chunk_timer is not None:
            if self._chunk_due_s <= due_s:
                return
            self._chunk_timer.cancel()
        self._chunk_due_s = due_s
        self._chunk_timer = self._clock.call_later(delay_s, self._store_all_text)

    def _store_all_text(self) -> None:
        self._chunk_timer = None
        self._tail.switch()
        self._store_text(list(self._open.values()))

    def forget(self, message_id: MessageId) -> None:
        """Drop a message whose row is gone or no longer matters."""
        if draft := self._open.pop(message_id, None):
            draft.ended = True
            draft.end = None  # It refers to the owner of the draft; see `Runs._release`.
            draft.gone.set()
            if draft.outputs:
                self._arm_tail()
