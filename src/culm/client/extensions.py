"""Requests about the extensions of a workspace: skills, language servers, MCP servers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from culm.wire.extensions import (
    AuthUrl,
    Diagnostic,
    GetPrompt,
    LspInfo,
    McpInfo,
    McpName,
    McpPrompt,
    PendingAuth,
    PromptText,
    ReadResource,
    ReadSkill,
    Resource,
    SkillContent,
    SkillInfo,
    StartLsp,
)

if TYPE_CHECKING:
    from culm.client.workspace import RemoteWorkspace


class RemoteSkills:
    """The skills of a workspace, as `RemoteWorkspace.skills`."""

    def __init__(self, workspace: "RemoteWorkspace") -> None:
        self._client = workspace.client
        self._path = workspace.path

    async def all(self) -> list[SkillInfo]:
        return await self._client.ask("GET", self._path("/skills"), list[SkillInfo])

    async def read(self, skill_id: str) -> SkillContent:
        body = ReadSkill(skill_id)
        return await self._client.ask("POST", self._path("/skills/read"), SkillContent, body)


class RemoteLsps:
    """The language servers of a workspace, as `RemoteWorkspace.lsps`."""

    def __init__(self, workspace: "RemoteWorkspace") -> None:
        self._client = workspace.client
        self._path = workspace.path

    async def states(self) -> dict[str, LspInfo]:
        """The state of each server, by name."""
        return await self._client.ask("GET", self._path("/lsps"), dict[str, LspInfo])

    async def diagnostics(self, name: str) -> dict[str, list[Diagnostic]]:
        """The diagnostics of one server, by the URI of the file."""
        path = self._path(f"/lsps/{quote(name, safe='')}/diagnostics")
        return await self._client.ask("GET", path, dict[str, list[Diagnostic]])

    async def start(self, path: str) -> None:
        """Start the servers that handle a file."""
        await self._client.request("POST", self._path("/lsps/start"), StartLsp(path))

    async def stop(self) -> None:
        """Stop all of them."""
        await self._client.request("POST", self._path("/lsps/stop"))


class RemoteMcp:
    """The MCP servers of a workspace, as `RemoteWorkspace.mcp`."""

    def __init__(self, workspace: "RemoteWorkspace") -> None:
        self._client = workspace.client
        self._workspace = workspace

    async def states(self) -> dict[str, McpInfo]:
        """The state of each server, by name."""
        return await self._client.ask("GET", self._path("states"), dict[str, McpInfo])

    async def pending_auth(self) -> list[PendingAuth]:
        """The servers that wait for a person to log in."""
        return await self._client.ask("GET", self._path("pending-auth"), list[PendingAuth])

    async def auth_url(self, name: str) -> str:
        """The login URL of a server; empty if it does not wait for a login."""
        path = self._path(f"auth-url?name={quote(name, safe='')}")
        return (await self._client.ask("GET", path, AuthUrl)).auth_url

    async def authenticate(self, name: str) -> dict[str, str]:
        """Start a login and wait until the person has completed it; the caller bounds the wait."""
        body = McpName(name)
        return await self._client.ask(
            "POST", self._path("auth"), dict[str, str], body, timeout_s=None
        )

    async def refresh_tools(self, name: str) -> None:
        await self._client.request("POST", self._path("refresh-tools"), McpName(name))

    async def refresh_prompts(self, name: str) -> None:
        await self._client.request("POST", self._path("refresh-prompts"), McpName(name))

    async def refresh_resources(self, name: str) -> None:
        await self._client.request("POST", self._path("refresh-resources"), McpName(name))

    async def read_resource(self, name: str, uri: str) -> list[Resource]:
        body = ReadResource(name, uri)
        return await self._client.ask("POST", self._path("read-resource"), list[Resource], body)

    async def prompts(self) -> list[McpPrompt]:
        """The prompts of all servers."""
        return await self._client.ask("GET", self._path("prompts"), list[McpPrompt])

    async def fill_prompt(self, name: str, prompt_id: str, args: Mapping[str, str]) -> str:
        """A prompt of a server, filled in with arguments."""
        body = GetPrompt(name, prompt_id, dict(args))
        return (await self._client.ask("POST", self._path("get-prompt"), PromptText, body)).prompt

    async def enable_docker(self) -> None:
        """Enable the MCP server of Docker."""
        await self._client.request("POST", self._path("docker/enable"))

    async def disable_docker(self) -> None:
        await self._client.request("POST", self._path("docker/disable"))

    def _path(self, rest: str) -> str:
        return self._workspace.path(f"/mcp/{rest}")
