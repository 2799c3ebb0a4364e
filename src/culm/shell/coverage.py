"""The coverage of a lasting grant: the program and its subcommand, not every command.

For a program that runs other programs, or text passed to it, the coverage is limited to the
program or text that it runs.
"""

import posixpath
import re
from collections.abc import Sequence

from culm.shell.words import names

# Programs whose first operand is a subcommand; the options named here take a value before it.
SUBCOMMANDS: dict[str, frozenset[str]] = {
    name: names(values)
    for name, values in {
        "git": "-C -c --git-dir --work-tree --namespace --exec-path --config-env",
        "npm": "--prefix -w --workspace",
        "pnpm": "-C --dir -F --filter",
        "yarn": "--cwd",
        "bun": "--cwd",
        "deno": "",
        "cargo": "-C --config --color -Z",
        "rustup": "",
        "go": "-C",
        "docker": "-H --host -c --context --config -l --log-level",
        "podman": "",
        "docker-compose": "-f --file -p --project-name",
        "kubectl": "-n --namespace --context --kubeconfig -s --server",
        "helm": "-n --namespace --kube-context",
        "terraform": "",
        "tofu": "",
        "pip": "--python",
        "pip3": "--python",
        "pipx": "",
        "poetry": "-C -P --directory --project",
        "uv": "--directory --project",
        "pdm": "",
        "hatch": "-e --env",
        "conda": "",
        "systemctl": "-H --host -M --machine",
        "service": "",
        "apt": "-o -c -t",
        "apt-get": "-o -c -t",
        "dnf": "",
        "yum": "",
        "apk": "",
        "pacman": "",
        "brew": "",
        "gh": "-R --repo",
        "glab": "-R --repo",
        "aws": "--profile --region --output --endpoint-url",
        "gcloud": "--project",
        "az": "",
        "gem": "",
        "bundle": "",
        "composer": "-d",
        "dotnet": "",
        "mvn": "",
        "gradle": "",
        "hg": "-R --cwd --config",
        "svn": "",
        "jj": "-R --repository",
        "just": "-f --justfile -d --working-directory",
        "nix": "",
        "flutter": "",
        "swift": "",
        "zig": "",
        "rails": "",
        "mix": "",
        "openssl": "",
        "ip": "",
    }.items()
}
# Subcommands that have subcommands of their own.
_TWO_WORDS: dict[str, frozenset[str]] = {
    "npm": names("run"),
    "pnpm": names("run"),
    "yarn": names("run"),
    "bun": names("run"),
    "docker": names("container image volume network"),
    "git": names("stash remote worktree"),
    "gh": names("pr issue repo run release workflow auth secret"),
    "kubectl": names("get describe delete apply create"),
    "aws": names("ec2 iam lambda sts"),
    "gcloud": names("compute"),
    "uv": names("pip tool"),
    "go": names("run mod"),
    "cargo": names("run"),
    "deno": names("run task"),
    "dotnet": names("run tool"),
}
# They may run their arguments or send data anywhere: a grant covers only the same text.
_EXACT = names(
    "awk gawk mawk nawk sed find ssh su watch parallel script expect chroot nsenter unshare"
    " systemd-run at batch crontab strace ltrace gdb make vim vi nvim emacs ed ex osascript sqlite"
    " psql mysql tar rsync scp sftp zsh fish ksh csh tcsh pwsh entr flock setpriv tmux screen socat"
    " nc curl wget"
)
_EXACT_SUBCOMMANDS: dict[str, frozenset[str]] = {
    "git": names("rebase bisect submodule filter-branch config difftool mergetool"),
    "docker": names("run exec compose"),
    "podman": names("run exec"),
    "docker-compose": names("run exec"),
    "kubectl": names("exec run"),
    "gh": names("api alias extension"),
    "aws": names("s3 s3api"),
    "nix": names("run shell develop eval"),
}
_INTERPRETERS = names(
    "python pypy node nodejs ruby perl php lua Rscript julia groovy tclsh ts-node tsx bash sh dash"
)
# `runner program …`: the coverage is that of the program. With an empty set no subcommand comes
# between.
RUNNERS: dict[str, frozenset[str]] = {
    "uv": names("run"),
    "uvx": names(""),
    "npx": names(""),
    "bunx": names(""),
    "poetry": names("run"),
    "pdm": names("run"),
    "hatch": names("run"),
    "pipenv": names("run"),
    "rye": names("run"),
    "bundle": names("exec"),
    "pnpm": names("exec dlx"),
    "npm": names("exec"),
    "yarn": names("dlx exec"),
}
# Subcommands, or parts of one, that any program may follow.
_RUN = names("run exec runner x eval shell ssh console dlx")
# Options that name a program to run, or settings that can name one; git accepts an abbreviated long
# option.
_NAMES_PROGRAM = re.compile(
    r"-c$|--?(?:exe|toolexec|vettool|conf|up|rece|templ|script-shell|shell|overlay)"
)


def is_interpreter(name: str) -> bool:
    return _family(name) in _INTERPRETERS


def runs_words(name: str) -> bool:
    """Return True if the program may run its arguments as a command."""
    return _family(name) in _EXACT


def _family(name: str) -> str:
    """Return the name without directory and version: `/usr/bin/python3.11` is a `python`."""
    return posixpath.basename(name).rstrip("0123456789.")


def runner_length(words: Sequence[str]) -> int:
    """Count the words before the program that a runner starts; 0 if this is not a runner."""
    kinds = RUNNERS.get(words[0])
    if kinds is None:
        return 0
    if not kinds:
        return 1
    return 2 if len(words) > 1 and words[1] in kinds else 0


def coverage_of(words: Sequence[str], program: str, written: Sequence[str]) -> tuple[str, int]:
    """Return the coverage of a command, and the number of its words that determine it.

    `written` are the same words with their quotes; `program` is the real path if the program is
    named by a path, else its name.
    """
    name = words[0]
    whole = " ".join([program, *written[1:]]), len(words)
    # A runner gets here if an option hides the program it runs.
    if _family(name) in _EXACT or runner_length(words):
        return whole
    values = SUBCOMMANDS.get(name)
    if values is None:
        return program, 1
    length = 1
    while length < len(words) and words[length].startswith("-"):
        length += 2 if words[length] in values else 1
    if length >= len(words):
        return whole
    second = words[length]
    if name == "git" and length > 1:
        return whole  # `-c` can name programs to run.
    if second in _EXACT_SUBCOMMANDS.get(name, ()) or any(map(_NAMES_PROGRAM.match, words[1:])):
        return whole
    has_two = second in _TWO_WORDS.get(name, ())
    following = words[length + 1 : length + 3]
    if has_two and following and (following[0].startswith("-") or following[0] in _RUN):
        return whole
    if not has_two and not _RUN.isdisjoint([second, *following]):
        return whole
    length += 2 if has_two else 1
    return " ".join(words[:length]), min(length, len(words))
