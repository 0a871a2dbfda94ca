#!/usr/bin/env bash
# Prints the path of a versitygw binary, an S3 server for tests, at the pinned
# version. Builds it the first time (about a minute) beside Go's build cache.
#
#   PERDURE_VERSITYGW=$(scripts/versitygw.sh) go test ./internal/blob/s3/...
#
# With PERDURE_VERSITYGW set already, prints that.
set -euo pipefail

VERSION=v1.8.0

if [ -n "${PERDURE_VERSITYGW:-}" ]; then
  printf '%s\n' "$PERDURE_VERSITYGW"
  exit 0
fi
folder=$(dirname "$(go env GOCACHE)")/perdure-tools
binary=$folder/versitygw-$VERSION
if [ ! -x "$binary" ]; then
  mkdir -p "$folder"
  work=$(mktemp -d "$folder/build.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  GOBIN=$work GOFLAGS='' GOWORK=off CGO_ENABLED=0 go install -ldflags '-s -w' "github.com/versity/versitygw/cmd/versitygw@$VERSION" >&2
  mv -f "$work/versitygw" "$binary" # in one step: others may build too
fi
printf '%s\n' "$binary"
