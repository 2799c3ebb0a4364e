"""The tools of a workspace as seen by a model and the run loop."""

from tests.tools.conftest import ToolHarness


async def test_readers_run_in_parallel_and_writers_alone_and_once(
    harness: ToolHarness,
) -> None:
    readers = dict.fromkeys(("glob", "grep", "ls", "view"), (True, "again"))
    writers = dict.fromkeys(("edit", "multiedit", "write"), (False, "ask"))
    assert {name: (t.parallel, t.crash) for name, t in harness.tools.items()} == readers | writers
    assert all(tool.spec.name == name for name, tool in harness.tools.items())


async def test_schemas_name_the_fields_that_clients_render(harness: ToolHarness) -> None:
    fields = {
        name: (list(tool.spec.parameters["properties"]), tool.spec.parameters["required"])
        for name, tool in harness.tools.items()
    }
    edit = ["file_path", "old_string", "new_string"]
    assert fields == {
        "edit": ([*edit, "replace_all"], edit),
        "glob": (["pattern", "path"], ["pattern"]),
        "grep": (["pattern", "path", "include", "literal_text"], ["pattern"]),
        "ls": (["path", "ignore", "depth"], []),
        "multiedit": (["file_path", "edits"], ["file_path", "edits"]),
        "view": (["file_path", "offset", "limit"], ["file_path"]),
        "write": (["file_path", "content"], ["file_path", "content"]),
    }
