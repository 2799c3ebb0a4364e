"""The README names every frozen file."""

from tests.frozen.comparing import HERE


def test_index_names_every_frozen_file() -> None:
    index = (HERE / "README.md").read_text()
    files = [path.name for path in HERE.iterdir() if path.suffix in (".txt", ".json", ".jsonl")]
    folders = [path.parent.name for path in HERE.glob("*/__init__.py")]
    missing = [
        name for name in (*files, *(f"{folder}/" for folder in folders)) if name not in index
    ]
    assert missing == []
