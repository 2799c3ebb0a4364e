"""The services that the parts of one workspace share."""

import asyncio

from msgspec import Struct

from culm.events.hub import Hub
from culm.model.choice import Models
from culm.run.messages import Messages
from culm.services import ServerServices
from culm.store.store import Store
from culm.workspace.claims import WorkspaceLifetime
from culm.workspace.config import WorkspaceConfig
from culm.workspace.roots import WorkspaceInfo


class WorkspaceServices(Struct, frozen=True):
    about: WorkspaceInfo
    server: ServerServices
    tasks: asyncio.TaskGroup
    store: Store
    configuration: WorkspaceConfig
    hub: Hub
    messages: Messages
    models: Models
    lifetime: WorkspaceLifetime
