// Package mem is a blob store in memory, for tests, simulations and servers
// that keep nothing.
package mem

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/perdure-dev/perdure/internal/blob"
)

// Options of a store. The zero value is usable.
type Options struct {
	// Immutable says which keys are written once: another content under such a
	// key, also after a Delete, is a bug of the caller and panics. nil: none.
	// It keeps the hash of each such object for the store's life.
	Immutable func(key string) bool
}

// Store is a blob.Store. Its memory grows with what is put: the callers' own
// bounds hold. It panics when it finds its own contract broken.
type Store struct {
	opts Options

	mu      sync.RWMutex // guards all below
	keys    []string     // sorted
	objects map[string]object
	written map[string]blob.Token // of immutable keys, deleted ones too
	writes  uint64
}

type object struct {
	data  []byte
	token blob.Token
}

var _ blob.Store = (*Store)(nil)

// New makes an empty store.
func New(opts Options) *Store {
	return &Store{opts: opts, objects: map[string]object{}, written: map[string]blob.Token{}}
}

// Get implements blob.Store.
func (s *Store) Get(ctx context.Context, key string) (blob.Object, error) {
	if err := start(ctx, blob.CheckKey(key)); err != nil {
		return blob.Object{}, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	o, ok := s.objects[key]
	if !ok {
		return blob.Object{}, fmt.Errorf("%w: %s", blob.ErrNotFound, key)
	}
	return blob.Object{Data: bytes.Clone(o.data), Token: o.token}, nil
}

// Put implements blob.Store. Its tokens count the writes, so each is new.
func (s *Store) Put(ctx context.Context, key string, data []byte, opts blob.PutOptions) (blob.Token, error) {
	if err := start(ctx, blob.CheckPut(key, data, opts)); err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old, exists := s.objects[key]
	if (opts.IfNoneMatch && exists) || (opts.IfMatch != "" && old.token != opts.IfMatch) {
		return "", fmt.Errorf("%w: put %s", blob.ErrPrecondition, key)
	}
	s.assertWrittenOnce(key, data)
	if !exists {
		i, found := slices.BinarySearch(s.keys, key)
		if found {
			panic("blob/mem: key list and objects disagree on " + key)
		}
		s.keys = slices.Insert(s.keys, i, key)
	}
	s.writes++
	token := blob.Token(fmt.Sprintf("m%d", s.writes))
	s.objects[key] = object{data: bytes.Clone(data), token: token}
	return token, nil
}

// assertWrittenOnce holds the caller to Options.Immutable. s.mu is held.
func (s *Store) assertWrittenOnce(key string, data []byte) {
	if s.opts.Immutable == nil || !s.opts.Immutable(key) {
		return
	}
	hash := blob.ContentToken(data)
	if before, ok := s.written[key]; ok && before != hash {
		panic("blob/mem: immutable key " + key + " was written with another content")
	}
	s.written[key] = hash
}

// List implements blob.Store.
func (s *Store) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if err := start(ctx, blob.CheckList(prefix, after, limit)); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if len(s.keys) != len(s.objects) {
		panic("blob/mem: key list and objects disagree")
	}
	i, _ := slices.BinarySearch(s.keys, max(prefix, after))
	var out []blob.Info
	for ; i < len(s.keys) && len(out) < limit && strings.HasPrefix(s.keys[i], prefix); i++ {
		if key := s.keys[i]; key > after {
			out = append(out, blob.Info{Key: key, Size: int64(len(s.objects[key].data))})
		}
	}
	return out, nil
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string, opts blob.DeleteOptions) error {
	if err := start(ctx, blob.CheckKey(key)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o, exists := s.objects[key]
	if opts.IfMatch != "" && o.token != opts.IfMatch {
		return fmt.Errorf("%w: delete %s", blob.ErrPrecondition, key)
	}
	if !exists {
		return nil
	}
	i, found := slices.BinarySearch(s.keys, key)
	if !found {
		panic("blob/mem: key list and objects disagree on " + key)
	}
	s.keys = slices.Delete(s.keys, i, i+1)
	delete(s.objects, key)
	return nil
}

// start is the common entry: bad arguments first, then the context.
func start(ctx context.Context, invalid error) error {
	if invalid != nil {
		return invalid
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("blob: not started: %w", err)
	}
	return nil
}
