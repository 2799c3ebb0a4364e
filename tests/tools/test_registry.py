"""The tools of a workspace as seen by a model, the run loop and clients."""

from culm.tools.registry import SPECS
from tests.tools.conftest import ToolHarness

READERS = ("glob", "grep", "job_output", "ls", "view")
WRITERS = ("bash", "download", "edit", "multiedit", "write")
OTHERS = {
    "fetch": (True, "again"),
    "job_kill": (False, "again"),
    "question": (False, "again"),
    "todos": (False, "again"),
}


async def test_readers_run_in_parallel_and_writers_alone_and_once(
    harness: ToolHarness,
) -> None:
    readers = dict.fromkeys(READERS, (True, "again"))
    writers = dict.fromkeys(WRITERS, (False, "ask"))
    found = {name: (tool.parallel, tool.crash) for name, tool in harness.tools.items()}
    assert found == readers | writers | OTHERS
    assert all(tool.spec.name == name for name, tool in harness.tools.items())


async def test_list_of_specs_has_every_tool(harness: ToolHarness) -> None:
    specs = {spec.name: spec for spec in SPECS}
    assert {name: specs.get(name) for name in harness.tools} == {
        name: tool.spec for name, tool in harness.tools.items()
    }


def test_facts_name_arguments_that_exist() -> None:
    for spec in SPECS:
        named = {*spec.facts.subject, *spec.facts.shown_arguments}
        assert named <= set(spec.parameters["properties"]), spec.name


async def test_schemas_name_the_fields_that_clients_render(harness: ToolHarness) -> None:
    fields = {
        name: (list(tool.spec.parameters["properties"]), tool.spec.parameters["required"])
        for name, tool in harness.tools.items()
        if tool.spec.facts.path_arguments
    }
    edit = ["file_path", "old_string", "new_string"]
    assert fields == {
        "download": (["url", "file_path", "timeout"], ["url", "file_path"]),
        "edit": ([*edit, "replace_all"], edit),
        "glob": (["pattern", "path"], ["pattern"]),
        "grep": (["pattern", "path", "include", "literal_text"], ["pattern"]),
        "ls": (["path", "ignore", "depth"], []),
        "multiedit": (["file_path", "edits"], ["file_path", "edits"]),
        "view": (["file_path", "offset", "limit"], ["file_path"]),
        "write": (["file_path", "content"], ["file_path", "content"]),
    }
