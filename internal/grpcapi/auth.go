package grpcapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"runtime/debug"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/core"
)

// defaultTenant is who calls when no keys are configured.
const defaultTenant = "default"

// key is an API key: its digest, and for whom it speaks.
type key struct {
	digest [sha256.Size]byte
	tenant string
}

func keysOf(auth config.Auth) []key {
	var keys []key
	for _, k := range auth.Keys {
		keys = append(keys, key{k.Digest, k.Tenant})
	}
	return keys
}

var (
	errNoKey  = &core.Error{Code: unauthenticated, Message: "an API key is needed: send it as metadata \"authorization: Bearer KEY\""}
	errBadKey = &core.Error{Code: unauthenticated, Message: "the API key is not known here: check it, and that it is of this server"}
)

// tenantOf finds the tenant of a call. All keys are compared, each in constant
// time, so that the time tells nothing about any of them.
func (s *Server) tenantOf(ctx context.Context) (string, error) {
	if len(s.keys) == 0 {
		return defaultTenant, nil
	}
	values := metadata.ValueFromIncomingContext(ctx, "authorization")
	if len(values) != 1 {
		return "", errNoKey
	}
	scheme, given, _ := strings.Cut(values[0], " ")
	given = strings.TrimSpace(given)
	if given == "" || !strings.EqualFold(scheme, "Bearer") {
		return "", errNoKey
	}
	digest := sha256.Sum256([]byte(given))
	match := -1
	for i := range s.keys {
		match = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(digest[:], s.keys[i].digest[:]), i, match)
	}
	if match < 0 {
		return "", errBadKey
	}
	return s.keys[match].tenant, nil
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
	tenant, err := s.tenantOf(ctx)
	if err != nil {
		return nil, err
	}
	return handler(context.WithValue(ctx, tenantKey{}, tenant), req)
}

// stream is unary, for streams.
func (s *Server) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() { err = statusOf(err) }()
	defer s.recovered(&err)
	tenant, err := s.tenantOf(ss.Context())
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
		s.cfg.Log.Error("a gRPC call panicked", "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
		*err = &core.Error{Code: internalError, Message: "internal error: see the server's log"}
	}
}
