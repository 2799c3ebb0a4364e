"""The read-only commands, and the options with which each of them only reads.

Data. Everything that is not listed needs approval: an unknown command, an unknown option, an
abbreviated option. When in doubt an entry is left out. `docs/permissions.md` shows this table in
the form that `table_markdown` produces.
"""

from typing import Literal

from msgspec import Struct

from culm.shell.words import names

# The kind of the words that are not options: paths to read; a pattern, then paths; text that is
# only printed; none; names; or a language with its own check (`checks.py`).
Operands = Literal["paths", "pattern", "text", "none", "names", "check"]


class ReadOnlyEntry(Struct, frozen=True):
    """A command and the options with which it only reads."""

    name: str  # The program, with its subcommand if it has one.
    operands: Operands
    flags: frozenset[str]  # Options without a value.
    values: frozenset[str]  # Options with a value that is not a path.
    paths: frozenset[str]  # Options with a path that is read.
    optional: frozenset[str]  # Long options with an optional `=value`.
    patterns: frozenset[str]  # Options that replace the pattern operand.
    numbers: bool  # `-5` is also an option.
    operands_max: int
    note: str


def entry(
    name: str,
    operands: Operands,
    flags: str = "",
    values: str = "",
    *,
    paths: str = "",
    optional: str = "",
    patterns: str = "",
    numbers: bool = False,
    operands_max: int = 1_000,
    note: str = "",
) -> tuple[str, ReadOnlyEntry]:
    return name, ReadOnlyEntry(
        name,
        operands,
        names(flags),
        names(values) | names(patterns),
        names(paths),
        names(optional),
        names(patterns),
        numbers,
        operands_max,
        note,
    )


_SUM = "-b --binary -t --text -z --zero --tag"
_GREP = (
    "-E -F -G -P -i -v -w -x -c -l -L -n -o -q -s -h -H -a -b -r -I -z -Z -T -U -y"
    " --extended-regexp --fixed-strings --basic-regexp --perl-regexp --ignore-case --invert-match"
    " --word-regexp --line-regexp --count --files-with-matches --files-without-match --line-number"
    " --only-matching --quiet --silent --no-messages --no-filename --with-filename --text"
    " --byte-offset --recursive --null --null-data --initial-tab --no-ignore-case"
)
_GREP_VALUES = (
    "-m -A -B -C -d -D --max-count --after-context --before-context --context --include --exclude"
    " --exclude-dir --directories --devices --binary-files --label"
)

# Only subcommands that inspect the repository. Options that write a file, start a pager or run
# programs from a configuration are left out, and so are those that look into submodules, which have
# a configuration of their own.
_LOG = (
    "-p -u -s -z --patch --no-patch --oneline --stat --shortstat --numstat --name-only"
    " --name-status --summary --graph --all --branches --tags --remotes --merges --no-merges"
    " --first-parent --reverse --follow --decorate --no-decorate --no-color --raw --cc"
    " --abbrev-commit --no-abbrev-commit --full-index --no-ext-diff --no-textconv --no-renames"
    " --minimal --patience --histogram --ignore-all-space --ignore-space-change"
    " --ignore-blank-lines --ignore-space-at-eol -w -b -i --cherry-pick --left-right"
    " --topo-order --date-order --author-date-order --relative-date --parents --children"
    " --left-only --right-only --no-walk --boundary --pickaxe-regex --pickaxe-all --dirstat"
    " --compact-summary --full-history --simplify-merges --ancestry-path --regexp-ignore-case"
    " --extended-regexp --fixed-strings --perl-regexp --invert-grep --all-match --no-notes"
    " --word-diff --no-prefix --check --text -a -M -C -R --function-context -W --exit-code"
)
_LOG_VALUES = (
    "-n -S -G -L --max-count --skip --since --after --until --before --author --committer"
    " --grep --date --format --diff-filter --inter-hunk-context --glob --exclude"
    " --diff-algorithm"
)
_LOG_OPTIONAL = (
    "--pretty --stat --decorate --color --abbrev --word-diff --color-words --relative --unified"
    " -U --find-renames --find-copies --dirstat --color-moved"
)
_REFS_VALUES = "--sort --format --points-at"
_REFS_OPTIONAL = "--contains --no-contains --merged --no-merged --color --column"

GIT: dict[str, ReadOnlyEntry] = dict(
    (
        entry(
            "git status",
            "paths",
            "-s -b -v -z --short --branch --long --verbose --show-stash --no-renames"
            " --no-ahead-behind",
            optional="--porcelain -u --untracked-files --ignored --column",
        ),
        entry("git log", "paths", _LOG, _LOG_VALUES, optional=_LOG_OPTIONAL, numbers=True),
        entry("git show", "paths", _LOG, _LOG_VALUES, optional=_LOG_OPTIONAL, numbers=True),
        entry(
            "git diff",
            "paths",
            f"{_LOG} --cached --staged --merge-base --quiet",
            _LOG_VALUES,
            optional=_LOG_OPTIONAL,
        ),
        entry(
            "git shortlog",
            "paths",
            "-s -n -e -c --summary --numbered --email --all --no-merges",
            "--since --until --author --format --group",
        ),
        entry(
            "git blame",
            "paths",
            "-b -c -e -f -l -n -p -s -t -w -M -C --show-email --show-name --show-number"
            " --porcelain --line-porcelain --root --show-stats",
            "-L --since --date",
            optional="--abbrev",
        ),
        entry(
            "git branch",
            "check",
            "-a -r -v -vv --all --remotes --list --show-current --no-color --verbose"
            " --ignore-case -i",
            _REFS_VALUES,
            optional=_REFS_OPTIONAL,
            note="without a name, or with --list",
        ),
        entry(
            "git tag",
            "check",
            "-l --list --no-color -i --ignore-case",
            _REFS_VALUES,
            optional=f"{_REFS_OPTIONAL} -n",
            note="without a name, or with --list",
        ),
        entry("git remote", "none", "-v --verbose"),
        entry("git stash list", "none", "--oneline", "--format -n", optional="--pretty --stat"),
        entry("git worktree list", "none", "-v -z --porcelain --verbose"),
        entry(
            "git reflog",
            "check",
            _LOG,
            _LOG_VALUES,
            optional=_LOG_OPTIONAL,
            numbers=True,
            note="alone or as `git reflog show`",
        ),
        entry(
            "git rev-parse",
            "paths",
            "--verify --short --symbolic --symbolic-full-name --abbrev-ref --show-toplevel"
            " --show-prefix --show-cdup --git-dir --absolute-git-dir --is-inside-work-tree"
            " --is-inside-git-dir --is-bare-repository --quiet -q --all --branches --tags"
            " --remotes --git-common-dir",
            optional="--short --abbrev-ref",
        ),
        entry(
            "git rev-list",
            "paths",
            f"{_LOG} --count --objects",
            _LOG_VALUES,
            optional=_LOG_OPTIONAL,
            numbers=True,
        ),
        entry(
            "git describe",
            "names",
            "--all --tags --long --always --first-parent --debug",
            "--match --exclude --candidates",
            optional="--abbrev",
            note="not --dirty, which looks into submodules",
        ),
        entry("git merge-base", "names", "-a --all --octopus --is-ancestor --fork-point"),
        entry("git name-rev", "names", "--tags --name-only --always --all", "--refs"),
        entry(
            "git ls-files",
            "paths",
            "-c -d -m -o -i -s -u -z -t -v --cached --deleted --modified --others --ignored"
            " --stage --unmerged --killed --exclude-standard --full-name --error-unmatch"
            " --deduplicate --directory --eol",
            "-x --exclude",
            optional="--abbrev",
        ),
        entry(
            "git ls-tree",
            "paths",
            "-d -r -t -l -z --long --name-only --name-status --object-only --full-name --full-tree",
            "--format",
            optional="--abbrev",
        ),
        entry(
            "git show-ref",
            "names",
            "--head --heads --branches --tags -d -s -q --verify --quiet --dereference",
            optional="--hash --abbrev",
        ),
        entry(
            "git for-each-ref",
            "names",
            "--ignore-case",
            "--sort --format --count --points-at",
            optional="--merged --no-merged --contains --no-contains --color",
        ),
        entry("git cat-file", "names", "-t -s -e -p"),
        entry("git count-objects", "none", "-v -H --verbose --human-readable"),
        entry(
            "git grep",
            "check",
            "-i -v -w -n -l -L -c -h -H -E -G -F -P -a -I -p -W -q -z -o --cached --ignore-case"
            " --invert-match --word-regexp --line-number --files-with-matches --count"
            " --extended-regexp --basic-regexp --fixed-strings --perl-regexp --text --name-only"
            " --show-function --function-context --break --heading --full-name --untracked"
            " --column --only-matching --quiet --all-match --no-color --and --or --not",
            "-A -B -C -m --max-depth --threads --after-context --before-context --context",
            optional="--color",
            patterns="-e",
            numbers=True,
            note="not -O, which starts a pager",
        ),
    )
)

TABLE: dict[str, ReadOnlyEntry] = dict(
    (
        entry(
            "ls",
            "paths",
            "-1 -a -A -b -B -c -C -d -f -F -g -G -h -i -k -l -m -n -N -o -p -q -Q -r -R -s -S -t -u"
            " -U -v -x -X -Z --all --almost-all --author --escape --ignore-backups --directory"
            " --full-time --group-directories-first --no-group --human-readable --si --inode"
            " --numeric-uid-gid --literal --quote-name --reverse --recursive --size --zero",
            "-I -T -w --ignore --hide --tabsize --width --block-size --sort --time --time-style"
            " --format --indicator-style --quoting-style",
            optional="--color --classify --hyperlink",
        ),
        entry(
            "cat",
            "paths",
            "-A -b -e -E -n -s -t -T -u -v --show-all --number-nonblank --show-ends --number"
            " --squeeze-blank --show-tabs --show-nonprinting",
        ),
        entry("tac", "paths", "-b -r --before --regex", "-s --separator"),
        entry("nl", "paths", "-p", "-b -d -f -h -i -l -n -s -v -w"),
        entry("rev", "paths"),
        entry(
            "head",
            "paths",
            "-q -v -z --quiet --silent --verbose --zero-terminated",
            "-n -c --lines --bytes",
            numbers=True,
        ),
        entry(
            "tail",
            "paths",
            "-q -v -z -r --quiet --silent --verbose --zero-terminated",
            "-n -c --lines --bytes",
            numbers=True,
            note="not -f, which does not end",
        ),
        entry("wc", "paths", "-c -m -l -L -w --bytes --chars --lines --max-line-length --words"),
        entry(
            "cut",
            "paths",
            "-n -s -z --complement --only-delimited --zero-terminated",
            "-b -c -d -f --bytes --characters --delimiter --fields --output-delimiter",
        ),
        entry("tr", "text", "-c -C -d -s -t --complement --delete --squeeze-repeats"),
        entry(
            "uniq",
            "paths",
            "-c -d -D -i -u -z --count --repeated --ignore-case --unique --zero-terminated",
            "-f -s -w --skip-fields --skip-chars --check-chars",
            operands_max=1,
            note="one operand: the second would be written to",
        ),
        entry(
            "sort",
            "paths",
            "-b -d -f -g -h -i -M -n -R -r -V -c -C -m -s -u -z --ignore-leading-blanks"
            " --dictionary-order --ignore-case --general-numeric-sort --human-numeric-sort"
            " --ignore-nonprinting --month-sort --numeric-sort --random-sort --reverse"
            " --version-sort --merge --stable --unique --zero-terminated --debug",
            "-k -t --key --field-separator --sort --parallel",
            optional="--check",
        ),
        entry("comm", "paths", "-1 -2 -3 -z --check-order --nocheck-order --total"),
        entry("join", "paths", "-i -z --header", "-1 -2 -a -e -j -o -t -v"),
        entry("paste", "paths", "-s -z --serial --zero-terminated", "-d --delimiters"),
        entry("fold", "paths", "-b -s --bytes --spaces", "-w --width"),
        entry("expand", "paths", "-i --initial", "-t --tabs"),
        entry("column", "paths", "-t -x -e -n", "-s -c -o"),
        entry(
            "grep",
            "pattern",
            _GREP,
            _GREP_VALUES,
            paths="-f --file --exclude-from",
            optional="--color --colour",
            patterns="-e --regexp",
            numbers=True,
            note="not -R, which follows links",
        ),
        entry("egrep", "pattern", _GREP, _GREP_VALUES, patterns="-e --regexp", numbers=True),
        entry("fgrep", "pattern", _GREP, _GREP_VALUES, patterns="-e --regexp", numbers=True),
        entry(
            "rg",
            "pattern",
            "-i -s -S -v -w -x -c -l -n -N -o -q -F -P -U -a -H -I -p -u -uu -0 --ignore-case"
            " --case-sensitive --smart-case --invert-match --word-regexp --line-regexp --count"
            " --count-matches --files --files-with-matches --files-without-match --line-number"
            " --no-line-number --only-matching --quiet --fixed-strings --pcre2 --multiline"
            " --multiline-dotall --text --with-filename --no-filename --pretty --hidden -. --json"
            " --no-ignore --no-ignore-vcs --no-config --no-heading --heading --column --trim"
            " --stats --type-list --vimgrep --null --no-messages --unrestricted --crlf --passthru"
            " --no-follow --one-file-system --sort-files --no-ignore-parent --no-ignore-global",
            "-A -B -C -g -m -t -T -d -r -M -E -j --after-context --before-context --context --glob"
            " --iglob --max-count --type --type-not --max-depth --replace --max-columns --encoding"
            " --threads --color --colors --sort --sortr --max-filesize --context-separator",
            paths="-f --file --ignore-file",
            patterns="-e --regexp",
            note="not --pre, -z, --hostname-bin, which run programs, nor -L, which follows links",
        ),
        entry("find", "check", note="tests, -print, -print0, -printf, -ls, -prune, -quit; not -L"),
        entry("sed", "check", "-n -E -r -u -z", note="printing, deleting and `s` without e and w"),
        entry(
            "jq",
            "check",
            "-n -r -c -s -e -S -C -M -a -j -R --null-input --raw-output --compact-output --slurp"
            " --exit-status --sort-keys --color-output --monochrome-output --ascii-output"
            " --join-output --raw-input --tab",
            "--indent",
            note="a filter without env, $ENV, import, include",
        ),
        entry(
            "diff",
            "paths",
            "-q -s -c -u -e -n -y -i -E -Z -b -w -B -a -t -T -p -N -d --brief"
            " --report-identical-files --side-by-side --ignore-case --ignore-all-space"
            " --ignore-space-change --ignore-blank-lines --ignore-tab-expansion"
            " --ignore-trailing-space --text --minimal --new-file --suppress-common-lines"
            " --strip-trailing-cr --show-c-function --expand-tabs",
            "-U -C -W -I --width --label",
            optional="--color --unified --context",
            operands_max=2,
            note="not -r, which follows links",
        ),
        entry("cmp", "paths", "-b -l -s --print-bytes --verbose --silent --quiet", "-n -i"),
        entry("stat", "paths", "-t -x --terse", "-c --format --printf"),
        entry(
            "file",
            "paths",
            "-b -i -k -h -N -r -0 --brief --mime --mime-type --mime-encoding --keep-going"
            " --no-dereference --no-pad --raw",
            "-F --separator",
        ),
        entry(
            "du",
            "paths",
            "-0 -a -b -c -h -k -l -m -P -s -S -x --all --apparent-size --bytes --total"
            " --human-readable --si --summarize --separate-dirs --one-file-system --null --inodes",
            "-B -d -t --block-size --max-depth --threshold --exclude",
        ),
        entry(
            "df",
            "paths",
            "-a -h -H -i -k -l -P -T --all --human-readable --si --inodes --local --portability"
            " --print-type --total",
        ),
        entry(
            "tree",
            "paths",
            "-a -d -f -i -q -N -Q -p -u -g -s -h -D -F -v -t -c -U -r -A -S -n -C -J"
            " --noreport --dirsfirst --du --gitignore --prune --inodes --device --si --matchdirs",
            "-L -P -I --filelimit --sort --timefmt --charset",
        ),
        entry("od", "paths", "-a -b -c -d -f -i -l -o -s -v -x", "-A -j -N -S -t"),
        entry("hexdump", "paths", "-b -c -C -d -o -v -x", "-n -s"),
        entry("strings", "paths", "-a -f -o --all --print-file-name", "-n -t -e --bytes"),
        *(
            entry(name, "paths", _SUM, note="not -c, whose list names other files")
            for name in ("md5sum", "sha1sum", "sha224sum", "sha256sum", "sha384sum", "sha512sum")
        ),
        entry("cksum", "paths"),
        entry("realpath", "paths", "-e -m -L -P -s -z --canonicalize-existing"),
        entry("readlink", "paths", "-f -e -m -n -z --canonicalize --no-newline"),
        entry("basename", "text", "-a -z --multiple --zero", "-s --suffix"),
        entry("dirname", "text", "-z --zero"),
        entry("pwd", "none", "-L -P"),
        entry("cd", "check", note="to a directory inside, named literally, not by a link"),
        entry("echo", "check", note="quoted output of free commands may be in the text"),
        entry("printf", "check", note="not -v and %n, which set variables"),
        entry("true", "text"),
        entry("false", "text"),
        entry(":", "text"),
        entry("test", "check", note="literal operands; not -v, -R, -o, -a"),
        entry("[", "check", note="as `test`"),
        entry("[[", "check", note="as `test`"),
        entry("set", "check", note="-e, -u, -f and -o pipefail, on or off"),
        entry("seq", "text", "-w --equal-width", "-s -f --separator --format", operands_max=3),
        entry("sleep", "text", operands_max=1),
        entry("exit", "text", operands_max=1),
        entry("break", "none"),
        entry("continue", "none"),
        entry("date", "check", "-u -R --utc --universal --rfc-email", "-d --date", optional="-I"),
        entry("which", "names", "-a -s"),
        entry("type", "names", "-a -t -p -P -f"),
        entry("uname", "none", "-a -s -n -r -v -m -p -i -o --all"),
        entry("id", "names", "-a -g -G -n -r -u -z", operands_max=1),
        entry("whoami", "none"),
        entry("hostname", "none"),
        entry("nproc", "none", "--all"),
        entry("uptime", "none", "-p -s"),
        entry("ps", "check", "-e -f -A -a -x -l -w -ww", "-o -p -C", note="operands: aux, ax"),
        *GIT.items(),
    )
)

# Programs that are free only with these options, which print their version.
VERSIONS: dict[str, frozenset[str]] = {
    **dict.fromkeys(names("bash git gcc g++ clang make cmake ruby perl rg jq"), names("--version")),
    **dict.fromkeys(names("python python3"), names("--version -V")),
    "node": names("--version -v"),
}


def table_markdown() -> str:
    """Return the table as Markdown, sorted by command."""
    lines = ["| command | options | operands | note |", "| --- | --- | --- | --- |"]
    for name, line in sorted(TABLE.items()):
        options = [f"`{option}`" for option in sorted(line.flags - line.optional)]
        options += [f"`{option} …`" for option in sorted(line.values)]
        options += [f"`{option} <path>`" for option in sorted(line.paths)]
        options += [f"`{option}[=…]`" for option in sorted(line.optional)]
        if line.numbers:
            options.append("`-5`")
        operands = {"check": "see note", "names": "names"}.get(line.operands, line.operands)
        lines.append(f"| `{name}` | {' '.join(options)} | {operands} | {line.note} |")
    for name, flags in sorted(VERSIONS.items()):
        shown = " ".join(f"`{flag}`" for flag in sorted(flags))
        lines.append(f"| `{name}` | {shown} | none | its version only |")
    return "\n".join(lines) + "\n"
