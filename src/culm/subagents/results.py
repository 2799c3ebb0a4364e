"""Tool results about agents: answers, changed files and costs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from culm.tools.base import CallResult
from culm.wire.agents import Agent
from culm.wire.codec import Json, encode

FILES_SHOWN = 20
LIST_MAX = 200  # Lines of a tree in one result.
ANSWER_CHARS_MAX = 100_000  # Per answer of one agent.
ANSWERS_CHARS_MAX = 800_000  # Per result, which is cut off a little above that.


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One agent and the result of its latest assignment."""

    agent: Agent
    answer: str | None = None  # Its last answer; None if it is not to be shown.
    files: Sequence[str] = ()
    note: str = ""  # About its worktree.


def result_of(reports: Sequence[AgentReport], note: str = "") -> CallResult:
    """Format the reports of agents that have ended or that the caller stopped waiting for."""
    room = min(ANSWER_CHARS_MAX, ANSWERS_CHARS_MAX // max(1, len(reports)))
    shown = [_shown(report, room, is_alone=len(reports) == 1) for report in reports]
    content = "\n\n".join(filter(None, (*shown, note)))
    is_error = bool(reports) and not any(_is_success(report) for report in reports)
    return CallResult(content or "There are none.", is_error=is_error, metadata=_metadata(reports))


def _is_success(report: AgentReport) -> bool:
    """Return False for a failed agent, and for one that completed with an empty answer."""
    if report.agent.state != "ended":
        return True
    has_answered = report.answer is None or bool(report.answer.strip())
    return report.agent.outcome == "completed" and has_answered


def _shown(report: AgentReport, room: int, *, is_alone: bool) -> str:
    agent, answer = report.agent, (report.answer or "").strip()
    if len(answer) > room:
        answer = f"{answer[:room]}\n[The rest was cut off; its session has it.]"
    if agent.state == "ended" and report.answer is not None and not answer:
        answer = "It said nothing." if agent.outcome == "completed" else ""
    head = "" if is_alone else f"## {agent.name}"
    return "\n".join(filter(None, (head, answer, f"[{' · '.join(_facts(report))}]")))


def _facts(report: AgentReport) -> list[str]:
    agent = report.agent
    facts = [f"agent {agent.agent_id}", _state(agent)]
    if report.files:
        more = len(report.files) - FILES_SHOWN
        names = ", ".join(report.files[:FILES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        facts.append(f"files changed: {names}")
    if report.note:
        facts.append(report.note)
    facts.append(f"{agent.tokens} tokens, ${agent.cost:.4f}")
    return facts


def _state(agent: Agent) -> str:
    if agent.state != "ended":
        waits = f", waits for {agent.waiting_for}" if agent.waiting_for else ""
        return f"{agent.state}{waits}"
    reason = " ".join(agent.reason.split())
    return f"{agent.outcome}: {reason}" if reason else str(agent.outcome)


def _metadata(reports: Sequence[AgentReport]) -> str:
    """Encode the reports for clients."""
    agents: list[Json] = [
        {
            "agent_id": report.agent.agent_id,
            "session_id": report.agent.session_id,
            "name": report.agent.name,
            "role": report.agent.role,
            "state": report.agent.state,
            "outcome": report.agent.outcome,
            "cost": report.agent.cost,
            "tokens": report.agent.tokens,
            "files": list(report.files),
        }
        for report in reports
    ]
    return encode({"agents": agents}).decode()


def listing_of(agents: Sequence[Agent], top: int) -> CallResult:
    """Format a tree, each agent below its parent."""
    if not agents:
        return CallResult("No agent was started.")
    by_parent: dict[str, list[Agent]] = {}
    known = {agent.agent_id for agent in agents}
    for agent in agents:
        by_parent.setdefault(agent.parent_id if agent.parent_id in known else "", []).append(agent)
    lines: list[str] = []
    waiting = list(reversed(by_parent.get("", [])))
    while waiting and len(lines) < LIST_MAX:
        agent = waiting.pop()
        waiting += reversed(by_parent.get(agent.agent_id, []))
        margin = "  " * max(0, agent.depth - top - 1)
        about = f"{agent.name} ({agent.role}, {agent.model})"
        cost = f"{agent.tokens} tokens, ${agent.cost:.4f}"
        lines.append(f"{margin}- {agent.agent_id} {about}: {_state(agent)}; {cost}")
    if len(lines) < len(agents):
        lines.append(f"[{len(agents) - len(lines)} more are not shown.]")
    return CallResult(
        "\n".join(lines), metadata=_metadata([AgentReport(one) for one in agents[:LIST_MAX]])
    )
