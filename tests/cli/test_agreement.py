"""The commands read the same configuration without a server as the server does."""

import asyncio
import json

from culm.wire.config import SelectedModel, SetConfig, SetModel
from tests.cli.conftest import CliHarness
from tests.flow.conftest import open_flow
from tests.support import WAIT_S


def provider(port: int) -> dict[str, object]:
    return {"base_url": f"http://127.0.0.1:{port}/v1", "models": [{"id": "m"}]}


async def test_commands_show_the_providers_and_models_of_the_server(cli: CliHarness) -> None:
    folder = cli.project.parent / "server"
    options = ("--config", f"{folder}/culm.json", "--data-dir", f"{folder}/data")
    config = {"providers": {"users": provider(1), "both": provider(2)}}
    cli.write("crush.json", {"providers": {"trusted": provider(3), "both": provider(4)}})
    async with asyncio.timeout(WAIT_S), open_flow(folder, "unix", config=config) as flow:
        assert (await asyncio.to_thread(cli.culm, "trust", "--yes", *options)).status == 0
        cli.write(
            "culm.json",
            {
                "providers": {"untrusted": provider(5)},
                "models": {"large": {"provider": "routes", "model": "m"}},
            },
        )
        client = await flow.client()
        opened = await client.open_workspace(cli.project)
        request = SetConfig(0, "providers.routes", value=provider(6))
        await client.request("POST", opened.path("/config/set"), request)
        chosen = SetModel(1, "small", SelectedModel("m", "trusted"))
        await client.request("POST", opened.path("/config/model"), chosen)
        await client.retire()
        served = (await (await flow.client()).open_workspace(cli.project)).info.config
        models = await asyncio.to_thread(cli.culm, "models", "--json", *options)
        shown = await asyncio.to_thread(cli.culm, "config", "show", *options)
    listing, whole = json.loads(models.out), json.loads(shown.out)
    roles = {one["role"]: (one["provider"], one["model"]) for one in listing["roles"]}
    assert roles == {role: (one.provider, one.model) for role, one in served.models.items()}
    assert roles == {"large": ("routes", "m"), "small": ("trusted", "m")}
    addresses = {row["id"]: row["address"] for row in listing["providers"]}
    assert addresses == {name: one.base_url for name, one in served.providers.items()}
    assert addresses == {
        "users": "http://127.0.0.1:1/v1",
        "routes": "http://127.0.0.1:6/v1",
        "both": "http://127.0.0.1:4/v1",
        "trusted": "http://127.0.0.1:3/v1",
        "offline": "",
    }
    assert whole["providers"].keys() == served.providers.keys()
