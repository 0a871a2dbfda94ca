#!/usr/bin/env bash
# Temporal on PostgreSQL and Perdure under the same load, in turns, on this
# machine: the same load loop, the same scenarios. See README.md.
#
#   bench/peers/temporal/run.sh
#
# From the environment, with defaults:
#   CLIENTS=1,64,256  WARMUP=5s  DURATION=15s  RUNS=3   (rounds, peer and Perdure in turns)
#   SCENARIOS=        all that both have; or a list with commas
#   PERDURE=yes       no: only the peer
#   BIN=bin/perdure   (built when missing)
#   TEMPORAL_DIR=a fresh folder  server and SQL tool, to use again: building takes
#                     16 minutes of CPU
#   PG_BIN=the newest of /usr/lib/postgresql
#   OUT=a fresh folder           where points and table go
# Needs go, and PostgreSQL (installed from Debian when missing and this is root).
# PostgreSQL refuses to run as root: then it runs as user postgres.
set -euo pipefail
VERSION=1.32.1
SDK_VERSION=1.51.0
SHARDS=64
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE/../../.."
# shellcheck source=scripts/bench-lib.sh
. scripts/bench-lib.sh
# shellcheck source=bench/peers/lib.sh
. bench/peers/lib.sh
# shellcheck source=bench/peers/postgres.sh
. bench/peers/postgres.sh

PORT=${PORT:-724} # first digits of eight ports
SCENARIOS=${SCENARIOS:-flow-start,flow-start-local,sequential-steps,sequential-steps-local,rpc-read,rpc-locked-update,channel-wake}
TEMPORAL_DIR=${TEMPORAL_DIR:-$WORK/temporal}
find_postgres

# The server is a Go module like any other: its sum is checked, and it is built
# from a copy, since the module cache is read-only.
mkdir -p "$TEMPORAL_DIR"
if [ ! -x "$TEMPORAL_DIR/temporal-server" ] || [ ! -x "$TEMPORAL_DIR/temporal-sql-tool" ]; then
  say "building temporal $VERSION in $TEMPORAL_DIR"
  source_dir=$(cd "$HERE" && go mod download -json "go.temporal.io/server@v$VERSION" | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
  [ -d "$source_dir" ] || die "go.temporal.io/server@v$VERSION was not downloaded"
  cp -r "$source_dir" "$TEMPORAL_DIR/source"
  chmod -R u+w "$TEMPORAL_DIR/source"
  for program in server:cmd/server sql-tool:cmd/tools/sql; do
    CGO_ENABLED=0 nice -n "${NICE:-0}" go build -C "$TEMPORAL_DIR/source" -buildvcs=false -o "$TEMPORAL_DIR/temporal-${program%%:*}" "./${program#*:}"
  done
fi
build_driver temporal

settings peer temporal version "$VERSION" sdk "$SDK_VERSION" postgres "$PG_VERSION" shards "$SHARDS" max_connections "$PG_MAX_CONNECTIONS" shared_buffers "$PG_SHARED_BUFFERS" \
  clients "$CLIENTS" warmup "$WARMUP" duration "$DURATION" runs "$RUNS" scenarios "$SCENARIOS" >"$OUT/settings.json"

# schema DATABASE FOLDER
schema() {
  local tool=("$TEMPORAL_DIR/temporal-sql-tool" -u postgres --pw any --ep "$HOST" -p "$PG_PORT" --pl postgres12 --db "$1")
  "${tool[@]}" create
  "${tool[@]}" setup-schema -v 0.0
  "${tool[@]}" update-schema -d "$TEMPORAL_DIR/source/schema/postgresql/v12/$2/versioned"
}

# round N: a fresh database for each round.
round() {
  start_postgres
  { schema temporal temporal && schema temporal_visibility visibility; } >"$WORK/schema.log" 2>&1 || {
    tail -n 20 "$WORK/schema.log" >&2
    die "the schema could not be made"
  }
  mkdir -p "$WORK/temporal-config"
  sed -e "s/@PORT@/$PORT/g" -e "s/@PG_PORT@/$PG_PORT/g" "$HERE/server.yaml" >"$WORK/temporal-config/development.yaml"
  start temporal "$TEMPORAL_DIR/temporal-server" --root "$WORK" --config temporal-config --env development --allow-no-auth start
  local i
  for ((i = 0; i < 600; i++)); do
    { exec 3<>"/dev/tcp/$HOST/${PORT}0" && exec 3>&-; } 2>/dev/null && break
    kill -0 "${PIDS[temporal]}" 2>/dev/null || {
      tail -n 20 "$WORK/temporal.log" >&2
      die "temporal does not start"
    }
    sleep 0.1
  done
  drive temporal -target "$HOST:${PORT}0" -pid "server=${PIDS[temporal]}" -pid "postgres=$(postgres_pid)" \
    -setting "version=$VERSION" -setting "sdk=$SDK_VERSION" -setting "postgres=$PG_VERSION" -setting "shards=$SHARDS" -setting "run=$1"
  stop temporal
  stop_postgres
}

rounds
