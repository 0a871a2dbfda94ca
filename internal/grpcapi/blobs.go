package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

type blobsService struct {
	wire.UnimplementedBlobsServer
	s *Server
}

var errNoBlobs = &core.Error{Code: notServed, Message: "this server keeps no blobs"}

// Put implements wire.BlobsServer.
func (v blobsService) Put(stream wire.Blobs_PutServer) error {
	if v.s.cfg.Blobs == nil {
		return errNoBlobs
	}
	if !v.s.finishing.enter(nil) {
		return errStopping
	}
	defer v.s.finishing.leave(nil)
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return &core.Error{Code: core.Invalid, Message: "the first chunk of a blob must name its flow"}
	}
	if err != nil {
		return err
	}
	if first.FlowId == "" {
		return &core.Error{Code: core.Invalid, Message: "the first chunk of a blob must name its flow"}
	}
	r := &chunks{stream: stream, most: v.s.cfg.MaxBlob}
	if err := r.take(first); err != nil {
		return err
	}
	ref, err := v.s.cfg.Blobs.Put(stream.Context(), tenantIn(stream.Context()), first.FlowId, first.FromFlowId, r)
	if r.err != nil && !errors.Is(r.err, io.EOF) {
		return r.err // the cause, whatever became of it below
	}
	if err != nil {
		return err
	}
	return stream.SendAndClose(ref)
}

// chunks reads the data of a Put.
type chunks struct {
	stream wire.Blobs_PutServer
	most   int64
	size   int64
	rest   []byte
	err    error
}

func (c *chunks) take(m *wire.Chunk) error {
	if len(m.Data) > MaxChunk {
		return &core.Error{Code: tooLarge, Message: fmt.Sprintf("a chunk has %d bytes, at most %d", len(m.Data), MaxChunk)}
	}
	if c.size += int64(len(m.Data)); c.size > c.most {
		return &core.Error{Code: tooLarge, Message: fmt.Sprintf("the blob has more than %d bytes, the most", c.most)}
	}
	c.rest = m.Data
	return nil
}

// Read implements io.Reader.
func (c *chunks) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		if c.err != nil {
			return 0, c.err
		}
		m, err := c.stream.Recv()
		if err == nil {
			err = c.take(m)
		}
		c.err = err
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Drop implements wire.BlobsServer.
func (v blobsService) Drop(ctx context.Context, ref *wire.BlobRef) (*wire.Done, error) {
	if v.s.cfg.Blobs == nil {
		return nil, errNoBlobs
	}
	if !v.s.finishing.enter(nil) {
		return nil, errStopping
	}
	defer v.s.finishing.leave(nil)
	return &wire.Done{}, v.s.cfg.Blobs.Drop(ctx, tenantIn(ctx), ref)
}

// Get implements wire.BlobsServer.
func (v blobsService) Get(ref *wire.BlobRef, stream wire.Blobs_GetServer) (err error) {
	if v.s.cfg.Blobs == nil {
		return errNoBlobs
	}
	if !v.s.finishing.enter(nil) {
		return errStopping
	}
	defer v.s.finishing.leave(nil)
	r, err := v.s.cfg.Blobs.Get(stream.Context(), tenantIn(stream.Context()), ref)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	chunk := &wire.Chunk{FlowId: ref.FlowId}
	buf := make([]byte, MaxChunk)
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			chunk.Data = buf[:n] // Send has copied it when it returns
			if err := stream.Send(chunk); err != nil {
				return err
			}
			chunk.FlowId = ""
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return err
		}
	}
}
