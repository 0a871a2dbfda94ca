# Shared by the run.sh of the durable engines. Sourced after scripts/bench-lib.sh.
# shellcheck shell=bash

CLIENTS=${CLIENTS:-1,64,256}
WARMUP=${WARMUP:-5s}
DURATION=${DURATION:-15s}
RUNS=${RUNS:-3}
SCENARIOS=${SCENARIOS:-}
PERDURE=${PERDURE:-yes}
BIN=${BIN:-bin/perdure}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
command -v go >/dev/null || die "go is missing"
ulimit -n "$(ulimit -Hn)" 2>/dev/null || say "could not raise the limit of open files"
if [ "$PERDURE" = yes ] && [ ! -x "$BIN" ]; then
  CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$BIN" ./cmd/perdure
fi

# build_driver PEER: its module's go.sum pins everything.
build_driver() { CGO_ENABLED=0 go build -C "bench/peers/$1" -trimpath -buildvcs=false -o "$WORK/$1-bench" .; }

# drive PEER FLAG...: runs the driver, its points go to a file. The driver is
# stopped when the script is.
drive() {
  local peer=$1 failed=0
  shift
  "$WORK/$peer-bench" -scenarios "$SCENARIOS" -clients "$CLIENTS" -warmup "$WARMUP" -duration "$DURATION" "$@" >>"$OUT/peer.jsonl" &
  PIDS["$peer-bench"]=$!
  wait "${PIDS["$peer-bench"]}" || failed=$?
  unset "PIDS[$peer-bench]"
  return "$failed"
}

# ours: the same scenarios and clients on Perdure, each with a fresh server. A
# peer's variant of a scenario (NAME-local) is compared with the plain one.
ours() {
  local scenario clients
  local -A measured=()
  for scenario in $(tr , ' ' <<<"${SCENARIOS:-flow-start,sequential-steps,rpc-read,rpc-locked-update,channel-wake,channel-wake-once}"); do
    scenario=${scenario%-local}
    [ -z "${measured[$scenario]:-}" ] || continue
    measured[$scenario]=1
    for clients in $(tr , ' ' <<<"$CLIENTS"); do
      "$BIN" bench "$scenario" --clients "$clients" --warmup "$WARMUP" --duration "$DURATION" --runs 1 --json >>"$OUT/perdure.jsonl"
    done
  done
}

# rounds: peer and Perdure in turns, RUNS times, and the table at the end.
rounds() {
  local n
  : >"$OUT/peer.jsonl"
  : >"$OUT/perdure.jsonl"
  for ((n = 1; n <= RUNS; n++)); do
    say "round $n of $RUNS: $(basename "$HERE")"
    round "$n"
    if [ "$PERDURE" = yes ]; then
      say "round $n of $RUNS: perdure"
      ours
    fi
  done
  if [ "$PERDURE" = yes ]; then
    "$BIN" bench ratios "$OUT/perdure.jsonl" "$OUT/peer.jsonl" | tee "$OUT/table.txt"
  else
    cat "$OUT/peer.jsonl"
  fi
  say "points and settings in $OUT"
}
