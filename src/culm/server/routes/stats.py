"""What runs have used up."""

from culm.server.api import Route
from culm.store.stats import since_of, stats_since
from culm.wire.queries import StatsQuery
from culm.wire.stats import Stats
from culm.workspace.workspace import LiveWorkspace


async def get_stats(workspace: LiveWorkspace, query: StatsQuery) -> Stats:
    """Add up what runs have used: in all, by model, by day, and the costliest sessions."""
    since = since_of(query.days, workspace.clock.now_s(), query.utc_offset_s)
    return await workspace.store.read(stats_since(since, query.utc_offset_s))


ROUTES = [Route("GET", "/v1/workspaces/{workspace_id}/stats", get_stats)]
