"""The part of the read-only table that is git's.

Only subcommands that look at the repository. Options that write a file, start a pager or run the
programs a configuration names are not here, nor are those that look into submodules, which have a
configuration of their own.
"""

from culm.shell.entries import ReadOnlyEntry, entry

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
