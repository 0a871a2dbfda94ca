#!/usr/bin/env bash
# DBOS on PostgreSQL and Perdure under the same load, in turns, on this machine:
# the same load loop, the same scenarios. See README.md.
#
#   bench/peers/dbos/run.sh
#
# From the environment, with defaults:
#   CLIENTS=1,64,256  WARMUP=5s  DURATION=15s  RUNS=3   (rounds, peer and Perdure in turns)
#   SCENARIOS=        all that both have; or a list with commas
#   POOL=20           connections of DBOS's pool; 20 is its own default
#   PERDURE=yes       no: only the peer
#   BIN=bin/perdure   (built when missing)
#   PG_BIN=the newest of /usr/lib/postgresql
#   OUT=a fresh folder           where points and table go
# Needs go, and PostgreSQL (installed from Debian when missing and this is root).
# PostgreSQL refuses to run as root: then it runs as user postgres.
set -euo pipefail
VERSION=1.8.0
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE/../../.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh
# shellcheck source=bench/peers/lib.sh
. bench/peers/lib.sh
# shellcheck source=bench/peers/postgres.sh
. bench/peers/postgres.sh

POOL=${POOL:-20}
SCENARIOS=${SCENARIOS:-flow-start,sequential-steps,rpc-read,channel-wake,channel-wake-once}
find_postgres
build_driver dbos

settings peer dbos version "$VERSION" postgres "$PG_VERSION" pool "$POOL" max_connections "$PG_MAX_CONNECTIONS" shared_buffers "$PG_SHARED_BUFFERS" \
  clients "$CLIENTS" warmup "$WARMUP" duration "$DURATION" runs "$RUNS" scenarios "$SCENARIOS" >"$OUT/settings.json"

# round N: a fresh database for each round.
round() {
  start_postgres
  drive dbos -database "postgres://postgres@$HOST:$PG_PORT/postgres?sslmode=disable&pool_max_conns=$POOL" \
    -pid "postgres=$(postgres_pid)" -setting "version=$VERSION" -setting "postgres=$PG_VERSION" -setting "pool=$POOL" \
    -setting "max_connections=$PG_MAX_CONNECTIONS" -setting "shared_buffers=$PG_SHARED_BUFFERS" -setting "run=$1"
  stop_postgres
}

rounds
