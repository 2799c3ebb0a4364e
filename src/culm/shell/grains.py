"""What "allow for this session" covers: the program and its subcommand, not every command.

A program that runs others, or text given to it, is covered no wider than by what it runs.
"""

import posixpath
import re
from collections.abc import Sequence

from culm.shell.words import names

# Their first operand says what they do; the options named here take a value before it.
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
# Two words say what these do.
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
# Whatever they are given, they may run it or send it anywhere: only the same text is covered.
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
# `runner program …`: the program is what matters. An empty set: no subcommand comes between.
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


# Subcommands, or parts of one, behind which any program may stand.
_RUN = names("run exec runner x eval shell ssh console dlx")
# Options by which a subcommand is told of a program to run, or of settings that can name one; git
# takes the beginning of a long option for the whole.
_NAMES_PROGRAM = re.compile(
    r"-c$|--?(?:exe|toolexec|vettool|conf|up|rece|templ|script-shell|shell|overlay)"
)


def is_interpreter(name: str) -> bool:
    return _family(name) in _INTERPRETERS


def runs_words(name: str) -> bool:
    """Whether it may take what is behind it for a command."""
    return _family(name) in _EXACT


def _family(name: str) -> str:
    """`/usr/bin/python3.11` is a `python`."""
    return posixpath.basename(name).rstrip("0123456789.")


def runner_length(words: Sequence[str]) -> int:
    """How many words come before the program a runner starts; 0 if it is no runner."""
    kinds = RUNNERS.get(words[0])
    if kinds is None:
        return 0
    if not kinds:
        return 1
    return 2 if len(words) > 1 and words[1] in kinds else 0


def coverage_of(words: Sequence[str], program: str, written: Sequence[str]) -> tuple[str, int]:
    """What the command is covered by, and how many of its words that rests on.

    `words` are its words, `written` the same with their quotes; `program` is where it really lies
    if it is named by a path, else its name.
    """
    name = words[0]
    whole = " ".join([program, *written[1:]]), len(words)
    # A runner comes here if an option hides what it runs.
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
