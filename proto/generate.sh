#!/usr/bin/env bash
# Regenerates internal/wire from proto/. Needs protoc (Debian: protobuf-compiler);
# the Go plugins are pinned in go.mod.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
go build -o "$bin" google.golang.org/protobuf/cmd/protoc-gen-go github.com/planetscale/vtprotobuf/cmd/protoc-gen-go-vtproto \
  google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH="$bin:$PATH" protoc -I proto \
  --go_out=. --go_opt=module=github.com/perdure-dev/perdure \
  --go-vtproto_out=. --go-vtproto_opt=module=github.com/perdure-dev/perdure,features=marshal+unmarshal+unmarshal_unsafe+size+clone+equal \
  --go-grpc_out=. --go-grpc_opt=module=github.com/perdure-dev/perdure \
  perdure/journal/v1/journal.proto perdure/v1/worker.proto perdure/v1/flows.proto
gofmt -w internal/wire
