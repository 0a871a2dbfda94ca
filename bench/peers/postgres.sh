# A PostgreSQL cluster in a scratch folder, for peers that need one. Sourced after
# scripts/bench-lib.sh. Everything but connections and buffers is PostgreSQL's
# default: fsync and synchronous_commit are on.
# shellcheck shell=bash

PG_PORT=${PG_PORT:-5497}
PG_MAX_CONNECTIONS=${PG_MAX_CONNECTIONS:-400}
PG_SHARED_BUFFERS=${PG_SHARED_BUFFERS:-1GB}
PG_VERSION=unknown
PG_BIN=${PG_BIN:-}

newest_postgres() { find /usr/lib/postgresql -path '*/bin/postgres' 2>/dev/null | sort -V | tail -n 1; }

# find_postgres: sets PG_BIN and PG_VERSION, and installs it when it is missing.
find_postgres() {
  if [ -z "$PG_BIN" ] && [ -z "$(newest_postgres)" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
      die "PostgreSQL is missing (Debian: apt-get install postgresql), or name its programs' folder with PG_BIN"
    fi
    say "installing postgresql"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null
  fi
  [ -n "$PG_BIN" ] || PG_BIN=$(dirname "$(newest_postgres)")
  PG_VERSION=$("$PG_BIN/postgres" --version) || die "no postgres in $PG_BIN"
  PG_VERSION=${PG_VERSION#postgres (PostgreSQL) }
}

# PostgreSQL refuses root; a prefix, since a function would be a process between.
UNPRIVILEGED=()
[ "$(id -u)" != 0 ] || UNPRIVILEGED=(setpriv --reuid=postgres --regid=postgres --clear-groups --)

postgres_pid() { head -n 1 "$WORK/postgres/data/postmaster.pid"; }

# start_postgres: a fresh cluster that trusts everyone on loopback.
start_postgres() {
  rm -rf "$WORK/postgres"
  mkdir "$WORK/postgres"
  chmod 711 "$WORK" # so that its user finds the way
  [ "$(id -u)" != 0 ] || chown postgres "$WORK/postgres"
  (cd "$WORK/postgres" && "${UNPRIVILEGED[@]}" "$PG_BIN/initdb" -D data -U postgres -A trust -E UTF8 --no-locale >init.log) || die "initdb failed"
  start postgres "${UNPRIVILEGED[@]}" "$PG_BIN/postgres" -D "$WORK/postgres/data" -k "$WORK/postgres" -h "$HOST" -p "$PG_PORT" \
    -c "max_connections=$PG_MAX_CONNECTIONS" -c "shared_buffers=$PG_SHARED_BUFFERS"
  local i
  for ((i = 0; i < 300; i++)); do
    "$PG_BIN/pg_isready" -q -h "$HOST" -p "$PG_PORT" && return 0
    kill -0 "${PIDS[postgres]}" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 20 "$WORK/postgres.log" >&2
  die "PostgreSQL does not answer on port $PG_PORT"
}

# stop_postgres: SIGINT ends sessions and stops; SIGTERM would wait for them.
stop_postgres() {
  kill -INT "${PIDS[postgres]}" 2>/dev/null || true
  stop postgres
}
