package flow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	maxUnsentOutput = 1 << 20   // bytes of output that wait for the network
	outputPiece     = 32 << 10  // bytes of output in one piece
	chunkBytes      = 256 << 10 // of a blob
)

// remote is the half of a session's Host that asks the server.
type remote struct {
	conn    *grpc.ClientConn
	key     string
	payload uint64
	out     budget
	log     *slog.Logger
}

// credentials adds the key to the calls of a context. Handlers' contexts never
// carry it: they are passed on to others.
func (r *remote) credentials(ctx context.Context) context.Context {
	if r.key == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+r.key)
}

// MaxPayload implements Host.
func (r *remote) MaxPayload() uint64 { return r.payload }

// Now implements Host.
func (r *remote) Now() time.Time { return time.Now() }

// Logger implements Host.
func (r *remote) Logger() *slog.Logger { return r.log }

// PutBlob implements Host.
func (r *remote) PutBlob(ctx context.Context, flowID, from string, data []byte) (string, error) {
	ctx, cancel := context.WithCancel(r.credentials(ctx))
	defer cancel()
	stream, err := wire.NewBlobsClient(r.conn).Put(ctx)
	if err != nil {
		return "", err
	}
	c := &wire.Chunk{FlowId: flowID, FromFlowId: from}
	for len(data) > 0 {
		n := min(len(data), chunkBytes)
		c.Data, data = data[:n], data[n:]
		if err := stream.Send(c); err != nil {
			if errors.Is(err, io.EOF) { // the answer says why
				break
			}
			return "", err
		}
		c = &wire.Chunk{}
	}
	ref, err := stream.CloseAndRecv()
	if err != nil {
		return "", err
	}
	return ref.Blob, nil
}

// GetBlob implements Host.
func (r *remote) GetBlob(ctx context.Context, flowID, blob string) ([]byte, error) {
	ctx, cancel := context.WithCancel(r.credentials(ctx))
	defer cancel()
	stream, err := wire.NewBlobsClient(r.conn).Get(ctx, &wire.BlobRef{FlowId: flowID, Blob: blob})
	if err != nil {
		return nil, err
	}
	var data []byte
	for {
		c, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return data, nil
		case err != nil:
			return nil, err
		case len(data)+len(c.Data) > MaxValue:
			return nil, &SizeError{What: fmt.Sprintf("blob %q", blob), Bytes: uint64(len(data) + len(c.Data)), Most: MaxValue}
		}
		data = append(data, c.Data...)
	}
}

// Attribute implements Host.
func (r *remote) Attribute(ctx context.Context, flowID, name string) (*wire.Attribute, error) {
	a, err := wire.NewFlowsClient(r.conn).Do(r.credentials(ctx), &wire.Call{Verb: &wire.Call_GetAttributes{
		GetAttributes: &wire.GetAttributesRequest{FlowId: flowID, Names: []string{name}}}})
	if err != nil {
		return nil, err
	}
	if e := a.Error; e != nil {
		return nil, fmt.Errorf("%s: %s", e.Code, e.Message)
	}
	for _, at := range a.GetAttributes().GetAttributes() {
		if at.Name == name {
			return at, nil
		}
	}
	return nil, nil
}

// budget bounds bytes under way.
type budget struct {
	mu    sync.Mutex
	used  int           // guarded by mu
	most  int           // immutable
	freed chan struct{} // guarded by mu; closed when there is room again; nil = nobody waits
}

// take waits for room for n, which may exceed the whole, until ctx ends.
func (b *budget) take(ctx context.Context, n int) error {
	for {
		b.mu.Lock()
		if b.used == 0 || b.used+n <= b.most {
			b.used += n
			b.mu.Unlock()
			return nil
		}
		if b.freed == nil {
			b.freed = make(chan struct{})
		}
		freed := b.freed
		b.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (b *budget) give(n int) {
	if n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.freed != nil {
		close(b.freed)
		b.freed = nil
	}
}

// cutText gives the first bytes of s, at most n, at a boundary of characters.
func cutText(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 1 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
