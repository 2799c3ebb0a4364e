"""The tools of a workspace, as a model and the loop see them."""

from tests.tools.conftest import Desk


async def test_the_tools_only_read_so_they_run_side_by_side_and_may_be_repeated(desk: Desk) -> None:
    assert {name: (t.spec.name, t.parallel, t.crash) for name, t in desk.tools.items()} == {
        name: (name, True, "again") for name in ("glob", "grep", "ls", "view")
    }


async def test_schemas_name_the_fields_that_clients_render(desk: Desk) -> None:
    fields = {
        name: (list(tool.spec.parameters["properties"]), tool.spec.parameters["required"])
        for name, tool in desk.tools.items()
    }
    assert fields == {
        "glob": (["pattern", "path"], ["pattern"]),
        "grep": (["pattern", "path", "include", "literal_text"], ["pattern"]),
        "ls": (["path", "ignore", "depth"], []),
        "view": (["file_path", "offset", "limit"], ["file_path"]),
    }
