"""Commands, and whether each is free, in a workspace with `a.txt`, `sub/b.py` and a link `out`."""

# One a line: these read inside the workspace, and nothing else.
FREE_LINES = r"""
ls "$"x
cat a.txt#
ls
ls -la
ls -la sub | head -20
\ls
'ls' "a.txt"
cat a.txt sub/b.py
cat "a.txt" 'sub/b.py'
cat < a.txt
cat a.txt 2>/dev/null
ls > /dev/null 2>&1
ls &>/dev/null
ls >/dev/null
head -n 20 a.txt
head -5 a.txt
tail -n +3 a.txt
wc -l *.txt
wc -l sub/*.py
grep -rn "foo bar" .
grep -rn foo --include='*.py' .
grep -n -A3 -B2 'x' a.txt
grep -E '/etc/(passwd|shadow)' a.txt
grep -e '/etc' a.txt
rg -n foo sub
rg --files -g '*.py'
rg 'a|b' -t py
find . -name '*.py'
find . -type f -not -path './.git/*' | head -50
find sub \( -name a -o -name b \) -print
sed -n '1,20p' a.txt
sed -n 5p a.txt
sed 's/a/b/g' a.txt
sed -e 's|/a|b|' -e '1d' a.txt
cut -d: -f1 a.txt
cut -d / -f 1 a.txt
sort -u a.txt | uniq -c | sort -rn
sort -t, -k2 a.txt
tr a-z A-Z < a.txt
diff a.txt sub/b.py
diff -u a.txt sub/b.py
stat a.txt
file a.txt
du -sh .
df -h .
pwd
pwd && ls
echo hello
echo "hello world" 'x'
echo "status: $?"
echo "n: $(ls | wc -l)"
echo -e "a\nb"
printf '%s\n' a b
printf "a\n"
true
false || true
:
test -f a.txt
test -f a.txt && echo yes || echo no
[ -d sub ] && ls sub
[[ -f a.txt ]] && cat a.txt
[ 1 -eq 1 ]
[ "a" = "b" ]
date
date +%Y-%m-%d
date -u '+%s'
which python
type ls
command -v git
uname -a
id
whoami
hostname
ps aux | grep python
basename /a/b/c.txt .txt
dirname /a/b
realpath a.txt
readlink -f a.txt
sha256sum a.txt
python --version
python3 -V
node --version
git status
git status --short
git status -sb
git status -uno
git log --oneline -10
git log -p -- a.txt
git log --since='2 weeks ago' --author=me
git log main..feature
git log --format='%h %s'
git diff
git diff HEAD~1 -- sub
git diff --cached --stat
git diff -U5
git show HEAD
git show HEAD:a.txt
git show --stat HEAD~2
git branch
git branch -a
git branch -vv
git branch --show-current
git branch --contains HEAD
git branch --list 'x*'
git tag
git tag -l 'v*'
git remote -v
git stash list
git rev-parse --abbrev-ref HEAD
git rev-parse HEAD
git ls-files
git ls-files '*.py'
git blame a.txt
git blame -L 1,5 a.txt
git grep -n foo
git grep -n foo -- sub
git reflog
git reflog show
git cat-file -p HEAD
git worktree list
git describe --tags
cd sub && ls
cd sub && git log -1 && cat ../a.txt
cd sub; ls
(cd sub && ls); cat a.txt
ls && ls || ls; ls
ls | head &
for i in 1 2 3; do ls; done
if [ -f a.txt ]; then cat a.txt; else echo none; fi
while false; do ls; done
case a in a) ls;; *) pwd;; esac
{ ls; pwd; }
! ls
time ls
timeout 5 ls
timeout 10s grep -r x .
nice -n 5 ls
nohup ls
env LC_ALL=C ls
LC_ALL=C sort a.txt
bash -c 'ls | head'
bash -c "cat a.txt"
set -e; ls
set -euo pipefail; ls
cat <<< "hello"
ls # comment
# comment
ls;
jq . a.txt
jq -r '.a[] | .b' a.txt
jq '.name' < a.txt
tree -L 2
seq 1 5
sleep 1
comm -12 a.txt a.txt
od -c a.txt
nl -ba a.txt
echo $((1+2))
cat ./sub/../a.txt
ls sub/
cat /dev/null
grep -c x a.txt; exit 0
git log --graph --oneline --all | head
cat a.txt | wc -l
echo a; echo b
ls nosuch 2>&1 | head
tail -5 a.txt
git --version
git log --stat=80 -3
grep -rn "TODO\|FIXME" sub | cut -c1-80
grep -v '^#' a.txt
grep "it's" a.txt
grep 'a$' a.txt
grep "a$" a.txt
grep \$x a.txt
echo "cost \$5"
echo 100%
echo a=b
ls -- a.txt
git diff main...HEAD
git log @{u}..HEAD
git show stash@{0}
find . -name '*.py' -newer a.txt -size +1k
find . -maxdepth 2 -type d
ls -lh --sort=size
cat -- -o
cat a.txt -
echo !!
find . -printf x
git show HEAD:../../x
ls # x
ls -la --
"""

FREE_TEXTS = (
    "cat <<EOF\n  x\n y\nEOF\n",
    "cat <<-'EOF'\n\tx $(rm x)\n\tEOF\nls",
    "cat <<-EOF\n\tx\n\tEOF\n",
    "cat <<EOF\nEOF\n",
    "cat <<'E'\na\\\nE\nls\n",
    'echo "$(cat <<EOF\nx\nEOF\n)"',
    "cat <<'EOF'\n$x\nEOF",
    "cat <<EOF\nhello\nEOF",
    "cat <<EOF | grep h\nhello $(ls)\nEOF",
)

# One a line: none of these is free, whatever it looks like.
ASKED_LINES = r"""
rm x
ls; rm x
ls $(rm x)
ls `rm x`
ls "$(rm x)"
ls $(( $(rm x) ))
echo $((a[$(rm x)]))
test -v 'a[$(rm x)]'
[ -v 'a[$(rm x)]' ]
[[ 'a[$(rm x)]' -eq 1 ]]
[[ -f $(rm x) ]]
echo ${x:=$(rm x)}
echo ${!x}
echo "${x@P}"
echo $x
echo ~
echo a=~
ls ~
ls ~root
cat /etc/passwd
cat ../x
cat out/passwd
ls out
cat {a,/etc/passwd}
cat a.txt,{a,b}
cat $'\x2fetc/passwd'
cat $'/etc/passwd'
\rm x
'rm' x
r\m x
r""m x
grep -f /etc/shadow a
grep --file=/etc/shadow a
grep -f/etc/shadow a
grep -R x .
sort -o a b
sort -oa b
sort b -o a
sort --output=a b
sort --outp=a b
sort --compress-program=rm a
sort -nro a b
find . -delete
find . -exec rm {} ;
find . -exec rm {} \;
find . -fprint x
find . -fls x
find -L .
find . -name *.txt
find / -name x
sed -i s/a/b/ a.txt
sed 's/a/b/w x' a.txt
sed 's/a/b/e' a.txt
sed '1e rm x' a.txt
sed -n '1w x' a.txt
sed 'w x' a.txt
sed -f s a.txt
sed --in-place s/a/b/ a.txt
sed 's/[/]/b/w x;s/]/c/' a.txt
sed '/[/]/w x' a.txt
sed 'r /etc/passwd' a.txt
awk 1 a.txt
tee a
git -c core.pager=x log
git -C .. log
git log --output=x
git log --outp=x
git diff --output=x
git diff --ext-diff
git show --ext-diff
git diff --no-index /etc/passwd a
git diff /etc/passwd /etc/group
git grep -Orm x
git grep -O x
git branch x
git branch -d x
git branch -D x
git branch -m a b
git branch --list -d x
git tag x
git tag -d x
git stash
git stash drop
git remote add a b
git remote update
git reflog expire --all
git log --format=%G?
git log --show-signature
git commit -m x
git --git-dir=/x log
cd sub/evil && git status
rg --pre rm x
rg --pre=rm x
rg -z x
rg -L x
rg --hostname-bin=rm x
rg --files /etc
PATH=. ls
LD_PRELOAD=x ls
GIT_DIR=/x git log
PAGER=rm git log
GIT_PAGER=rm git log
BASH_ENV=x ls
IFS=/ ls
CDPATH=/etc cd x
LC_ALL=/x ls
X=$(rm x) ls
X=$(rm x)
export PATH=.
env
printenv
set
export -p
declare -p
env ls /etc
env PATH=. ls
env -S 'rm x'
env -i git status
env - git status
env -u GIT_CONFIG_COUNT git status
for PATH in ./bin; do ls; done
for PATH; do ls; done
for IFS in x; do ls; done
bash -c 'for GIT_CONFIG_COUNT in 0; do git status; done'
cat ??
diff linked sub
diff sub linked
diff linked a.txt
strings @a.txt
strings -- @a.txt
sed 's/[]/x]/g;s/w new/y/' a.txt
sed 's/[^]/x]/g;s/w new/y/' a.txt
sed 's/[[:alpha:]/x]/g;s/w new/y/' a.txt
sed '/[]/x]/p;/w new/p' a.txt
git status --ignore-submodules=none
git diff --ignore-submodules=none
git diff --submodule=diff
git describe --dirty
hash -p /bin/rm ls
alias ls=rm
ls() { rm x; }; ls
function ls { rm x; }; ls
eval ls
source a.txt
. a.txt
$x
"$x" y
$(echo rm) x
bash -c "$x"
bash -c 'rm x'
bash -c "bash -c 'rm x'"
bash a.txt
sh -c 'rm x'
cat a.txt | sh
cat a.txt | bash -s
python - < a.txt
sh < a.txt
xargs rm
ls | xargs rm
ls | xargs cat
nohup rm x
timeout 5 rm x
timeout -k 3 5 rm x
timeout --weird 5 rm x
nice rm x
nice -n 5 rm x
stdbuf -o0 rm x
time rm x
command rm x
builtin cd /
exec rm x
sudo ls
coproc rm x
coproc ls
trap 'rm x' EXIT
ls > x
ls >> x
ls >| x
ls &> x
ls >& x
ls 2> x
ls <> x
exec 3<>/dev/tcp/a/1
cat < /etc/passwd
cat < /dev/tcp/a/1
cat <(rm x)
ls >(rm x)
cat <<< "$(rm x)"
printf -v x y
printf '%n' x
printf "$(echo -v)" 'a[$(rm x)]'
read x
mapfile -C rm x
date -s x
date 01010000
date -f a
file -C -m a
file -f a.txt
diff --to-file=/etc/passwd a
diff -r . out
tree -o x
uniq a b
uniq *
cat dash/*; cd dash && sort *
md5sum -c a.txt
curl x
tar cf x .
man ls
less a.txt
npm ls
jq env
jq -n '$ENV'
jq -f a.txt
jq 'import "a" as x; .' a
wc --files0-from=a.txt
tail -f a
ps e
ps auxe
hostname x
ls --color=auto --foo
ls /dev/sda
cat /proc/self/environ
cd /etc && ls
cd .. && ls
cd && ls
cd - && ls
cd out && ls
cd sub; cd ..; cd ..; ls
cd sub || cd ..; cat ../a.txt
cd sub && cat ../../x
for i in 1 2; do cd ..; done; ls
while true; do rm x; done
if ls; then rm x; fi
case x in a) rm x;; esac
case $(rm x) in a) ls;; esac
for f in $(rm x); do ls; done
for f in *; do cat "$f"; done
(rm x)
{ rm x; }
! rm x
ls & rm x
ls | rm x
ls |& rm x
ls && rm x
ls || rm x
[ -f a ] && rm x
f() { rm x; }; f
a=1; ls
arr=(a $(rm x))
((x=1))
let x=1
((a[$(rm x)]))
echo @(a|b)
echo "a
cat 'a
ls )
if
cat out/*
cat */passwd
echo /etc/*
ls /*
cat [ab]*
./ls
/bin/ls
../ls
type -a ls; rm x
select x in a; do rm y; done
for ((i=0;i<3;i++)); do rm x; done
until rm x; do ls; done
echo "`rm x`"
echo "${x:-`rm x`}"
echo "${x/a/$(rm x)}"
echo ${x:$(rm x)}
echo ${a[$(rm x)]}
time -o x ls
busybox rm x
find . -newer /etc/passwd
find . -fprintf x y
xxd a b
exec
exec > x
unset PATH
shopt -s extglob
set -x
ls a.txt /etc
git log -- /etc
git log ..
(cd sub; cat ../a.txt)
cat $(ls)
git stash show
ls ${PWD}
ls *
ls -d */
ls \ /etc
[ a > b ]
[ a || rm x ]
[ a && rm x ]
[[ x -eq 1 ]]
[[ $x -eq 1 ]]
read "a[\$(rm x)]"
declare -i x=y
env cd sub && cat ../x
timeout 5 cd sub && cat ../x
xargs -I{} sh -c "rm {}"
xargs git
xargs sudo
xargs
ls | xargs -I% % x
find . -exec sh -c "rm {}" \;
sudo bash -c "rm x"
bash -lc ls
bash -c "$(cat a.txt)"
sh -c "ls &> rm"
cd $x && ls
cd -P sub && ls
pushd sub && ls
cd sub sub
cat a.txt > sub/new
cat a.txt > a.txt
ls {fd}> x
ls 3> x
ls > "$x"
cat < "$x"
cat <<< $x
cat <<< ~
ls $"x"
echo "$[1+1]"
echo $[$(rm x)]
echo {1..3}
cat sub/{a,b}
ls -I
head -n
head --lines=5 --foo
sort --files0-from=a.txt
du --files0-from=a.txt
du -L .
ls -L out
stat -L out
wc out/passwd
tail --follow a.txt
git log -O/etc/passwd
git diff --no-index a.txt sub/b.py
git blame --contents /etc/passwd a.txt
git show :/etc /etc/passwd
git status --foo
git
git nosuch
gi\t push
command git push
builtin eval ls
time -f x ls
nice -x ls
env -C / ls
env --chdir=/ ls
printf "%s" "$HOME"
printf %s ~
seq 1 2 3 4
hostname -f
id -u root extra
ps -o environ
od -w /etc/passwd
uniq a.txt sub/b.py
cat /dev/tcp/x/1
function f() { ls; }
f() ( cd sub; ls )
f() { ls; }
time
exec -a x ls
test -R x
test a -nt /etc/passwd
[ -e /etc/passwd ]
[[ a == * ]]
[[ a =~ b ]]
LANG=$(rm x) ls
LANG=$x ls
TZ=/etc/passwd date
x+=1
a[0]=1
a[$(rm x)]=1
export
readonly
local x
jq . /etc/passwd
jq --rawfile a /etc/passwd . a.txt
jq -L /etc . a.txt
rg -f /etc/passwd x
rg --ignore-file=/etc/passwd x
rg --type-list /etc
grep x /etc/passwd
grep -e x /etc/passwd
grep -ex /etc/passwd
grep x a.txt -e /etc/passwd
grep --regexp=x /etc/passwd
ls ;; rm
ls &&
| ls
ls | | ls
& ls
coproc X { rm x; }
if true; then cd ..; fi; ls
while cd ..; do ls; done
(cd ..; ls)
cd sub && (cd .. && cat ../x)
ls & cd ..; cat a.txt
{ cd ..; }; ls
cd .. | ls; cat ../x
! cd sub && cat ../x
cd sub || ls ..
"""

ASKED_TEXTS = (
    "cat <<EOF\nEO\\\nF\nrm x\nEOF\n",
    "cat <<EOF\n  EOF\necho '\nEOF\nrm x #'\n",
    "cat <<EOF\n\tEOF\necho '\nEOF\nrm x #'\n",
    "cat <<EOF\nEOF \necho '\nEOF\nrm x #'\n",
    "cat <<EOF \\ | sh\nrm x\nEOF\n",
    "cat <<'EOF'; echo 'a\nb'\nEOF\nrm x\n",
    "ls \\\n; rm x",
    "cat <<EOF\n$(rm x)\nEOF",
    "cat <<EOF\n`rm x`\nEOF",
    "cat <<EOF\n$HOME\nEOF",
    "ls\r\nrm x",
    "ls\x00x",
    "ls \udc80",
    "ls\xa0x",
    "ls\x0brm",
    "cat <<A <<B\nx\nA\ny\nB\n",
    'cat <<EOF; ls "a\nEOF\nrm x"',
    "cat <<EOF\nx\nEOF\nrm x",
    "cat <<-EOF\n\tx\n\tEOF\nrm x",
    'cat <<"A B"\nx\nA B\nrm x',
    "cat <<\\EOF\n$(rm x)\nEOF\nrm x",
    "cat <<'EOF' | sh\nrm x\nEOF",
    "ls\nrm x",
    "ls \\\n-la; rm x",
    "python3 - <<EOF\nx\nEOF",
    "ls a.txt; # x\nrm y",
    f"cat {'a' * 5000}",
    f"cat {'../' * 50}etc/passwd",
)

FREE = (*FREE_LINES.strip("\n").split("\n"), *FREE_TEXTS)
ASKED = (*ASKED_LINES.strip("\n").split("\n"), *ASKED_TEXTS)
