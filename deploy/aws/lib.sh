# shellcheck shell=bash disable=SC2034,SC2029 # the names are for the scripts; command lines are put together here
# What launch.sh, reproduce.sh and teardown.sh share. Sourced, never run.

AWS_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$AWS_DIR/../.." && pwd)
TAG=perdure-run # everything carries it, its value is the name of the run
LOGIN=ec2-user  # of Amazon Linux
RUN=default
REGION=${AWS_REGION:-${AWS_DEFAULT_REGION:-us-east-1}}
DRY_RUN=no
export AWS_PAGER=""

# Commands of a dry run come here, out of a $(...) too.
exec 3>&1

say() { printf '%s\n' "$*" >&2; }
die() {
  say "${0##*/}: $*"
  exit 1
}

# usage prints the comment at the head of the script.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

dry() { [ "$DRY_RUN" = yes ]; }

need() {
  local program
  dry && return
  for program in "$@"; do
    command -v "$program" >/dev/null || die "$program is needed and is not on the PATH"
  done
}

# names checks the run and the region, and sets what follows from them.
names() {
  [[ $RUN =~ ^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$ ]] || die "--run $RUN: want 1 to 20 of a-z, 0-9 and -"
  [[ $REGION =~ ^[a-z0-9-]+$ ]] || die "--region $REGION: not the name of a region"
  NAME=perdure-bench-$RUN
  IAM_PATH=/perdure-bench/$RUN/
  DIR=$AWS_DIR/run/$RUN
  STATE=$DIR/state
  SSH_OPTIONS=(-i "$DIR/ssh_key" -o "UserKnownHostsFile=$DIR/known_hosts" -o IdentitiesOnly=yes
    -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10 -o ServerAliveInterval=15 -o BatchMode=yes)
}

# show prints a command as it could be pasted.
show() {
  local word line=+
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
  done
  printf '%s\n' "$line" >&3
}

# run COMMAND...: runs it; in a dry run it prints it.
run() { if dry; then show "$@"; else "$@"; fi; }

# ask ANSWER COMMAND...: what the command prints; in a dry run it is shown, and
# the answer is the given one.
ask() {
  local answer=$1
  shift
  if dry; then
    show "$@"
    printf '%s\n' "$answer"
  else
    "$@"
  fi
}

# cloud and cloud_ask are run and ask for the AWS CLI. A list without entries is
# "None" to the CLI, and empty here.
cloud() { run aws --region "$REGION" "$@" >/dev/null; }
cloud_ask() {
  local instead=$1 answer
  shift
  answer=$(ask "$instead" aws --region "$REGION" --output text "$@") || return
  [ "$answer" = None ] || printf '%s\n' "$answer"
}

# record NAME VALUE: a line of the state file, for the other scripts.
record() { dry || printf '%s=%s\n' "$1" "$2" >>"$STATE"; }

# recall NAME ANSWER: the last recorded value; the answer in a dry run without.
recall() {
  local value=
  [ ! -f "$STATE" ] || value=$(sed -n "s/^$1=//p" "$STATE" | tail -n 1)
  if [ -z "$value" ] && dry; then value=$2; fi
  printf '%s' "$value"
}

# remote HOST COMMANDLINE: runs it there, with no standard input.
remote() { run ssh -n "${SSH_OPTIONS[@]}" "$LOGIN@$1" "$2"; }

# remote_from FILE HOST COMMANDLINE: with the file as its standard input. Secrets
# go this way, since command lines can be seen by others.
remote_from() {
  local file=$1
  shift
  if dry; then
    show sh -c "ssh ${SSH_OPTIONS[*]} $LOGIN@$1 '$2' <$file"
  else
    ssh "${SSH_OPTIONS[@]}" "$LOGIN@$1" "$2" <"$file"
  fi
}

copy_to() { run scp "${SSH_OPTIONS[@]}" "${@:3}" "$LOGIN@$1:$2"; } # copy_to HOST FOLDER FILE...
