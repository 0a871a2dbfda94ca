package flows

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/wire"
)

// A blob is a value that is too large for a frame. It belongs to one flow, is
// never changed, and is kept while that flow names it, or another flow that is
// to carry it there (see Sweep). It is kept in parts, so that moving one costs
// the memory of one part:
//
//	blobs/<hh>/<owner>.<time>-<random>.from    the ID of the flow that carries it
//	blobs/<hh>/<owner>.<time>-<random>.p000    a full part, 4 MiB
//	blobs/<hh>/<owner>.<time>-<random>-<size>  the rest, put last: the blob is there
//	blobs/<hh>/<owner>.owner                   the flow's ID, put first
//
// owner is a hash of the flow's ID, and hh its first byte: a blob is found only
// by somebody who may see its flow. The blob's ID is <time>-<random>-<size>.
const (
	blobPrefix  = "blobs/"
	ownerSuffix = ".owner"
	fromSuffix  = ".from"
	partSize    = 4 << 20
	chunkSize   = 256 << 10

	// A blob that nothing names is kept this long after it was made. One that is
	// named for the first time must be younger than half of that: the sweep looks
	// at the flow before it deletes, and a command that is on its way by then must
	// not name what is about to go.
	blobSafety = time.Hour
	blobFresh  = blobSafety / 2
)

// blobs is the blobs that are being put, by owner: the sweep leaves the owner's
// mark alone meanwhile.
type blobs struct {
	moving bound
	mu     sync.Mutex
	active map[string]int // guarded by mu
}

func (b *blobs) init(most int) {
	b.moving = newBound(most)
	b.active = map[string]int{}
}

// blobID is a parsed blob ID.
type blobID struct {
	made time.Time
	name string // without the size
	size uint64
}

func (b blobID) String() string { return b.name + "-" + strconv.FormatUint(b.size, 16) }

// newBlobName begins with the time, so that the sweep knows its age.
func (s *Service) newBlobName() string {
	r := s.cfg.Env.Rand
	return fmt.Sprintf("%012x-%016x%016x", s.cfg.Env.Clock.Now().UnixMilli(), r.Uint64(), r.Uint64())
}

const blobNameLen = 12 + 1 + 32

func parseBlobID(id string) (blobID, error) {
	b, ok := parseBlobName(id)
	if ok && len(id) > blobNameLen+1 && id[blobNameLen] == '-' {
		size, err := strconv.ParseUint(id[blobNameLen+1:], 16, 64)
		if err == nil && size <= MaxBlob {
			b.size = size
			if b.String() == id {
				return b, nil
			}
		}
	}
	return blobID{}, refuse(Invalid, "%q is not the name of a blob", excerpt([]byte(id)))
}

// parseBlobName reads what the names of a blob's objects begin with.
func parseBlobName(s string) (blobID, bool) {
	if len(s) < blobNameLen || s[12] != '-' {
		return blobID{}, false
	}
	name := s[:blobNameLen]
	ms, err := strconv.ParseInt(name[:12], 16, 64)
	if err != nil || strings.ContainsFunc(name, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'a' || r > 'f') && r != '-'
	}) {
		return blobID{}, false
	}
	return blobID{made: time.UnixMilli(ms), name: name}, true
}

func ownerKey(flowID string) string {
	sum := sha256.Sum256([]byte(flowID))
	h := hex.EncodeToString(sum[:16])
	return blobPrefix + h[:2] + "/" + h
}

func fromKey(owner, name string) string { return owner + "." + name + fromSuffix }

func partKey(owner, name string, i int) string { return fmt.Sprintf("%s.%s.p%03d", owner, name, i) }

// begin takes one of the places for blobs on their way.
func (s *Service) beginBlob(tenant, id string) (flowID string, leave func(), err error) {
	if s.cfg.Blobs == nil {
		return "", nil, refuse(NotServed, "blobs are not served by this node")
	}
	if err := checkID(id); err != nil {
		return "", nil, err
	}
	if !s.blobs.moving.enter() {
		return "", nil, refuse(Overloaded, "%d blobs are being moved already", cap(s.blobs.moving))
	}
	return FlowID(tenant, id), s.blobs.moving.leave, nil
}

// PutBlob keeps a value for a flow, which may not be there yet. from is the flow
// of the same tenant whose outbox is to carry it there; empty = none. next gives
// the value piece by piece, and io.EOF behind the last one; a piece is not kept.
// Its errors are *Error, but for those of next, which are given as they are.
func (s *Service) PutBlob(ctx context.Context, tenant, id, from string, next func() ([]byte, error)) (*wire.BlobRef, error) {
	if from != "" {
		if err := checkID(from); err != nil {
			return nil, err
		}
	}
	flowID, leave, err := s.beginBlob(tenant, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	owner := ownerKey(flowID)
	s.blobs.enter(owner)
	defer s.blobs.leave(owner)
	w := blobWriter{s: s, owner: owner, name: s.newBlobName()}
	if err := w.put(ctx, owner+ownerSuffix, []byte(flowID)); err != nil {
		return nil, err
	}
	if from != "" && from != id {
		if err := w.put(ctx, fromKey(owner, w.name), []byte(FlowID(tenant, from))); err != nil {
			return nil, err
		}
	}
	for {
		piece, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = w.write(ctx, piece)
		}
		if err != nil {
			return nil, err
		}
	}
	b, err := w.finish(ctx)
	if err != nil {
		return nil, err
	}
	return &wire.BlobRef{FlowId: id, Blob: b.String(), Size: b.size}, nil
}

func (b *blobs) enter(owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.active[owner]++
}

func (b *blobs) leave(owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.active[owner]--; b.active[owner] == 0 {
		delete(b.active, owner)
	}
}

// blobWriter gathers parts.
type blobWriter struct {
	s     *Service
	owner string
	name  string
	parts int
	size  uint64
	buf   []byte
}

func (w *blobWriter) write(ctx context.Context, piece []byte) error {
	if w.size += uint64(len(piece)); w.size > MaxBlob {
		return refuse(TooLarge, "the blob has more than %d bytes", MaxBlob)
	}
	for len(piece) > 0 {
		n := min(len(piece), partSize-len(w.buf))
		w.buf, piece = append(w.buf, piece[:n]...), piece[n:]
		if len(w.buf) < partSize {
			continue
		}
		if err := w.put(ctx, partKey(w.owner, w.name, w.parts), w.buf); err != nil {
			return err
		}
		w.parts, w.buf = w.parts+1, w.buf[:0]
	}
	return nil
}

func (w *blobWriter) put(ctx context.Context, key string, data []byte) error {
	if _, err := w.s.cfg.Blobs.Put(ctx, key, data, blob.PutOptions{}); err != nil {
		return blobFailed("put", err)
	}
	return nil
}

// blobFailed gives an error of the store a code.
func blobFailed(what string, err error) error {
	return refuse(codeOf(err), "%s a blob: %v", what, err)
}

// finish makes the blob seen. The head is the number of parts and the rest.
func (w *blobWriter) finish(ctx context.Context) (blobID, error) {
	b := blobID{name: w.name, size: w.size}
	head := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(w.buf)), uint32(w.parts))
	return b, w.put(ctx, w.owner+"."+b.String(), append(head, w.buf...))
}

// GetBlob gives a blob of a flow piece by piece; a piece may be kept. Its errors
// are *Error, but for those of send, which are given as they are.
func (s *Service) GetBlob(ctx context.Context, tenant string, ref *wire.BlobRef, send func([]byte) error) error {
	flowID, leave, err := s.beginBlob(tenant, ref.GetFlowId())
	if err != nil {
		return err
	}
	defer leave()
	b, err := parseBlobID(ref.GetBlob())
	if err != nil {
		return err
	}
	owner := ownerKey(flowID)
	head, err := s.cfg.Blobs.Get(ctx, owner+"."+b.String())
	if errors.Is(err, blob.ErrNotFound) {
		return refuse(BlobMissing, "flow %q has no blob %q", ref.FlowId, ref.Blob)
	}
	if err != nil {
		return blobFailed("get", err)
	}
	if len(head.Data) < 4 {
		return blobFailed("get", fmt.Errorf("%w: its head has %d bytes", blob.ErrCorrupt, len(head.Data)))
	}
	for i := range binary.BigEndian.Uint32(head.Data) {
		part, err := s.cfg.Blobs.Get(ctx, partKey(owner, b.name, int(i)))
		if err != nil {
			return blobFailed(fmt.Sprintf("get part %d of", i), err)
		}
		if err := sendPieces(part.Data, send); err != nil {
			return err
		}
	}
	return sendPieces(head.Data[4:], send)
}

func sendPieces(data []byte, send func([]byte) error) error {
	for len(data) > 0 {
		n := min(len(data), chunkSize)
		if err := send(data[:n:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// verifyBlobs checks that blobs that a flow is to name are there, are its own
// and fresh; those that it names already may be of any age.
func (s *Service) verifyBlobs(ctx context.Context, flowID string, refs, held []string) error {
	now := s.cfg.Env.Clock.Now()
	var look []string
	for _, id := range refs {
		b, err := parseBlobID(id)
		if err != nil {
			return err
		}
		if slices.Contains(held, id) {
			continue
		}
		if age := now.Sub(b.made); age > blobFresh {
			return refuse(BlobMissing, "blob %q is %s old and nothing has named it yet: it may be gone before this takes effect", id, age.Round(time.Second))
		}
		look = append(look, id)
	}
	return s.presentBlobs(ctx, flowID, look)
}

// verifyNamed is verifyBlobs for a flow that is there.
func (s *Service) verifyNamed(ctx context.Context, flowID string, refs []string) error {
	var held []string
	if err := s.viewed(ctx, flowID, func(f *wire.Flow) { held = blobsOfFlow(nil, f) }); err != nil {
		return err
	}
	return s.verifyBlobs(ctx, flowID, refs, held)
}

// presentBlobs checks that blobs of a flow are there.
func (s *Service) presentBlobs(ctx context.Context, flowID string, refs []string) error {
	if len(refs) == 0 {
		return nil
	}
	if s.cfg.Blobs == nil {
		return refuse(NotServed, "blobs are not served by this node")
	}
	owner := ownerKey(flowID)
	for _, id := range refs {
		if _, err := parseBlobID(id); err != nil {
			return err
		}
		key := owner + "." + id
		found, err := s.cfg.Blobs.List(ctx, key, "", 1)
		if err != nil {
			return blobFailed("look for", err)
		}
		if len(found) == 0 || found[0].Key != key {
			return refuse(BlobMissing, "flow %q has no blob %q", UserID(flowID), id)
		}
	}
	return nil
}
