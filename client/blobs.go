package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	maxInline = 64 << 10  // bytes of a value that travel in a call; larger ones are blobs
	maxValue  = 64 << 20  // bytes of a value at all
	chunk     = 256 << 10 // bytes of a blob in one message
)

// inline refuses what has to travel in the call itself and is too large for it.
func inline(what string, b []byte) error {
	if len(b) <= maxInline {
		return nil
	}
	return &Error{Code: ErrTooLarge.Code, Position: -1, Message: fmt.Sprintf("%s has %d bytes, the most is %d", what, len(b), maxInline),
		Hint: "Keep large values in attributes and inputs of steps, and send their name."}
}

// toAttributes encodes attributes.
func toAttributes(attrs []Attribute) ([]*wire.Attribute, error) {
	if len(attrs) == 0 {
		return nil, nil
	}
	out := make([]*wire.Attribute, len(attrs))
	for i, a := range attrs {
		v, err := encode("the attribute "+a.Name, a.Value)
		if err != nil {
			return nil, err
		}
		out[i] = &wire.Attribute{Name: a.Name, Value: v, Index: wire.Attribute_Index(a.Index)}
	}
	return out, nil
}

// storeLarge moves large values into blobs.
func (c *Client) storeLarge(ctx context.Context, flowID string, attrs []*wire.Attribute) error {
	for _, a := range attrs {
		if len(a.Value) <= maxInline {
			continue
		}
		ref, err := c.putBlob(ctx, flowID, a.Value)
		if err != nil {
			return err
		}
		a.Blob, a.Size, a.Value = ref.Blob, uint64(len(a.Value)), nil
	}
	return nil
}

// storePayloads moves large messages for a flow into blobs.
func (c *Client) storePayloads(ctx context.Context, flowID string, reqs ...*wire.PublishRequest) error {
	for _, w := range reqs {
		for i, p := range w.Payloads {
			if len(p) <= maxInline {
				continue
			}
			ref, err := c.putBlob(ctx, flowID, p)
			if err != nil {
				return err
			}
			if w.Blobs == nil {
				w.Blobs = make([]string, len(w.Payloads))
			}
			w.Payloads[i], w.Blobs[i] = nil, ref.Blob
		}
	}
	return nil
}

// fetchLarge fills in values that are in blobs.
func (c *Client) fetchLarge(ctx context.Context, flowID string, attrs []*wire.Attribute) error {
	for _, a := range attrs {
		if a.Blob == "" {
			continue
		}
		v, err := c.getBlob(ctx, &wire.BlobRef{FlowId: flowID, Blob: a.Blob, Size: a.Size})
		if err != nil {
			return err
		}
		a.Value, a.Blob, a.Size = v, "", 0
	}
	return nil
}

// putBlob stores a value as a blob of a flow, which need not be there yet. A
// blob that nobody refers to is collected by the server, so trying again is safe.
func (c *Client) putBlob(ctx context.Context, flowID string, v []byte) (*wire.BlobRef, error) {
	if len(v) > maxValue {
		return nil, &Error{Code: ErrTooLarge.Code, Position: -1, Message: fmt.Sprintf("a value has %d bytes, the most is %d", len(v), maxValue)}
	}
	var ref *wire.BlobRef
	err := c.transfer(ctx, func(ctx context.Context, api wire.BlobsClient) error {
		put, err := api.Put(ctx)
		if err != nil {
			return err
		}
		for rest, id := v, flowID; len(rest) > 0; id = "" {
			n := min(len(rest), chunk)
			if err := put.Send(&wire.Chunk{FlowId: id, Data: rest[:n]}); err != nil && err != io.EOF {
				return err
			} else if err != nil {
				break // CloseAndRecv says why
			}
			rest = rest[n:]
		}
		ref, err = put.CloseAndRecv()
		return err
	})
	return ref, err
}

func (c *Client) getBlob(ctx context.Context, ref *wire.BlobRef) ([]byte, error) {
	if ref.Size > maxValue {
		return nil, &Error{Code: ErrTooLarge.Code, Position: -1, Message: fmt.Sprintf("a value has %d bytes, the most is %d", ref.Size, maxValue)}
	}
	var v []byte
	err := c.transfer(ctx, func(ctx context.Context, api wire.BlobsClient) error {
		v = make([]byte, 0, ref.Size)
		get, err := api.Get(ctx, ref)
		if err != nil {
			return err
		}
		for {
			part, err := get.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if len(v)+len(part.Data) > maxValue {
				return status.Error(codes.OutOfRange, "the value is larger than the server said")
			}
			v = append(v, part.Data...)
		}
	})
	return v, err
}

// takeBlob reads a blob that was made for this call only.
func (c *Client) takeBlob(ctx context.Context, ref *wire.BlobRef) ([]byte, error) {
	v, err := c.getBlob(ctx, ref)
	if err == nil {
		c.dropBlob(ctx, ref)
	}
	return v, err
}

// dropBlob deletes a blob of a call that is over. What it leaves behind, and all
// when ctx has ended, the server collects later.
func (c *Client) dropBlob(ctx context.Context, ref *wire.BlobRef) {
	if ctx.Err() != nil {
		return
	}
	_ = c.transfer(ctx, func(ctx context.Context, api wire.BlobsClient) error {
		_, err := api.Drop(ctx, ref)
		return err
	})
}

// transfer moves one blob, again when the connection broke. It ends with the
// caller's context or with the client.
func (c *Client) transfer(ctx context.Context, fn func(context.Context, wire.BlobsClient) error) error {
	l := c.links[0]
	api := wire.NewBlobsClient(l.conn)
	began := time.Now()
	for tries := 1; ; tries++ {
		if _, err := l.get(ctx, c.patience); err != nil {
			return err
		}
		md, _ := metadata.FromOutgoingContext(l.ctx)
		one, cancel := context.WithCancel(metadata.NewOutgoingContext(ctx, md))
		stop := context.AfterFunc(l.ctx, cancel)
		err := fn(one, api)
		stop()
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return contextError(ctx, false)
		case status.Code(err) != codes.Unavailable || tries >= maxTries || time.Since(began) > c.patience || l.ctx.Err() != nil:
			return blobError(l, err)
		}
		if !sleep(ctx, backoff(tries)) {
			return contextError(ctx, false)
		}
	}
}

func blobError(l *link, err error) error {
	if r := refusal(l, err); r != nil {
		return r
	}
	e := fromStatus(err)
	e.Message = "moving a large value: " + e.Message
	return e
}
