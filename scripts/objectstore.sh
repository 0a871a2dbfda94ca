#!/usr/bin/env bash
# Measures Perdure on an object store: an S3 server on this machine whose PUTs take
# LATENCY longer. Results with their settings go to bench/results/DATE-NAME/.
#
#   scripts/objectstore.sh [NAME]         NAME defaults to "objects"
#
# From the environment, with defaults:
#   SCENARIOS="steps budget turns cost takeover cold"
#   LATENCY=50ms      added to each PUT
#   CLIENTS=2048      flows in flight for the peak on the object store
#   DURATION=8s RUNS=3 WARMUP=3s   of each point of steps and budget
#   COLD_RECORDS=1000000
#   BIN=bin/perdure   built when it is missing
#
# steps     SYNC steps and wakes: the peak, and the latency at half of it; beside
#           the peak on local disk in the same session
# budget    the same peak with at most 40 PUTs a second
# turns     time to the first token of agents' turns, local disk and object store
# cost      PUTs, GETs and LISTs of a server that is idle, with light load, and of a
#           process that stands by
# takeover  ten times each: the active process is stopped, and killed; how long a
#           request waits
# cold      a start with an empty data directory and COLD_RECORDS in the journal
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh

NAME=${1:-objects}
[[ $NAME =~ ^[A-Za-z0-9._-]+$ ]] || die "name $NAME: want letters, digits, dot, dash"
SCENARIOS=${SCENARIOS:-steps budget turns cost takeover cold}
LATENCY=${LATENCY:-50ms}
CLIENTS=${CLIENTS:-2048}
DURATION=${DURATION:-8s}
RUNS=${RUNS:-3}
WARMUP=${WARMUP:-3s}
COLD_RECORDS=${COLD_RECORDS:-1000000}
BIN=${BIN:-bin/perdure}
OUT=bench/results/$(date -u +%Y-%m-%d)-$NAME
S3_PORT=${S3_PORT:-9911}

[ -x "$BIN" ] || CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$BIN" ./cmd/perdure
GATEWAY=$(scripts/versitygw.sh)
mkdir -p "$OUT" "$WORK/s3/bucket"
export AWS_ACCESS_KEY_ID=bench AWS_SECRET_ACCESS_KEY=bench-secret
start s3 env ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY "$GATEWAY" --port "$HOST:$S3_PORT" --quiet posix "$WORK/s3"
settings name "$NAME" scenarios "$SCENARIOS" latency "$LATENCY" clients "$CLIENTS" duration "$DURATION" runs "$RUNS" warmup "$WARMUP" \
  cold_records "$COLD_RECORDS" s3_server "versitygw $(basename "$GATEWAY")" data_filesystem "$(stat -f -c %T "$WORK")" >"$OUT/settings.json"
for _ in $(seq 100); do [ -n "$(status "$S3_PORT" /)" ] && break; sleep 0.1; done

place=0
# store: a URL with a prefix that nobody has used.
store() {
  place=$((place + 1))
  printf 's3://bucket/%s-%d?endpoint=http://%s:%s&region=us-east-1&path_style=true' "$1" "$place" "$HOST" "$S3_PORT"
}

bench() { # bench FILE FLAG...
  local file=$1
  shift
  "$BIN" bench "$@" --warmup "$WARMUP" --duration "$DURATION" --runs "$RUNS" --json 2>>"$WORK/bench.log" | tee -a "$OUT/$file.jsonl" >/dev/null
}

# metric NAME: the sum of a metric of the server at SERVE_PORT.
metric() {
  curl -s "$SERVE_URL/metrics" | awk -v n="perdure_$1" '$1 == n || index($1, n "{") == 1 { s += $2 } END { printf "%.0f\n", s }'
}

# serve NAME PORT URL FLAG...: a process of a cluster, ready or standing by.
serve() {
  local name=$1 port=$2 url=$3
  shift 3
  start "$name" "$BIN" serve --data "$WORK/$name" --listen "$HOST:$port" --store "$url" --drain-timeout 0s "$@"
  for _ in $(seq 300); do [ "$(status "$port" /readyz)" = 200 ] && return; sleep 0.1; done
  die "$name is not ready: $(tail -5 "$WORK/$name.log")"
}

# count SECONDS LABEL: requests to the store of the server at SERVE_PORT meanwhile.
count() {
  local p g l b
  p=$(metric store_puts_total) g=$(metric store_gets_total) l=$(metric store_lists_total) b=$(metric store_written_bytes_total)
  sleep "$1"
  awk -v s="$1" -v label="$2" -v p="$(($(metric store_puts_total) - p))" -v g="$(($(metric store_gets_total) - g))" \
    -v l="$(($(metric store_lists_total) - l))" -v b="$(($(metric store_written_bytes_total) - b))" 'BEGIN {
      printf "{\"load\":\"%s\",\"seconds\":%d,\"puts_per_s\":%.3f,\"gets_per_s\":%.3f,\"lists_per_s\":%.4f,\"written_bytes_per_s\":%.0f,\"usd_per_month\":%.2f}\n",
        label, s, p/s, g/s, l/s, b/s, ((p + l)/s * 0.005 + g/s * 0.0004) / 1000 * 86400 * 30 }' | tee -a "$OUT/cost.jsonl"
}

# ms: milliseconds since 1970.
ms() { echo $(($(date +%s%N) / 1000000)); }

# waits PORT FILE LABEL: how long one small durable request takes, in ms.
waits() {
  local from
  from=$(ms)
  curl -s -o /dev/null --fail --retry 60 --retry-all-errors --retry-delay 0 --max-time 60 "http://$HOST:$1/v1/sessions" \
    -H 'Content-Type: application/json' -d '{"agent":"demo"}' || say "a request failed"
  printf '{"what":"%s","waited_ms":%d}\n' "$3" $(($(ms) - from)) | tee -a "$OUT/$2.jsonl"
}

for scenario in $SCENARIOS; do
  say "$scenario"
  case $scenario in
  steps)
    rm -f "$OUT/steps.jsonl"
    bench steps sequential-steps --clients 512 --half
    bench steps sequential-steps channel-wake --clients "$CLIENTS" --half --store "$(store steps)" --store-latency "$LATENCY"
    ;;
  budget)
    rm -f "$OUT/budget.jsonl"
    bench budget sequential-steps --clients "$((CLIENTS * 2))" --store "$(store budget)" --store-latency "$LATENCY" --serve-flag=--journal.max_puts_per_second=40
    ;;
  turns)
    rm -f "$OUT/turns.jsonl"
    export MOCK_TTFT_MS=500 MOCK_TPS=200 MOCK_TOKENS=8
    start_mock "$BIN"
    for kind in local objects; do
      flags=()
      [ $kind = local ] || flags=(--store "$(store turns)" --store-latency "$LATENCY")
      start_server "$BIN" "$WORK/turns-$kind" "${flags[@]}"
      load "$BIN" turns --target "$SERVE_URL" --upstream "$MOCK_URL" --sweep 1,16,64 --duration "$DURATION" --label "journal=$kind" --json >>"$OUT/turns.jsonl"
      stop server
    done
    stop mock
    ;;
  cost)
    rm -f "$OUT/cost.jsonl"
    url=$(store cost)
    serve active "$SERVE_PORT" "$url" --store-latency "$LATENCY"
    count 60 idle
    "$BIN" bench sequential-steps --target "$SERVE_URL" --rate 10 --warmup 1s --duration 35s --runs 1 >"$WORK/light.log" 2>&1 &
    sleep 3
    count 30 "10 steps a second"
    wait $!
    "$BIN" bench sequential-steps --target "$SERVE_URL" --clients 256 --warmup 1s --duration 25s --runs 1 >"$WORK/busy.log" 2>&1 &
    sleep 3
    count 20 "256 flows at once"
    wait $!
    stop active
    ;;
  takeover)
    rm -f "$OUT/takeover.jsonl"
    url=$(store takeover)
    serve a "$SERVE_PORT" "$url" --store-latency "$LATENCY"
    serve b "$((SERVE_PORT + 1))" "$url" --store-latency "$LATENCY"
    for round in $(seq "${ROUNDS:-10}"); do
      # a stops and comes back, then b: each has been active and standing by.
      for who in a b; do
        port=$SERVE_PORT other=$((SERVE_PORT + 1))
        [ $who = a ] || { port=$((SERVE_PORT + 1)) other=$SERVE_PORT; }
        kill -TERM "${PIDS[$who]}"
        waits "$other" takeover stopped
        stop "$who"
        serve "$who" "$port" "$url" --store-latency "$LATENCY"
      done
      [ "$round" -gt 5 ] || for who in a b; do
        port=$SERVE_PORT other=$((SERVE_PORT + 1))
        [ $who = a ] || { port=$((SERVE_PORT + 1)) other=$SERVE_PORT; }
        kill -KILL "${PIDS[$who]}"
        waits "$other" takeover killed
        stop "$who"
        serve "$who" "$port" "$url" --store-latency "$LATENCY"
      done
    done
    stop a
    stop b
    ;;
  cold)
    rm -f "$OUT/cold.jsonl"
    url=$(store cold)
    serve warm "$SERVE_PORT" "$url" --cluster.node_id=cold --journal.snapshot_bytes=512GiB --journal.snapshot_every=24h
    while [ "$(metric journal_entries_total)" -lt "$COLD_RECORDS" ]; do
      "$BIN" bench sequential-steps --target "$SERVE_URL" --clients 1024 --warmup 1s --duration 10s --runs 1 >"$WORK/fill.log" 2>&1
    done
    records=$(metric journal_entries_total) batches=$(metric journal_batches_total)
    kill -KILL "${PIDS[warm]}"
    stop warm
    # The same node, so nobody's lease is waited for; its data directory is gone.
    from=$(ms)
    serve cold "$SERVE_PORT" "$url" --store-latency "$LATENCY" --cluster.node_id=cold
    until curl -s "$SERVE_URL/readyz" | grep -q '"status":"ready"'; do sleep 0.05; done
    printf '{"records":%d,"batches":%d,"ready_after_ms":%d}\n' "$records" "$batches" $(($(ms) - from)) | tee -a "$OUT/cold.jsonl"
    stop cold
    ;;
  *) die "scenario $scenario: want some of steps budget turns cost takeover cold" ;;
  esac
done
say "results are in $OUT"
