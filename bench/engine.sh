#!/usr/bin/env bash
# The durable engine, all scenarios: closed loops, and an open loop at half of the
# best rate of each. Server, worker and client share this machine.
#
#   bench/engine.sh [NAME]          into bench/results/DATE-NAME/, NAME is "engine"
#
# From the environment, with defaults:
#   CLIENTS=1,64,256,1024  WARMUP=10s  DURATION=45s  RUNS=3
#   SCENARIOS=             all that are named in bench/README.md; or a list with commas
#   BIN=bin/perdure        (built when missing)
#   OUT=the folder above
# Needs go (to build).
set -euo pipefail
cd "$(dirname "$0")/.."

NAME=${1:-engine}
CLIENTS=${CLIENTS:-1,64,256,1024}
WARMUP=${WARMUP:-10s}
DURATION=${DURATION:-45s}
RUNS=${RUNS:-3}
SCENARIOS=${SCENARIOS:-sequential-steps,sequential-steps-async,flow-start,rpc-read,rpc-locked-update,attribute-read,channel-wake,timers,mixed}
BIN=${BIN:-bin/perdure}
OUT=${OUT:-bench/results/$(date -u +%Y-%m-%d)-$NAME}

[ -x "$BIN" ] || make build
ulimit -n "$(ulimit -Hn)" 2>/dev/null || echo "could not raise the limit of open files" >&2

failed=0
for scenario in ${SCENARIOS//,/ }; do
  flags=()
  [ "$scenario" != "${scenario%-async}" ] && flags=(--durability async)
  # What goes wrong in one scenario is no reason to lose the others.
  "$BIN" bench "${scenario%-async}" "${flags[@]}" --clients "$CLIENTS" --half \
    --warmup "$WARMUP" --duration "$DURATION" --runs "$RUNS" --out "$OUT" >/dev/null || failed=1
done
cat "$OUT/engine.txt"
exit "$failed"
