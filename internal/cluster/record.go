// Package cluster decides, with nothing but an object store, which process may
// work: owner manifests say who may write a partition's log, leases say which
// processes are alive, and an election makes one of them the active one. Each
// is a small object that is changed by compare-and-swap only.
//
// Holder, Sight and Candidate decide, without goroutine, clock or I/O; Lease and
// Term are the shells around them that production runs.
package cluster

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// Bounds of what is in the objects.
const (
	// MaxRecord is the size of the largest object of this package in bytes.
	MaxRecord = 8 << 10
	// MaxNodeID is the length of the longest node ID in bytes.
	MaxNodeID = 64
	// MaxText is the length of the longest address or version in bytes.
	MaxText = 255
	// MaxWindow is the most batches an owner may have in flight.
	MaxWindow = 1 << 16

	recordFormat = 1 // the newest that this program writes and reads
	nonceBytes   = 8
)

// Errors of this package, to be matched with errors.Is.
var (
	// ErrFenced: the partition has another owner, or had one meanwhile. It is
	// final, and matches journal.ErrStale.
	ErrFenced = fmt.Errorf("cluster: another owner has taken the partition: %w", journal.ErrStale)
	// ErrReleased: this owner, lease or term has been given up here.
	ErrReleased = errors.New("cluster: already released")
	// ErrLost: the lease has ended and cannot come back; only a new one helps.
	ErrLost = errors.New("cluster: the lease of this node is lost")
	// ErrTooNew: an intact object of a format that this program does not read.
	ErrTooNew = errors.New("cluster: written by a newer version; use a newer perdure")
	// ErrDamaged: the object is not what any version has written.
	ErrDamaged = errors.New("cluster: damaged object")
	// ErrInvalid: an argument breaks a bound or a rule; nothing was changed.
	ErrInvalid = errors.New("cluster: invalid argument")
)

// decodeRecord reads one JSON object of at most MaxRecord bytes into v, of which
// every field must be known. It returns the format that the object says it has,
// 0 if it says none; of a newer one the error is ErrTooNew.
func decodeRecord(key string, data []byte, v any) (int, error) {
	if len(data) > MaxRecord {
		return 0, fmt.Errorf("%w: %s has %d bytes, at most %d: restore it from a backup", ErrDamaged, key, len(data), MaxRecord)
	}
	var head struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return 0, damaged(key, err)
	}
	if head.Format > recordFormat {
		return 0, fmt.Errorf("%w: %s has format %d, this program reads up to %d", ErrTooNew, key, head.Format, recordFormat)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return 0, damaged(key, err)
	}
	if head.Format < 0 {
		return 0, damaged(key, fmt.Errorf("format %d", head.Format))
	}
	return head.Format, nil
}

func damaged(key string, err error) error {
	return fmt.Errorf("%w: %s: %w: restore it from a backup", ErrDamaged, key, err)
}

// encodeRecord is the inverse for values that were checked.
func encodeRecord(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("cluster: encode %T: %v", v, err)) // strings, numbers and booleans always encode
	}
	return raw
}

// newNonce is what tells one life of a writer from every other.
func newNonce(r env.Rand) string { return fmt.Sprintf("%016x", r.Uint64()) }

func checkNonce(nonce string) error {
	if raw, err := hex.DecodeString(nonce); err != nil || len(raw) != nonceBytes || strings.ToLower(nonce) != nonce {
		return fmt.Errorf("nonce %q, want %d lower-case hex digits", nonce, 2*nonceBytes)
	}
	return nil
}

func checkNode(id string) error {
	if id == "" || len(id) > MaxNodeID {
		return fmt.Errorf("node ID of %d bytes, want 1 to %d", len(id), MaxNodeID)
	}
	for i, c := range []byte(id) {
		alnum := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '_' && c != '.' && c != '-') {
			return fmt.Errorf("node ID %q, want a-z and 0-9 first, then also _ . -", id)
		}
	}
	return nil
}

func checkText(what, s string) error {
	if len(s) > MaxText {
		return fmt.Errorf("%s of %d bytes, at most %d", what, len(s), MaxText)
	}
	for _, c := range []byte(s) {
		if c <= ' ' || c > '~' {
			return fmt.Errorf("%s %q, want printable ASCII without spaces", what, s)
		}
	}
	return nil
}

// settles is whether the store may answer otherwise if it is asked again.
func settles(err error) bool {
	return errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrAmbiguous)
}

// pause waits d on clock, or until ctx ends. Without a clock it does not wait.
func pause(ctx context.Context, clock env.Clock, d time.Duration) error {
	if clock == nil || d <= 0 {
		return ctx.Err()
	}
	over := make(chan struct{})
	timer := clock.AfterFunc(d, func() { close(over) })
	defer timer.Stop()
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
