// Package blob stores objects by key, with conditional writes: the journal,
// snapshots, manifests and leases are built on it. Implementations are in
// blob/mem, blob/fs and blob/s3; blob/blobtest holds the conformance suite that
// all of them pass. Prove holds a store that runs elsewhere to its promises.
package blob

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Bounds that hold for every store.
const (
	// MaxKey is the longest key in bytes, MaxElement the longest part of one
	// between slashes.
	MaxKey     = 512
	MaxElement = 200
	// MaxObjectSize is the largest object in bytes.
	MaxObjectSize = 256 << 20
	// MaxList is the most keys one List returns.
	MaxList = 1000
)

// Errors of every store, to be matched with errors.Is.
var (
	// ErrNotFound: there is no object under the key.
	ErrNotFound = errors.New("blob: not found")
	// ErrPrecondition: the condition did not hold; nothing was changed. It is
	// final, the store has spoken.
	ErrPrecondition = errors.New("blob: precondition failed")
	// ErrAmbiguous: the write may have been done, may not, or may still be
	// done. Only reading tells (or writing again under a condition).
	ErrAmbiguous = errors.New("blob: outcome unknown")
	// ErrUnavailable: not done, and worth trying again later.
	ErrUnavailable = errors.New("blob: store unavailable")
	// ErrDenied: refused, and trying again does not help before somebody changes
	// credentials, rights, bucket or settings; nothing was changed.
	ErrDenied = errors.New("blob: refused by the store")
	// ErrInvalid: the arguments break a bound or a rule; nothing was changed.
	ErrInvalid = errors.New("blob: invalid argument")
	// ErrUnfit: the store does not keep a promise of Store. See Prove.
	ErrUnfit = errors.New("blob: unfit store")
	// ErrCorrupt: the object is there but not as it was written.
	ErrCorrupt = errors.New("blob: corrupt object")
)

// Token stands for an object's content, as an ETag does. It is opaque and
// compares with ==. Equal contents may have equal tokens: a writer that must
// tell its own write from another's equal one puts a nonce into the content.
type Token string

// Object is what Get returns. The caller owns Data.
type Object struct {
	Data  []byte
	Token Token
}

// Info is one object in a List.
type Info struct {
	Key  string
	Size int64 // bytes
}

// PutOptions are the condition of a Put: at most one may be set.
type PutOptions struct {
	IfNoneMatch bool  // only if the key has no object
	IfMatch     Token // if not empty, only if the key's object has this token
}

// DeleteOptions are the condition of a Delete.
type DeleteOptions struct {
	IfMatch Token // if not empty, only if the key's object has this token
}

// Store is a map from keys to objects. All methods are safe for concurrent
// use.
//
// Consistency, which every implementation promises:
//   - Atomic: an object is seen whole, old or new, never a mixture, also after
//     a crash.
//   - Durable: a nil error of Put or Delete means the change survives a crash.
//   - Strong: an operation that starts after a Put or Delete has returned nil
//     sees it, or something later; List as well as Get.
//   - Exact conditions: condition and change are one step. Of Puts racing with
//     IfNoneMatch on one key, or with IfMatch on one token, exactly one wins if
//     each writes a content of its own; the others get ErrPrecondition.
//   - Honest failure: an error of Put or Delete that does not match
//     ErrAmbiguous means that nothing changed. That holds for a context, too:
//     done before the call, nothing changes; ended during it, ErrAmbiguous.
type Store interface {
	// Get returns the object under key, or ErrNotFound.
	Get(ctx context.Context, key string) (Object, error)
	// Put writes data (at most MaxObjectSize bytes, not kept after the call)
	// under key and returns its token.
	Put(ctx context.Context, key string, data []byte, opts PutOptions) (Token, error)
	// List returns, in byte order, up to limit (1 to MaxList) keys that begin
	// with prefix and are greater than after ("" = from the start). The prefix
	// is a string, not a folder: "a/b" also finds "a/bc". Fewer than limit
	// means that there are no more.
	List(ctx context.Context, prefix, after string, limit int) ([]Info, error)
	// Delete removes the object under key. Removing what is not there is no
	// error, unless a condition was set (ErrPrecondition).
	Delete(ctx context.Context, key string, opts DeleteOptions) error
}

// CheckKey says whether key may name an object: elements of 1 to MaxElement
// characters A–Z a–z 0–9 . _ - = + @, joined by single slashes, none of them
// "." or "..", MaxKey bytes in all. The error matches ErrInvalid.
func CheckKey(key string) error {
	if len(key) > MaxKey {
		return fmt.Errorf("%w: key of %d bytes, at most %d", ErrInvalid, len(key), MaxKey)
	}
	for e := range strings.SplitSeq(key, "/") {
		switch {
		case e == "":
			return fmt.Errorf("%w: key %q has an empty element", ErrInvalid, key)
		case e == "." || e == "..":
			return fmt.Errorf("%w: key %q has an element %q", ErrInvalid, key, e)
		case len(e) > MaxElement:
			return fmt.Errorf("%w: key has an element of %d bytes, at most %d", ErrInvalid, len(e), MaxElement)
		}
	}
	return checkCharacters("key", key)
}

// CheckPut is the check of Put's arguments that all stores share.
func CheckPut(key string, data []byte, opts PutOptions) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if len(data) > MaxObjectSize {
		return fmt.Errorf("%w: object of %d bytes, at most %d", ErrInvalid, len(data), MaxObjectSize)
	}
	if opts.IfNoneMatch && opts.IfMatch != "" {
		return fmt.Errorf("%w: IfNoneMatch together with IfMatch", ErrInvalid)
	}
	return nil
}

// CheckList is the check of List's arguments that all stores share.
func CheckList(prefix, after string, limit int) error {
	if limit < 1 || limit > MaxList {
		return fmt.Errorf("%w: list limit %d, want 1 to %d", ErrInvalid, limit, MaxList)
	}
	if len(prefix) > MaxKey || len(after) > MaxKey {
		return fmt.Errorf("%w: list prefix or start over %d bytes", ErrInvalid, MaxKey)
	}
	if err := checkCharacters("prefix", prefix); err != nil {
		return err
	}
	return checkCharacters("start", after)
}

func checkCharacters(what, s string) error {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && !strings.ContainsRune("/._-=+@", rune(c)) {
			return fmt.Errorf("%w: %s %q has the character %q", ErrInvalid, what, s, c)
		}
	}
	return nil
}
