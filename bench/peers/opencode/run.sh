#!/usr/bin/env bash
# Perdure and opencode under the same load, one after the other, on this
# machine: the same mock, the same client, the same method. See README.md.
#
#   bench/peers/opencode/run.sh
#
# From the environment, with defaults:
#   SWEEP=1,8,32,128  DURATION=15s  BIN=bin/perdure (built when missing)
#   OPENCODE_DIR=a fresh folder     an installation to use again
#   SETTLE=60                       seconds that opencode has after its start
#   OUT=a fresh folder              where points and table go
# Needs npm (and its node).
set -euo pipefail
VERSION=1.18.33
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE/../../.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh

SWEEP=${SWEEP:-1,8,32,128}
DURATION=${DURATION:-15s}
SETTLE=${SETTLE:-60}
BIN=${BIN:-bin/perdure}
PEER_PORT=${PEER_PORT:-4196}
OPENCODE_DIR=${OPENCODE_DIR:-$WORK/opencode}
OUT=${OUT:-$(mktemp -d)}
PROMPT_BYTES=32768
export MOCK_TTFT_MS=${MOCK_TTFT_MS:-2000} MOCK_TPS=${MOCK_TPS:-200} MOCK_TOKENS=8

command -v npm >/dev/null || die "npm is missing (Debian: apt-get install npm)"
[ -x "$BIN" ] || CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$BIN" ./cmd/perdure
ulimit -n "$(ulimit -Hn)" 2>/dev/null || say "could not raise the limit of open files"
mkdir -p "$OUT"

# The program is inside the platform's package: no install script is run.
peer() { find "$OPENCODE_DIR/node_modules" -path '*opencode-linux-*/bin/opencode' ! -path '*baseline*' ! -path '*musl*' -type f 2>/dev/null | head -n 1; }
if [ -z "$(peer)" ]; then
  say "installing opencode-ai@$VERSION into $OPENCODE_DIR"
  mkdir -p "$OPENCODE_DIR"
  npm install --prefix "$OPENCODE_DIR" --ignore-scripts --no-audit --no-fund --silent "opencode-ai@$VERSION"
fi
PEER=$(peer)
[ -n "$PEER" ] || die "opencode-ai@$VERSION brought no program for this platform"
[ "$("$PEER" --version)" = "$VERSION" ] || die "$PEER is version $("$PEER" --version), want $VERSION"

settings opencode "$VERSION" sweep "$SWEEP" duration "$DURATION" prompt_bytes "$PROMPT_BYTES" \
  mock_ttft_ms "$MOCK_TTFT_MS" mock_tps "$MOCK_TPS" mock_tokens "$MOCK_TOKENS" >"$OUT/settings.json"

failed=0
# turns COLUMN FLAG...: a sweep into a file of its own. A fresh mock for each,
# so that its counts are of one column.
turns() {
  local column=$1
  shift
  load "$BIN" turns --upstream "$MOCK_URL" --sweep "$SWEEP" --duration "$DURATION" --label "column=$column" --json "$@" \
    >"$OUT/$column.jsonl" || failed=1
}

# prompt COLUMN: how much the mock received for a model call, in bytes.
prompt() {
  local stats
  exec 4<>"/dev/tcp/$HOST/$MOCK_PORT"
  printf 'GET /stats HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$HOST" >&4
  stats=$(tail -n 1 <&4)
  exec 4>&-
  awk -v s="$stats" -v c="$1" 'BEGIN {
    match(s, /"requests":[0-9]+/); n = substr(s, RSTART + 11, RLENGTH - 11)
    match(s, /"body_bytes":[0-9]+/); b = substr(s, RSTART + 13, RLENGTH - 13)
    printf "%s: %d model calls, %.1f KB each\n", c, n, n ? b / n / 1000 : 0 }'
}

perdure() { # perdure COLUMN AGENT
  start_mock "$BIN"
  rm -rf "$WORK/data"
  start_server "$BIN" "$WORK/data" --config "$WORK/perdure.yaml"
  say "$1"
  turns "$1" --target "$SERVE_URL" --agent "$2"
  prompt "$1" >>"$OUT/prompts.txt"
  stop server
  stop mock
}

{
  printf 'agents:\n  big:\n    provider: default\n    model: mock\n    instructions: "'
  head -c "$PROMPT_BYTES" /dev/zero | tr '\0' 'x' | sed 's/xxxxxxxx/padding /g'
  printf '"\n'
} >"$WORK/perdure.yaml"
: >"$OUT/prompts.txt"
perdure perdure default
perdure perdure-32k big

# opencode keeps its state under these, never in the caller's home.
mkdir -p "$WORK/project" "$WORK/home"
cat >"$WORK/project/opencode.json" <<JSON
{
  "autoupdate": false, "share": "disabled", "model": "mock/mock", "small_model": "mock/mock",
  "provider": {"mock": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$MOCK_URL", "apiKey": "none"},
    "models": {"mock": {"tool_call": true, "limit": {"context": 128000, "output": 4096}}}}}
}
JSON
start_mock "$BIN"
need_free "$PEER_PORT"
start opencode env -C "$WORK/project" HOME="$WORK/home" XDG_CONFIG_HOME="$WORK/home/config" XDG_DATA_HOME="$WORK/home/data" \
  XDG_STATE_HOME="$WORK/home/state" XDG_CACHE_HOME="$WORK/home/cache" \
  OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1 \
  "$PEER" serve --port "$PEER_PORT" --hostname "$HOST"
wait_ready opencode "$PEER_PORT" /config
say "opencode: waiting $SETTLE s for what it does after its start"
sleep "$SETTLE"
turns opencode --target "http://$HOST:$PEER_PORT" --protocol "$HERE/protocol.json" --turn-timeout 5m
prompt opencode >>"$OUT/prompts.txt"
stop opencode
stop mock

{
  load "$BIN" columns perdure="$OUT/perdure.jsonl" perdure-32k="$OUT/perdure-32k.jsonl" opencode="$OUT/opencode.jsonl"
  echo
  cat "$OUT/prompts.txt"
} | tee "$OUT/table.txt"
say "points and settings in $OUT"
exit "$failed"
