#!/usr/bin/env bash
# Load test of the agent server: mock provider, server and load generator on
# this machine, with and without persistence. Results with their settings go
# to bench/results/DATE-NAME/.
#
#   scripts/loadtest.sh [NAME]            NAME defaults to the commit
#
# From the environment, with defaults:
#   SCENARIOS="sweep zero overload memory"
#   SWEEP=1,2,4,8,16,32,64,128,256,1000   concurrencies of the sweep
#   DURATION=15s                          window of a point
#   STORES="disk mem"                     sweep with and without persistence
#   MOCK_TTFT_MS=2000 MOCK_TPS=200 MOCK_TOKENS=8   the model of the sweep
#   BIN=bin/perdure                       built when it is missing
#   SERVE_FLAGS=""                        more flags for serve
#
# sweep     turn times and turns/s over the concurrency
# zero      a model that answers at once: what the server itself can do
# overload  ten times the accepted rate against max_in_flight_turns 64, with
#           a provider limit of 48
# memory    PSS idle, with 1,000 turns running, and a minute after their TTL
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh

NAME=${1:-$(git rev-parse --short HEAD 2>/dev/null || echo local)}
[[ $NAME =~ ^[A-Za-z0-9._-]+$ ]] || die "name $NAME: want letters, digits, dot, dash"
SCENARIOS=${SCENARIOS:-sweep zero overload memory}
SWEEP=${SWEEP:-1,2,4,8,16,32,64,128,256,1000}
DURATION=${DURATION:-15s}
STORES=${STORES:-disk mem}
BIN=${BIN:-bin/perdure}
read -ra SERVE_FLAGS_LIST <<<"${SERVE_FLAGS:-}"
export MOCK_TTFT_MS=${MOCK_TTFT_MS:-2000} MOCK_TPS=${MOCK_TPS:-200} MOCK_TOKENS=${MOCK_TOKENS:-8}
OUT=bench/results/$(date -u +%Y-%m-%d)-$NAME

if [ ! -x "$BIN" ]; then
  CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$BIN" ./cmd/perdure
fi
ulimit -n "$(ulimit -Hn)" 2>/dev/null || say "could not raise the limit of open files"
mkdir -p "$OUT"
rm -f "$OUT"/*.jsonl "$OUT"/table.txt "$OUT"/plot.svg "$OUT"/*.json
settings name "$NAME" scenarios "$SCENARIOS" sweep "$SWEEP" duration "$DURATION" stores "$STORES" \
  mock_ttft_ms "$MOCK_TTFT_MS" mock_tps "$MOCK_TPS" mock_tokens "$MOCK_TOKENS" \
  serve_flags "${SERVE_FLAGS:-}" mock_and_load_gomaxprocs "$BENCH_GOMAXPROCS" \
  server_gomaxprocs "${GOMAXPROCS:-default}" server_gogc "${GOGC:-default}" data_filesystem "$(stat -f -c %T "$WORK")" >"$OUT/settings.json"

failed=0

# server STORE [FLAG...]: a fresh server on an empty folder.
server() {
  local store=$1
  shift
  local flags=("${SERVE_FLAGS_LIST[@]}" "$@")
  [ "$store" = mem ] && flags+=(--store mem:)
  rm -rf "$WORK/data"
  start_server "$BIN" "$WORK/data" "${flags[@]}"
}

sweep() { # sweep FILE CONCURRENCIES FLAG...: a point each, per store
  local file=$1 list=$2 store series=()
  shift 2
  for store in $STORES; do
    say "$file: $store"
    server "$store"
    load "$BIN" turns --target "$SERVE_URL" --upstream "$MOCK_URL" --sweep "$list" --duration "$DURATION" \
      --label "store=$store" --json "$@" >"$WORK/$file-$store.jsonl" || failed=1
    stop server
    cat "$WORK/$file-$store.jsonl" >>"$OUT/$file.jsonl"
    { echo "$file, $store"; load "$BIN" table "$WORK/$file-$store.jsonl"; echo; } >>"$OUT/table.txt"
    series+=("$store=$WORK/$file-$store.jsonl")
  done
  [ "$file" != points ] || load "$BIN" plot --out "$OUT/plot.svg" "${series[@]}"
}

for scenario in $SCENARIOS; do
  case $scenario in
  sweep)
    start_mock "$BIN"
    sweep points "$SWEEP"
    ;;
  zero)
    # A fresh session every 20 turns: an endless conversation would measure
    # the growth of its prompt.
    MOCK_TTFT_MS=0 MOCK_TPS=0 start_mock "$BIN"
    sweep zero 1,64 --turns-per-session 20
    ;;
  overload)
    start_mock "$BIN"
    server disk --kernel.max_in_flight_turns 64 --concurrency-limit 48
    load "$BIN" overload --target "$SERVE_URL" --upstream "$MOCK_URL" --concurrency 64 --duration "$DURATION" \
      --upstream-limit 48 --json >"$OUT/overload.json" || failed=1
    stop server
    { echo "overload, checks"; grep -o '{"name":[^}]*}' "$OUT/overload.json" || true; echo; } >>"$OUT/table.txt"
    ;;
  memory)
    start_mock "$BIN"
    server disk --kernel.session_ttl_secs 10
    sleep 2
    idle=$(pss server)
    load "$BIN" turns --target "$SERVE_URL" --concurrency 1000 --duration 5s --json >"$WORK/memory.jsonl" || failed=1
    busy=$(awk -F '"pss_bytes":' '{ split($2, a, ","); print a[1] }' "$WORK/memory.jsonl")
    sleep 70
    after=$(pss server)
    printf '{"idle_pss_bytes":%s,"busy_pss_bytes":%s,"bytes_per_active_turn":%s,"after_ttl_pss_bytes":%s}\n' \
      "$idle" "${busy:-0}" "$(((${busy:-0} - idle) / 1000))" "$after" | tee -a "$OUT/table.txt" >"$OUT/memory.json"
    stop server
    ;;
  *) die "unknown scenario $scenario" ;;
  esac
  stop mock
done

cat "$OUT/table.txt"
say "results in $OUT"
exit "$failed"
