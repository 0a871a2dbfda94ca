package grpcapi

import (
	"context"
	"errors"
	"io"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/dispatch"
)

// Codes of errors of this package.
const (
	unauthenticated core.Code = "unauthenticated"
	internalError   core.Code = "internal"
	tooLarge        core.Code = "too_large"
	slowReader      core.Code = "slow_reader"
	notServed       core.Code = "not_served"
	blobMissing     core.Code = "blob_missing"
)

var errStopping = dispatch.ErrDraining

// statuses is the one place where codes become those of gRPC. It is for errors
// that end a stream or a call of its own; answers in a stream carry the code as
// it is. What is not here is unknown.
var statuses = map[core.Code]codes.Code{
	core.Invalid:         codes.InvalidArgument,
	core.NotFound:        codes.NotFound,
	core.Exists:          codes.AlreadyExists,
	core.LimitReached:    codes.ResourceExhausted,
	core.Conflict:        codes.Aborted,
	dispatch.Unsupported: codes.FailedPrecondition,
	dispatch.Flood:       codes.ResourceExhausted,
	dispatch.WorkerLost:  codes.DeadlineExceeded,
	dispatch.Deadline:    codes.DeadlineExceeded,
	dispatch.Cancelled:   codes.Canceled,
	dispatch.Overloaded:  codes.ResourceExhausted,
	dispatch.Unavailable: codes.Unavailable,
	unauthenticated:      codes.Unauthenticated,
	internalError:        codes.Internal,
	tooLarge:             codes.InvalidArgument,
	slowReader:           codes.ResourceExhausted,
	notServed:            codes.Unimplemented,
	blobMissing:          codes.NotFound,
}

// statusOf gives an error as gRPC shows it. The text begins with the code, as in
// all errors of the server.
func statusOf(err error) error {
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return nil
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	name, _, _ := strings.Cut(err.Error(), ": ")
	code, ok := statuses[core.Code(name)]
	if !ok {
		code = codes.Unknown
	}
	return status.Error(code, err.Error())
}
