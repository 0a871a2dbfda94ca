# Shared by the scripts that measure: start and stop servers, wait for them,
# note what machine it was. Sourced, not run. Needs bash and awk only.
# shellcheck shell=bash

HOST=127.0.0.1
MOCK_PORT=${MOCK_PORT:-9190}
SERVE_PORT=${SERVE_PORT:-8190}
MOCK_URL=http://$HOST:$MOCK_PORT/v1
# shellcheck disable=SC2034 # used by the scripts that source this
SERVE_URL=http://$HOST:$SERVE_PORT
WORK=$(mktemp -d)
declare -A PIDS=()

# The mock and the load generator are given one core's worth of threads each:
# they need far less, and fewer wake-ups leave more to the server.
export BENCH_GOMAXPROCS=${BENCH_GOMAXPROCS:-1}

say() { printf '%s\n' "$*" >&2; }

die() {
  say "$0: $*"
  exit 2
}

# stop NAME: ends a process that start began, and waits for it.
stop() {
  local pid=${PIDS[$1]:-}
  [ -n "$pid" ] || return 0
  unset "PIDS[$1]"
  kill "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}

cleanup() {
  local name
  for name in "${!PIDS[@]}"; do stop "$name"; done
  rm -rf "$WORK"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# start NAME COMMAND...: runs it in the background, its output in a log.
start() {
  local name=$1
  shift
  "$@" >"$WORK/$name.log" 2>&1 &
  PIDS[$name]=$!
}

# status PORT PATH: the HTTP status of a GET, nothing when nobody answers.
status() {
  local line=
  {
    exec 3<>"/dev/tcp/$HOST/$1" &&
      printf 'GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$2" "$HOST" >&3 &&
      IFS= read -r -t 5 line <&3
    exec 3>&-
  } 2>/dev/null || true
  line=${line#* }
  printf '%s' "${line%% *}"
}

# wait_ready NAME PORT PATH: until it answers 200; it has a minute.
wait_ready() {
  local i
  for ((i = 0; i < 600; i++)); do
    [ "$(status "$2" "$3")" = 200 ] && return 0
    kill -0 "${PIDS[$1]}" 2>/dev/null || break
    sleep 0.1
  done
  say "$1 does not answer on port $2:"
  tail -n 20 "$WORK/$1.log" >&2
  exit 2
}

# need_free PORT: refuses to measure somebody else's server.
need_free() { [ -z "$(status "$1" /)" ] || die "port $1 is in use; set SERVE_PORT and MOCK_PORT"; }

# start_mock BINARY: the MOCK_* variables of the environment set its pace.
start_mock() {
  need_free "$MOCK_PORT"
  start mock env GOMAXPROCS="$BENCH_GOMAXPROCS" "$1" mockllm --listen "$HOST:$MOCK_PORT"
  wait_ready mock "$MOCK_PORT" /stats
}

# start_server BINARY DATA [FLAG...]: an agent "default" on the mock.
start_server() {
  local bin=$1 data=$2
  shift 2
  need_free "$SERVE_PORT"
  start server "$bin" serve --data "$data" --listen "$HOST:$SERVE_PORT" --openai-base-url "$MOCK_URL" --model mock "$@"
  wait_ready server "$SERVE_PORT" /readyz
}

# load BINARY ARGS...: the load generator.
load() {
  local bin=$1
  shift
  GOMAXPROCS="$BENCH_GOMAXPROCS" "$bin" load "$@"
}

# pss NAME: proportional memory of a process, in bytes.
pss() { awk '$1 == "Pss:" { print $2 * 1024 }' "/proc/${PIDS[$1]}/smaps_rollup"; }

# quote TEXT: a JSON string.
quote() {
  local s=${1//\\/\\\\}
  s=${s//\"/\\\"}
  printf '"%s"' "${s//$'\n'/ }"
}

# settings KEY VALUE...: a JSON object of this machine and the pairs.
settings() {
  printf '{\n  "taken_at": %s,\n  "kernel": %s,\n  "cpus": %s,\n  "cpu": %s,\n  "memory_kb": %s,\n  "go_version": %s,\n  "git_rev": %s' \
    "$(quote "$(date -u +%Y-%m-%dT%H:%M:%SZ)")" "$(quote "$(uname -sr)")" "$(nproc)" \
    "$(quote "$(awk -F ': ' '/^model name/ { print $2; exit }' /proc/cpuinfo)")" \
    "$(awk '/^MemTotal/ { print $2 }' /proc/meminfo)" \
    "$(quote "$(go version 2>/dev/null || echo none)")" \
    "$(quote "$(git rev-parse HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD -- . 2>/dev/null || echo ' and changes')")"
  while [ $# -gt 1 ]; do
    printf ',\n  %s: %s' "$(quote "$1")" "$(quote "$2")"
    shift 2
  done
  printf '\n}\n'
}
