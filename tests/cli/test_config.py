"""`culm config`: which files count, what is wrong in them, what they say together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from culm.config.schema import json_schema
from culm.workspace.roots import project_folder
from tests.cli.conftest import Desk, Said

KEY = "sk-never-to-be-seen"
URL = "http://127.0.0.1:9/v1"


# --- path


def test_every_file_is_listed_the_lowest_first_with_how_it_stands(desk: Desk) -> None:
    own = project_folder(desk.data_dir, desk.project) / "config.json"
    own.parent.mkdir(parents=True)
    own.write_text("{")
    desk.write_user({})
    desk.write(".crush.json", {"permissions": {"allowed_tools": ["bash"]}})
    assert desk.culm("trust", "--yes").status == 0
    desk.write("crush.json", {"unknown": 1})
    desk.write(".culm.json", {"unknown": 1})
    desk.write("culm.json", {"env": {"A": "b"}})
    rows = [line.split("  ") for line in desk.culm("config", "path").out.splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        [str(desk.user_file), "there", "yours"],
        [str(desk.data_dir / "config.json"), "not there", "set by clients, for all directories"],
        [str(desk.project / ".crush.json"), "trusted", "the project's"],
        [str(desk.project / "crush.json"), "there", "the project's"],
        [str(desk.project / ".culm.json"), "bad", "the project's"],
        [str(desk.project / "culm.json"), "not trusted", "the project's"],
        [str(own), "bad", "set by clients, for this directory"],
    ]


def test_a_directory_is_the_same_by_whatever_link_it_is_named(desk: Desk, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(desk.project)
    desk.write("culm.json", {"env": {"A": "b"}})
    assert desk.culm("trust", "--yes", str(link)).status == 0
    assert " trusted " in desk.culm("config", "path").out
    assert desk.culm("config", "path", "--dir", str(link)) == desk.culm("config", "path")


# --- check


def test_with_no_file_and_with_good_ones_all_is_well(desk: Desk) -> None:
    assert desk.culm("config", "check") == Said(0, "ok: 0 files\n")
    desk.write_user({"linger_s": 5, "providers": {"mine": {"base_url": URL}}})
    assert desk.culm("config", "check") == Said(0, "ok: 1 file\n")


def test_a_file_that_is_no_json_is_named_with_the_line(desk: Desk) -> None:
    file = desk.write("culm.json", '{\n  "models": {,}\n}')
    said = desk.culm("config", "check")
    assert (said.status, said.err) == (1, "")
    assert said.out.startswith(f"{file}:2: not valid JSON: ")
    assert said.out.endswith("\n  hint: JSON is wanted; comments and trailing commas are fine\n")


def test_every_problem_is_told_at_once_with_file_line_key_and_the_nearest_valid_one(
    desk: Desk,
) -> None:
    user = desk.write_user('{\n"linger_s": "x",\n"provders": {}\n}')
    file = desk.write("culm.json", '{\n"options": {"debg": true}\n}')
    assert desk.culm("config", "check") == Said(
        1,
        f"{user}:2: linger_s: a number is wanted, not a string\n"
        f"{user}:3: provders: unknown key\n"
        "  hint: did you mean 'providers'?\n"
        f"{file}:2: options.debg: unknown key\n"
        "  hint: did you mean 'debug'?\n",
    )


def test_a_reference_to_an_unset_variable_is_told_where_it_counts(desk: Desk) -> None:
    file = desk.write_user(
        """{
  "providers": {
    "mine": {
      "base_url": "$MY_URL",
      "api_key": "${MY_KEY}",
      "extra_headers": {"X-A": "$SET", "X-B": "${B:-b}", "X-C": "$C", "X-D": "$(exit 1)"}
    },
    "off": {"disable": true, "base_url": "$OFF_URL"}
  },
  "env": {"SET": "1", "A": "$A_B"}
}"""
    )
    hint = "  hint: set the variable, write `${NAME:-default}`, or set the key to something else\n"
    assert desk.culm("config", "check") == Said(
        1,
        f"{file}:4: providers.mine.base_url: $MY_URL is not set\n{hint}"
        f"{file}:5: providers.mine.api_key: $MY_KEY is not set\n{hint}"
        f"{file}:6: providers.mine.extra_headers.X-C: $C is not set\n{hint}"
        f"{file}:10: env.A: $A_B is not set\n{hint}",
    )


def test_a_key_is_found_in_its_line_however_it_is_spelled(desk: Desk) -> None:
    file = desk.write_user('{"Providers": {\n"mine": {\n"BASE_URL":\n"$MY_URL"}}}')
    assert desk.culm("config", "check").out.startswith(f"{file}:3: providers.mine.base_url: ")


def test_a_cycle_of_variables_is_told_at_each_of_them(desk: Desk) -> None:
    desk.set_env(PATH="/bin")
    file = desk.write_user('{"env": {\n"A": "$B",\n"B": "x$A",\n"PATH": "$PATH:/mine"}}')
    assert desk.culm("config", "check") == Said(
        1,
        f"{file}:2: env.A: $A refers to itself by way of $B, $A\n"
        f"{file}:3: env.B: $B refers to itself by way of $A, $B\n",
    )


def test_a_reference_that_a_higher_file_replaces_is_no_problem(desk: Desk) -> None:
    desk.write_user({"providers": {"mine": {"base_url": URL, "api_key": "$UNSET_KEY"}}})
    desk.write("culm.json", {"providers": {"mine": {"api_key": KEY}}})
    assert desk.culm("config", "check").status == 1
    assert desk.culm("trust", "--yes").status == 0
    assert desk.culm("config", "check") == Said(0, "ok: 2 files\n")


@pytest.mark.parametrize(
    ("provider", "what", "hint"),
    [
        ("mien", "provider 'mien' is not configured", "did you mean 'mine'?"),
        ("xyzzy", "provider 'xyzzy' is not configured", "there is offline, mine"),
        (
            "groq",
            "Groq is not configured",
            "set GROQ_API_KEY, or write providers.groq.api_key",
        ),
        (
            "ollama",
            "provider 'ollama' is not configured",
            "no such server answers on this machine; start it",
        ),
    ],
)
def test_a_selected_model_of_a_provider_that_is_not_there_is_told_with_the_nearest(
    desk: Desk, provider: str, what: str, hint: str
) -> None:
    desk.discover()
    chosen = json.dumps({"provider": provider, "model": "m"})
    file = desk.write_user(
        f'{{"providers": {{"mine": {{"base_url": "{URL}"}}}},\n'
        f'"models": {{"large":\n{chosen}}},\n'
        f'"fallbacks": {{"small": [\n{chosen}]}}}}'
    )
    said = desk.culm("config", "check")
    assert said.status == 1
    large, large_hint, small, small_hint = said.out.splitlines()
    assert large.startswith(f"{file}:3: models.large.provider: {what}")
    assert small.startswith(f"{file}:5: fallbacks.small[0].provider: {what}")
    assert large_hint == small_hint == f"  hint: {hint}"


def test_a_provider_that_cannot_be_used_as_it_is_written_is_told(desk: Desk) -> None:
    file = desk.write_user(
        '{"providers": {\n"one": {"type": "openai"},\n"two": {},\n"three": {"type": "xyzzy"}}}'
    )
    said = desk.culm("config", "check")
    assert said.status == 1
    assert [line.partition(";")[0] for line in said.out.splitlines()] == [
        f"{file}:2: providers.one: provider 'one' has no key: write providers.one.api_key",
        f"{file}:3: providers.two: provider 'two' has no base_url",
        f"{file}:4: providers.three: nobody here speaks to a provider of type 'xyzzy'",
    ]


def test_a_model_that_looks_misspelled_is_worth_a_note_only(desk: Desk) -> None:
    provider = {"base_url": URL, "models": [{"id": "large-one"}]}
    chosen = {"large": {"provider": "mine", "model": "lagre-one"}}
    file = desk.write_user({"providers": {"mine": provider}, "models": chosen})
    assert desk.culm("config", "check") == Said(
        0,
        "ok: 1 file\n",
        f"note: {file}:1: models.large.model: provider 'mine' lists no model 'lagre-one'\n"
        "  hint: did you mean 'large-one'?\n",
    )


def test_what_is_ignored_and_what_only_crush_knows_are_notes(desk: Desk) -> None:
    crush = desk.write("crush.json", '{\n"crush_only\\u001b": 1}')
    ours = desk.write("culm.json", {"hooks": {}, "providers": {"x": {"base_url": "$X_URL"}}})
    said = desk.culm("config", "check")
    assert (said.status, said.out) == (0, "ok: 2 files\n")
    lines = said.err.splitlines()
    assert lines[0] == f"note: {crush}:2: crush_only\\x1b: unknown key"
    assert lines[2:] == [
        f"note: {ours}: it is not trusted, so this part of it is ignored: hooks, providers",
        "  hint: read it, then say: culm trust",
    ]


def test_a_file_is_checked_alone_as_if_it_were_trusted(desk: Desk) -> None:
    desk.write_user("{")
    file = desk.write("culm.json", {"providers": {"x": {"base_url": "$X_URL"}}})
    said = desk.culm("config", "check", "culm.json")
    assert said.status == 1
    assert said.out.startswith(f"{file}:1: providers.x.base_url: $X_URL is not set\n")
    desk.write("other.json", {"linger_s": 1})
    assert desk.culm("config", "check", "other.json") == Said(0, "ok: 1 file\n")
    assert desk.culm("config", "check", "nowhere.json").status == 2


def test_a_damaged_document_of_clients_is_a_problem_and_a_foreign_key_in_it_a_note(
    desk: Desk,
) -> None:
    document = desk.data_dir / "config.json"
    document.parent.mkdir(parents=True)
    document.write_text('{\n"theirs": 1}')
    said = desk.culm("config", "check")
    assert (said.status, said.out) == (0, "ok: 1 file\n")
    assert said.err.startswith(f"note: {document}:2: theirs: unknown key\n")
    document.write_text("[]")
    assert desk.culm("config", "check") == Said(1, f"{document}:1: a JSON object is wanted\n")
    assert desk.culm("config", "show").err == (
        f"note: {document}:1: a JSON object is wanted; nothing in it counts\n"
    )


# --- show


def test_all_files_are_shown_together_without_a_key(desk: Desk) -> None:
    desk.set_env(MY_KEY=KEY)
    mine = {"base_url": URL, "api_key": "$MY_KEY", "models": [{"id": "m"}]}
    desk.write_user({"providers": {"mine": mine, "other": {"base_url": URL, "api_key": KEY}}})
    desk.write("culm.json", {"options": {"context_paths": ["NOTES.md"]}, "env": {"A": KEY}})
    said = desk.culm("config", "show")
    whole = json.loads(said.out)
    assert whole["providers"]["mine"] == mine
    assert whole["providers"]["other"]["api_key"] == "[secret]"
    assert whole["options"] == {"context_paths": ["NOTES.md"]}
    assert whole["models"]["large"] == {"model": "m", "provider": "mine"}
    assert "env" not in whole, "the project's file is not trusted"
    desk.culm("trust", "--yes")
    for args in ((), ("--origin",)):
        assert KEY not in "".join(map(str, desk.culm("config", "show", *args)))


def test_each_value_is_shown_with_the_file_that_set_it(desk: Desk) -> None:
    user = desk.write_user({"linger_s": 5, "providers": {"mine": {"base_url": URL, "name": "A"}}})
    file = desk.write("culm.json", {"providers": {"mine": {"name": "B", "models": [{"id": "m"}]}}})
    desk.culm("trust", "--yes")
    lines = desk.culm("config", "show", "--origin").out.splitlines()
    shown = [line.split("  ", 1) for line in lines if "providers.offline" not in line]
    assert [(origin, rest.strip()) for origin, rest in shown] == [
        (str(user), f'providers.mine.base_url = "{URL}"'),
        (str(file), 'providers.mine.name = "B"'),
        (str(file), 'providers.mine.models = [{"id": "m"}]'),
        (str(user), "linger_s = 5.0"),
        ("default", 'models.large.model = "m"'),
        ("default", 'models.large.provider = "mine"'),
        ("default", 'models.small.model = "m"'),
        ("default", 'models.small.provider = "mine"'),
    ]


# --- schema and help


def test_the_schema_is_the_published_one(desk: Desk) -> None:
    said = desk.culm("config", "schema")
    assert (said.status, json.loads(said.out)) == (0, json.loads(json.dumps(json_schema())))


@pytest.mark.parametrize(
    "command",
    [
        ("models",),
        ("config",),
        ("config", "path"),
        ("config", "check"),
        ("config", "show"),
        ("config", "schema"),
        ("trust",),
    ],
)
def test_every_command_has_help_with_an_example(desk: Desk, command: tuple[str, ...]) -> None:
    said = desk.culm(*command, "--help")
    assert said.status == 0
    assert f"\n  Example:\n    culm {' '.join(command)}" in said.out


def test_help_needs_nothing_but_click() -> None:
    program = (
        "import sys, culm.cli.main as m\n"
        "try:\n m.culm(['models', '--help'])\n"
        "finally:\n print(sorted({'aiohttp', 'msgspec', 'asyncio'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.splitlines()[-1] == "[]"
