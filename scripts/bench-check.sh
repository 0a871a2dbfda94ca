#!/usr/bin/env bash
# Compares this tree with the commit before it, in one run on this machine:
# both builds take the same short sweep in turns, three times each, and the
# medians of turn p95 and RSS must not have grown by more than LIMIT. An alarm
# is given only when it holds over a second round too.
# Exit 1 = an alarm, 0 = none or nothing to compare with, 2 = could not run.
#
# From the environment, with defaults:
#   BASE=HEAD~1  SWEEP=1,32,128  DURATION=4s  RUNS=3  LIMIT=0.2
#   RECORD=NAME   also keep this tree's runs as bench/baselines/NAME.json
#   AGAINST=NAME  also print, without alarm, how they compare with that
#                 baseline: it may be of another machine
#
# The model answers after 20 ms, so that the server's own share of a turn is
# large enough for 20 % of it to show.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh

BASE=${BASE:-HEAD~1}
SWEEP=${SWEEP:-1,32,128}
DURATION=${DURATION:-4s}
RUNS=${RUNS:-3}
LIMIT=${LIMIT:-0.2}
export MOCK_TTFT_MS=${MOCK_TTFT_MS:-20} MOCK_TPS=${MOCK_TPS:-1000} MOCK_TOKENS=${MOCK_TOKENS:-8} CGO_ENABLED=0

for name in "${RECORD:-}" "${AGAINST:-}"; do
  [[ $name =~ ^[A-Za-z0-9._-]*$ ]] || die "baseline $name: want letters, digits, dot, dash"
done
rev=$(git rev-parse --verify --quiet "$BASE^{commit}") || {
  say "bench-check: there is no $BASE to compare with"
  exit 0
}

drop_tree() { git worktree remove --force "$WORK/tree" 2>/dev/null || true; }
trap 'drop_tree; cleanup' EXIT
git worktree add --quiet --detach "$WORK/tree" "$rev"
go build -trimpath -ldflags '-s -w' -o "$WORK/head" ./cmd/perdure
if ! (cd "$WORK/tree" && go build -trimpath -ldflags '-s -w' -o "$WORK/base" ./cmd/perdure) 2>"$WORK/build.log" ||
  ! "$WORK/base" serve --help >/dev/null 2>&1; then
  say "bench-check: $BASE has no server to compare with"
  tail -n 3 "$WORK/build.log" >&2
  exit 0
fi

# The mock and the load generator are this tree's for both.
start_mock "$WORK/head"
take() { # take BUILD RUN: one sweep on an empty folder
  say "$1, run $2"
  rm -rf "$WORK/data"
  start_server "$WORK/$1" "$WORK/data"
  load "$WORK/head" turns --target "$SERVE_URL" --upstream "$MOCK_URL" --sweep "$SWEEP" --duration "$DURATION" \
    --turns-per-session 20 --label "build=$1" --label "run=$2" --json >"$WORK/$1-$2.jsonl" || say "bench-check: $1 counted errors"
  stop server
}
rounds=0
round() { # the next RUNS runs of both
  local i order build
  for ((i = rounds * RUNS + 1; i <= (rounds + 1) * RUNS; i++)); do
    order=(base head)
    ((i % 2)) || order=(head base)
    for build in "${order[@]}"; do take "$build" "$i"; done
  done
  rounds=$((rounds + 1))
}
round

runs() { # runs BUILD: its files, separated by commas
  local list=("$WORK/$1"-[0-9]*.jsonl)
  (IFS=,; printf '%s' "${list[*]}")
}
if [ -n "${RECORD:-}" ]; then
  mkdir -p bench/baselines
  {
    printf '{"settings": '
    settings base_of "$RECORD" sweep "$SWEEP" duration "$DURATION" mock_ttft_ms "$MOCK_TTFT_MS" mock_tps "$MOCK_TPS" mock_tokens "$MOCK_TOKENS" | tr -d '\n'
    printf ', "runs": [\n'
    for ((i = 1; i <= RUNS; i++)); do
      [ "$i" = 1 ] || printf ',\n'
      printf '['
      paste -sd, "$WORK/head-$i.jsonl" | tr -d '\n'
      printf ']'
    done
    printf '\n]}\n'
  } >"bench/baselines/$RECORD.json"
  say "recorded bench/baselines/$RECORD.json"
fi
if [ -n "${AGAINST:-}" ]; then
  echo "against the baseline $AGAINST (for information):"
  load "$WORK/head" compare --limit "$LIMIT" --base "bench/baselines/$AGAINST.json" --head "$(runs head)" || true
fi
against_base() {
  echo "against ${rev:0:12}, medians of $((rounds * RUNS)) runs:"
  load "$WORK/head" compare --limit "$LIMIT" --base "$(runs base)" --head "$(runs head)"
}
against_base && exit 0
say "an alarm: once more as many runs, as a neighbour on the machine can cause one"
round
against_base
