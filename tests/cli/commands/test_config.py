"""`culm config`: the files, their problems, and the merged configuration."""

import json
from pathlib import Path

import pytest

from culm.config.schema import json_schema
from culm.workspace.roots import project_folder
from tests.cli.conftest import CliHarness, CommandResult

KEY = "sk-never-to-be-seen"
URL = "http://127.0.0.1:9/v1"


# --- path


def test_path_lists_every_file_by_precedence_with_its_state(cli: CliHarness) -> None:
    own = project_folder(cli.data_dir, cli.project) / "config.json"
    own.parent.mkdir(parents=True)
    own.write_text("{")
    cli.write_user({})
    cli.write(".crush.json", {"permissions": {"allowed_tools": ["bash"]}})
    assert cli.culm("trust", "--yes").status == 0
    cli.write("crush.json", {"unknown": 1})
    cli.write(".culm.json", {"unknown": 1})
    cli.write("culm.json", {"env": {"A": "b"}})
    rows = [line.split("  ") for line in cli.culm("config", "path").out.splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        [str(cli.user_file), "there", "yours"],
        [str(cli.data_dir / "config.json"), "not there", "set by clients, for all directories"],
        [str(cli.project / ".crush.json"), "trusted", "the project's"],
        [str(cli.project / "crush.json"), "there", "the project's"],
        [str(cli.project / ".culm.json"), "bad", "the project's"],
        [str(cli.project / "culm.json"), "not trusted", "the project's"],
        [str(own), "bad", "set by clients, for this directory"],
    ]


def test_symlinked_directory_is_the_same_project(cli: CliHarness, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(cli.project)
    cli.write("culm.json", {"env": {"A": "b"}})
    assert cli.culm("trust", "--yes", str(link)).status == 0
    assert " trusted " in cli.culm("config", "path").out
    assert cli.culm("config", "path", "--dir", str(link)) == cli.culm("config", "path")


# --- check


def test_check_is_ok_with_no_files_and_with_valid_ones(cli: CliHarness) -> None:
    assert cli.culm("config", "check") == CommandResult(0, "ok: 0 files\n")
    cli.write_user({"linger_s": 5, "providers": {"mine": {"base_url": URL}}})
    assert cli.culm("config", "check") == CommandResult(0, "ok: 1 file\n")


def test_check_reports_invalid_json_with_its_line(cli: CliHarness) -> None:
    file = cli.write("culm.json", '{\n  "models": {,}\n}')
    result = cli.culm("config", "check")
    assert (result.status, result.err) == (1, "")
    assert result.out.startswith(f"{file}:2: not valid JSON: ")
    assert result.out.endswith("\n  hint: use JSON; comments and trailing commas are allowed\n")


def test_check_reports_every_problem_with_location_and_suggestion(
    cli: CliHarness,
) -> None:
    user = cli.write_user('{\n"linger_s": "x",\n"provders": {}\n}')
    file = cli.write("culm.json", '{\n"options": {"debg": true}\n}')
    assert cli.culm("config", "check") == CommandResult(
        1,
        f"{user}:2: linger_s: expected a number, got a string\n"
        f"{user}:3: provders: unknown key\n"
        "  hint: did you mean 'providers'?\n"
        f"{file}:2: options.debg: unknown key\n"
        "  hint: did you mean 'debug'?\n",
    )


def test_check_reports_unset_variables_that_are_used(cli: CliHarness) -> None:
    file = cli.write_user(
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
    assert cli.culm("config", "check") == CommandResult(
        1,
        f"{file}:4: providers.mine.base_url: $MY_URL is not set\n{hint}"
        f"{file}:5: providers.mine.api_key: $MY_KEY is not set\n{hint}"
        f"{file}:6: providers.mine.extra_headers.X-C: $C is not set\n{hint}"
        f"{file}:10: env.A: $A_B is not set\n{hint}",
    )


def test_check_finds_the_line_of_a_key_in_any_letter_case(cli: CliHarness) -> None:
    file = cli.write_user('{"Providers": {\n"mine": {\n"BASE_URL":\n"$MY_URL"}}}')
    assert cli.culm("config", "check").out.startswith(f"{file}:3: providers.mine.base_url: ")


def test_check_reports_a_cycle_of_variables_at_each_one(cli: CliHarness) -> None:
    cli.set_env(PATH="/bin")
    file = cli.write_user('{"env": {\n"A": "$B",\n"B": "x$A",\n"PATH": "$PATH:/mine"}}')
    assert cli.culm("config", "check") == CommandResult(
        1,
        f"{file}:2: env.A: $A refers to itself by way of $B, $A\n"
        f"{file}:3: env.B: $B refers to itself by way of $A, $B\n",
    )


def test_check_ignores_a_reference_that_a_higher_file_replaces(cli: CliHarness) -> None:
    cli.write_user({"providers": {"mine": {"base_url": URL, "api_key": "$UNSET_KEY"}}})
    cli.write("culm.json", {"providers": {"mine": {"api_key": KEY}}})
    assert cli.culm("config", "check").status == 1
    assert cli.culm("trust", "--yes").status == 0
    assert cli.culm("config", "check") == CommandResult(0, "ok: 2 files\n")


@pytest.mark.parametrize(
    ("provider", "problem", "hint"),
    [
        ("mien", "provider 'mien' is not configured", "did you mean 'mine'?"),
        ("xyzzy", "provider 'xyzzy' is not configured", "known: offline, mine"),
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
def test_check_reports_a_model_of_an_unknown_provider_with_a_hint(
    cli: CliHarness, provider: str, problem: str, hint: str
) -> None:
    cli.discover()
    chosen = json.dumps({"provider": provider, "model": "m"})
    file = cli.write_user(
        f'{{"providers": {{"mine": {{"base_url": "{URL}"}}}},\n'
        f'"models": {{"large":\n{chosen}}},\n'
        f'"fallbacks": {{"small": [\n{chosen}]}}}}'
    )
    result = cli.culm("config", "check")
    assert result.status == 1
    large, large_hint, small, small_hint = result.out.splitlines()
    assert large.startswith(f"{file}:3: models.large.provider: {problem}")
    assert small.startswith(f"{file}:5: fallbacks.small[0].provider: {problem}")
    assert large_hint == small_hint == f"  hint: {hint}"


def test_check_reports_unusable_providers(cli: CliHarness) -> None:
    file = cli.write_user(
        '{"providers": {\n"one": {"type": "openai"},\n"two": {},\n"three": {"type": "xyzzy"}}}'
    )
    result = cli.culm("config", "check")
    assert result.status == 1
    assert [line.partition(";")[0] for line in result.out.splitlines()] == [
        f"{file}:2: providers.one: provider 'one' has no key: write providers.one.api_key",
        f"{file}:3: providers.two: provider 'two' has no base_url",
        f"{file}:4: providers.three: unknown provider type 'xyzzy'",
    ]


def test_check_notes_a_possibly_misspelled_model(cli: CliHarness) -> None:
    provider = {"base_url": URL, "models": [{"id": "large-one"}]}
    chosen = {"large": {"provider": "mine", "model": "lagre-one"}}
    file = cli.write_user({"providers": {"mine": provider}, "models": chosen})
    assert cli.culm("config", "check") == CommandResult(
        0,
        "ok: 1 file\n",
        f"note: {file}:1: models.large.model: provider 'mine' lists no model 'lagre-one'\n"
        "  hint: did you mean 'large-one'?\n",
    )


def test_check_notes_ignored_parts_and_keys_known_only_to_crush(cli: CliHarness) -> None:
    crush = cli.write("crush.json", '{\n"crush_only\\u001b": 1}')
    ours = cli.write("culm.json", {"hooks": {}, "providers": {"x": {"base_url": "$X_URL"}}})
    result = cli.culm("config", "check")
    assert (result.status, result.out) == (0, "ok: 2 files\n")
    lines = result.err.splitlines()
    assert lines[0] == f"note: {crush}:2: crush_only\\x1b: unknown key"
    assert lines[2:] == [
        f"note: {ours}: it is not trusted, so this part of it is ignored: hooks, providers",
        "  hint: read it, then run: culm trust",
    ]


def test_check_of_one_file_treats_it_as_trusted(cli: CliHarness) -> None:
    cli.write_user("{")
    file = cli.write("culm.json", {"providers": {"x": {"base_url": "$X_URL"}}})
    result = cli.culm("config", "check", "culm.json")
    assert result.status == 1
    assert result.out.startswith(f"{file}:1: providers.x.base_url: $X_URL is not set\n")
    cli.write("other.json", {"linger_s": 1})
    assert cli.culm("config", "check", "other.json") == CommandResult(0, "ok: 1 file\n")
    assert cli.culm("config", "check", "nowhere.json").status == 2


def test_check_reports_a_damaged_client_document_and_notes_unknown_keys(
    cli: CliHarness,
) -> None:
    document = cli.data_dir / "config.json"
    document.parent.mkdir(parents=True)
    document.write_text('{\n"theirs": 1}')
    result = cli.culm("config", "check")
    assert (result.status, result.out) == (0, "ok: 1 file\n")
    assert result.err.startswith(f"note: {document}:2: theirs: unknown key\n")
    document.write_text("[]")
    assert cli.culm("config", "check") == CommandResult(
        1, f"{document}:1: expected a JSON object\n"
    )
    assert cli.culm("config", "show").err == (
        f"note: {document}:1: expected a JSON object; the file is ignored\n"
    )


# --- show


def test_show_merges_all_files_and_hides_keys(cli: CliHarness) -> None:
    cli.set_env(MY_KEY=KEY)
    mine = {"base_url": URL, "api_key": "$MY_KEY", "models": [{"id": "m"}]}
    cli.write_user({"providers": {"mine": mine, "other": {"base_url": URL, "api_key": KEY}}})
    cli.write("culm.json", {"options": {"context_paths": ["NOTES.md"]}, "env": {"A": KEY}})
    result = cli.culm("config", "show")
    whole = json.loads(result.out)
    assert whole["providers"]["mine"] == mine
    assert whole["providers"]["other"]["api_key"] == "[secret]"
    assert whole["options"] == {"context_paths": ["NOTES.md"]}
    assert whole["models"]["large"] == {"model": "m", "provider": "mine"}
    assert "env" not in whole, "the project's file is not trusted"
    cli.culm("trust", "--yes")
    for args in ((), ("--origin",)):
        assert KEY not in "".join(map(str, cli.culm("config", "show", *args)))


def test_show_origin_names_the_file_of_each_value(cli: CliHarness) -> None:
    user = cli.write_user({"linger_s": 5, "providers": {"mine": {"base_url": URL, "name": "A"}}})
    file = cli.write("culm.json", {"providers": {"mine": {"name": "B", "models": [{"id": "m"}]}}})
    cli.culm("trust", "--yes")
    lines = cli.culm("config", "show", "--origin").out.splitlines()
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


def test_schema_command_prints_the_published_schema(cli: CliHarness) -> None:
    result = cli.culm("config", "schema")
    assert (result.status, json.loads(result.out)) == (0, json.loads(json.dumps(json_schema())))


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
def test_config_commands_have_help_with_an_example(
    cli: CliHarness, command: tuple[str, ...]
) -> None:
    result = cli.culm(*command, "--help")
    assert result.status == 0
    assert f"\n  Example:\n    culm {' '.join(command)}" in result.out
