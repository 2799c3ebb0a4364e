# Read by the bash of a command before the command's own text, which it gets untouched.
# At its end it says on descriptor 3 where it is then.
if [[ -n ${CULM_BASH_ENV-} ]]; then
  BASH_ENV=$CULM_BASH_ENV
  unset CULM_BASH_ENV
  [[ -r $BASH_ENV ]] && . "$BASH_ENV"
else
  unset BASH_ENV
fi
trap '{ builtin pwd -P >&3 || :; } 2>/dev/null' EXIT
