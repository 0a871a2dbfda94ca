package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/core"
)

var (
	errNoKey  = &core.Error{Code: unauthenticated, Message: "an API key is needed: send it as metadata \"authorization: Bearer KEY\""}
	errBadKey = &core.Error{Code: unauthenticated, Message: "the API key is not known here: check it, and that it is of this server"}
)

// authorizationOf is the header of this name that came with a call; empty = none.
func authorizationOf(ctx context.Context) string {
	if values := metadata.ValueFromIncomingContext(ctx, "authorization"); len(values) == 1 {
		return values[0]
	}
	return ""
}

// tenantOf finds the tenant of who calls.
func (s *Server) tenantOf(authorization string) (string, error) {
	tenant, err := s.cfg.Auth.Tenant(authorization)
	switch {
	case errors.Is(err, config.ErrNoKey):
		return "", errNoKey
	case err != nil:
		return "", errBadKey
	}
	return tenant, nil
}

// tenantKey is under which the tenant is in the context of a call.
type tenantKey struct{}

func tenantIn(ctx context.Context) string {
	t, _ := ctx.Value(tenantKey{}).(string)
	return t
}

// unary lets in who may call, and gives every error its status.
func (s *Server) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (res any, err error) {
	defer func() { err = statusOf(err) }()
	defer s.recovered(&err)
	tenant, err := s.tenantOf(authorizationOf(ctx))
	if err != nil {
		return nil, err
	}
	return handler(context.WithValue(ctx, tenantKey{}, tenant), req)
}

// stream is unary, for streams.
func (s *Server) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() { err = statusOf(err) }()
	defer s.recovered(&err)
	tenant, err := s.tenantOf(authorizationOf(ss.Context()))
	if err != nil {
		return err
	}
	if s.isDraining() {
		return errStopping
	}
	return handler(srv, &tenantStream{ss, context.WithValue(ss.Context(), tenantKey{}, tenant)})
}

type tenantStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (t *tenantStream) Context() context.Context { return t.ctx }

// recovered turns a panic into an error of the call: others are not harmed.
func (s *Server) recovered(err *error) {
	if v := recover(); v != nil {
		s.cfg.Log.Error("a call panicked", "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
		*err = &core.Error{Code: internalError, Message: "internal error: see the server's log"}
	}
}
