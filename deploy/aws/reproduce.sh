#!/usr/bin/env bash
# Measures Perdure on the machines and the bucket that launch.sh made, and fetches
# the results. Each point has a fresh server on a prefix of its own in the bucket.
#
#   deploy/aws/reproduce.sh [--dry-run] [options]
#
#   --run NAME          name of the run (default)
#   --scenarios A,B     of perdure bench (sequential-steps,flow-start,rpc-locked-update,channel-wake)
#   --clients N,M       a point for each number (1,64,256)
#   --warmup D          before the window of a point (10s)
#   --duration D        window of a point (45s)
#   --rounds N          each point so many times (3)
#   --stores A,B        s3, and local for the server's own disk (s3,local)
#   --server-env N=V    a further variable of the server, such as
#                       PERDURE_JOURNAL_MAX_PUTS_PER_SECOND=40; may be repeated
#   --binary FILE       a static perdure for Linux on these machines; default: built here
#   --out FOLDER        default bench/results/DATE-aws
#   --dry-run           print every command, run none
#
# Needs ssh, and go when there is no --binary.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SCENARIOS=sequential-steps,flow-start,rpc-locked-update,channel-wake
CLIENTS=1,64,256
WARMUP=10s
DURATION=45s
ROUNDS=3
STORES=s3,local
BINARY=
OUT=$ROOT/bench/results/$(date -u +%Y-%m-%d)-aws
SERVER_ENV=()
while [ $# -gt 0 ]; do
  case $1 in
    --run) RUN=${2:?}; shift 2 ;;
    --scenarios) SCENARIOS=${2:?}; shift 2 ;;
    --clients) CLIENTS=${2:?}; shift 2 ;;
    --warmup) WARMUP=${2:?}; shift 2 ;;
    --duration) DURATION=${2:?}; shift 2 ;;
    --rounds) ROUNDS=${2:?}; shift 2 ;;
    --stores) STORES=${2:?}; shift 2 ;;
    --server-env) SERVER_ENV+=("${2:?}"); shift 2 ;;
    --binary) BINARY=${2:?}; shift 2 ;;
    --out) OUT=${2:?}; shift 2 ;;
    --dry-run) DRY_RUN=yes; shift ;;
    -h | --help) usage; exit ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
names
# These become part of command lines on the machines.
[[ $SCENARIOS =~ ^[a-z,-]+$ ]] || die "--scenarios $SCENARIOS: want names with commas"
[[ $CLIENTS =~ ^[0-9]+(,[0-9]+)*$ ]] || die "--clients $CLIENTS: want numbers with commas"
[[ $WARMUP =~ ^[0-9]+(ms|s|m)$ && $DURATION =~ ^[0-9]+(ms|s|m)$ ]] || die "--warmup and --duration: want a duration like 45s"
[[ $ROUNDS =~ ^[1-9][0-9]?$ ]] || die "--rounds $ROUNDS: want 1 to 99"
[[ $STORES =~ ^(s3|local)(,(s3|local))*$ ]] || die "--stores $STORES: want s3, local or both with a comma"
for variable in "${SERVER_ENV[@]}"; do
  [[ $variable =~ ^PERDURE_[A-Z0-9_]+=[[:print:]]*$ ]] || die "--server-env: want PERDURE_NAME=VALUE, without line breaks"
done
[ -z "$BINARY" ] || dry || [ -f "$BINARY" ] || die "--binary $BINARY: no such file"
need ssh scp

[ -f "$STATE" ] || dry || die "run $RUN is not there ($STATE): launch it first with deploy/aws/launch.sh --run $RUN"
REGION=$(recall REGION "$REGION")
BUCKET=$(recall BUCKET "$NAME-123456789012")
SERVER=$(recall SERVER 192.0.2.10)
SERVER_PRIVATE=$(recall SERVER_PRIVATE 10.0.0.10)
LOAD=$(recall LOAD 192.0.2.11)
for value in "$BUCKET" "$SERVER" "$SERVER_PRIVATE" "$LOAD"; do
  [ -n "$value" ] || die "run $RUN was not launched to its end: remove it with deploy/aws/teardown.sh --run $RUN, and launch it again"
done
umask 077
STAMP=$(ask STAMP date -u +%Y%m%dT%H%M%S)

build() {
  [ -z "$BINARY" ] || return 0
  need go
  BINARY=$DIR/perdure
  run env CGO_ENABLED=0 GOOS=linux GOARCH="$(recall ARCH amd64)" go build -C "$ROOT" -trimpath -ldflags '-s -w' -o "$BINARY" ./cmd/perdure
}

install_all() {
  local host
  for host in "$SERVER" "$LOAD"; do
    remote "$host" 'mkdir -p incoming results'
    copy_to "$host" incoming/perdure "$BINARY"
  done
  copy_to "$SERVER" incoming/ "$ROOT/deploy/systemd/perdure.service" "$ROOT/deploy/systemd/perdure.yaml"
  for host in "$SERVER" "$LOAD"; do remote "$host" 'sudo /usr/local/sbin/perdure-install'; done
  remote_from "$DIR/api.key" "$LOAD" 'umask 077; cat >api.key'
}

# serve STORE PREFIX: a fresh server. Its environment holds the key, so it goes
# through a file that only this user may read.
serve() {
  local file=$DIR/server.env
  if ! dry; then
    {
      printf 'PERDURE_KEY_MAIN=%s\n' "$(<"$DIR/api.key")"
      [ "$1" = local ] || printf 'PERDURE_STORE=s3://%s/%s?region=%s\n' "$BUCKET" "$2" "$REGION"
      for variable in "${SERVER_ENV[@]}"; do printf '%s\n' "$variable"; done
    } >"$file"
  fi
  say "server on ${1/s3/s3://$BUCKET/$2}"
  remote_from "$file" "$SERVER" 'sudo /usr/local/sbin/perdure-restart'
}

# point STORE SCENARIO CLIENTS ROUND
point() {
  serve "$1" "bench/$STAMP/$2-$3-$4" || return
  # PERDURE_KEY is put together there: it is in no command line.
  remote "$LOAD" "PERDURE_KEY=\$(cat api.key) perdure bench $2 --target http://$SERVER_PRIVATE:8080 --clients $3 --warmup $WARMUP --duration $DURATION --runs 1 --out results/$STAMP/$1 >/dev/null"
}

fetch() {
  run mkdir -p "$OUT"
  run scp -r "${SSH_OPTIONS[@]}" "$LOGIN@$LOAD:results/$STAMP/." "$OUT"
  # shellcheck disable=SC2016 # expands there
  local facts='uname -r; nproc; grep -m 1 "model name" /proc/cpuinfo
meta=http://169.254.169.254/latest
token=$(curl -fsS -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" $meta/api/token)
for fact in instance-type ami-id placement/availability-zone; do
  curl -fsS -H "X-aws-ec2-metadata-token: $token" $meta/meta-data/$fact; echo
done'
  if dry; then
    remote "$SERVER" "$facts"
  else
    remote "$SERVER" "$facts" >"$OUT/server.txt" || say "the facts of the server's machine are missing"
  fi
}

build
install_all
failed=0
for ((round = 1; round <= ROUNDS; round++)); do
  for scenario in ${SCENARIOS//,/ }; do
    for clients in ${CLIENTS//,/ }; do
      for store in ${STORES//,/ }; do
        # What goes wrong at one point is no reason to lose the others.
        point "$store" "$scenario" "$clients" "$round" || { say "$scenario with $clients clients on $store, round $round, went wrong"; failed=1; }
      done
    done
  done
done
remote "$SERVER" 'sudo systemctl stop perdure'
fetch
dry || say "results are in $OUT; end the run with deploy/aws/teardown.sh --run $RUN"
exit "$failed"
