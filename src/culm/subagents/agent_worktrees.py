"""The worktrees of agents: made before an agent starts, finished when its assignment has ended."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as with_

from culm.ids import AgentId
from culm.store.agents import NewAgent
from culm.subagents.start_policy import AgentTerms, KeptWorktree, StartRefused
from culm.wire.codec import decode, encode
from culm.worktrees.notes import noted_in
from culm.worktrees.worktree import Worktree, WorktreeFailed, WorktreeOutcome, Worktrees


@dataclass(frozen=True, slots=True)
class AgentWorktrees:
    worktrees: Worktrees
    workspace: Path
    folder: Path  # The parent directory of all worktrees.

    async def make(self, agent_ids: Sequence[AgentId]) -> dict[AgentId, Worktree]:
        """Make one worktree per agent, or raise `StartRefused` and leave none."""
        made: dict[AgentId, Worktree] = {}
        is_done = False
        try:
            for agent_id in agent_ids:
                folder = self.folder / agent_id
                made[agent_id] = await self.worktrees.make(self.workspace, folder, agent_id)
            is_done = True
        except WorktreeFailed as exc:
            raise StartRefused(str(exc)) from exc
        finally:
            if not is_done:
                await self.undo(made.values())
        return made

    def with_worktree(self, new: NewAgent, made: Worktree | None) -> NewAgent:
        """Return the new agent with its worktree, if it has one."""
        if made is None:
            return new
        terms, kept = decode(new.terms, AgentTerms), stored_worktree(made)
        terms = encode(with_(terms, worktree=kept)).decode()
        return replace(new, terms=terms, worktree=kept.workspace, branch=kept.branch)

    async def undo(self, made: Iterable[Worktree]) -> None:
        for worktree in made:
            await self.worktrees.remove(worktree)

    async def finish(self, terms: AgentTerms) -> WorktreeOutcome | None:
        """Determine the changes at the end of an assignment; remove an unchanged worktree."""
        kept = terms.worktree
        if kept is None:
            return None
        return await self.worktrees.finish(_worktree_of(kept))

    async def noted(self) -> list[str]:
        """List the agents that have a worktree, complete or not."""
        return await asyncio.to_thread(noted_in, self.folder)

    async def clear(self, agent_id: str) -> None:
        """Remove the remains of a worktree that is not stored, unless work is in it."""
        await self.worktrees.clear(self.folder / agent_id)


def stored_worktree(made: Worktree) -> KeptWorktree:
    return KeptWorktree(
        str(made.path), str(made.workspace), made.branch, made.base, str(made.entry)
    )


def _worktree_of(kept: KeptWorktree) -> Worktree:
    return Worktree(Path(kept.path), Path(kept.workspace), kept.branch, kept.base, Path(kept.entry))
