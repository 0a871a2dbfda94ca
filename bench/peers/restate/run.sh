#!/usr/bin/env bash
# Restate and Perdure under the same load, in turns, on this machine: the same
# load loop, the same scenarios. See README.md.
#
#   bench/peers/restate/run.sh
#
# From the environment, with defaults:
#   CLIENTS=1,64,256  WARMUP=5s  DURATION=15s  RUNS=3   (rounds, peer and Perdure in turns)
#   SCENARIOS=        all that both have; or a list with commas
#   PARTITIONS=2      of Restate; its own default is 24
#   PERDURE=yes       no: only the peer
#   BIN=bin/perdure   (built when missing)
#   RESTATE_DIR=a fresh folder   an installation to use again
#   OUT=a fresh folder           where points and table go
# Needs go, npm (and its node).
set -euo pipefail
VERSION=1.7.12
SDK_VERSION=1.2.0
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE/../../.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh
# shellcheck source=bench/peers/lib.sh
. bench/peers/lib.sh

PARTITIONS=${PARTITIONS:-2}
RESTATE_DIR=${RESTATE_DIR:-$WORK/restate}
INGRESS_PORT=${INGRESS_PORT:-8197}
ADMIN_PORT=${ADMIN_PORT:-9197}
NODE_PORT=${NODE_PORT:-5197}
SERVICE_PORT=${SERVICE_PORT:-9198}

command -v npm >/dev/null || die "npm is missing (Debian: apt-get install npm)"
# The program is inside the platform's package: no install script is run.
peer() { find "$RESTATE_DIR/node_modules" -path '*restate-server-linux-*/bin/restate-server' -type f 2>/dev/null | head -n 1; }
if [ -z "$(peer)" ]; then
  say "installing @restatedev/restate-server@$VERSION into $RESTATE_DIR"
  mkdir -p "$RESTATE_DIR"
  npm install --prefix "$RESTATE_DIR" --ignore-scripts --no-audit --no-fund --silent "@restatedev/restate-server@$VERSION"
fi
PEER=$(peer)
[ -n "$PEER" ] || die "@restatedev/restate-server@$VERSION brought no program for this platform"
[ "$("$PEER" --version)" = "restate-server $VERSION" ] || die "$PEER is $("$PEER" --version), want $VERSION"
build_driver restate

settings peer restate version "$VERSION" sdk "$SDK_VERSION" partitions "$PARTITIONS" \
  clients "$CLIENTS" warmup "$WARMUP" duration "$DURATION" runs "$RUNS" scenarios "$SCENARIOS" >"$OUT/settings.json"

# round N: a fresh server for each round.
round() {
  need_free "$INGRESS_PORT"
  rm -rf "$WORK/restate-data"
  start restate env RESTATE_DISABLE_TELEMETRY=true RESTATE_DEFAULT_NUM_PARTITIONS="$PARTITIONS" \
    RESTATE_INGRESS__BIND_ADDRESS="$HOST:$INGRESS_PORT" RESTATE_ADMIN__BIND_ADDRESS="$HOST:$ADMIN_PORT" \
    RESTATE_LOG_FILTER=warn \
    "$PEER" --base-dir "$WORK/restate-data" --node-name n1 --bind-ip "$HOST" --bind-port "$NODE_PORT" --listen-mode tcp --no-logo
  wait_ready restate "$ADMIN_PORT" /health
  drive restate -ingress "http://$HOST:$INGRESS_PORT" -admin "http://$HOST:$ADMIN_PORT" -listen "$HOST:$SERVICE_PORT" \
    -pid "server=${PIDS[restate]}" -setting "version=$VERSION" -setting "sdk=$SDK_VERSION" -setting "partitions=$PARTITIONS" -setting "run=$1"
  stop restate
}

rounds
