package fs

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cockroachdb/errors/oserror"

	"github.com/perdure-dev/perdure/internal/blob"
)

// List implements blob.Store. It walks only directories that can hold a key in
// the range; its cost is theirs.
func (s *Store) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if err := start(ctx, blob.CheckList(prefix, after, limit)); err != nil {
		return nil, err
	}
	w := walk{store: s, ctx: ctx, prefix: prefix, after: after, limit: limit}
	if err := w.dir(s.fs.PathJoin(s.root, objectsDir), ""); err != nil {
		return nil, fmt.Errorf("blob: list %s: %w", prefix, err)
	}
	return w.out, nil
}

type walk struct {
	store         *Store
	ctx           context.Context
	prefix, after string
	limit         int
	out           []blob.Info
}

// dir visits the directory whose keys begin with base, in key order.
func (w *walk) dir(path, base string) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	names, err := w.store.fs.List(path)
	if err != nil {
		return err
	}
	// As parts of keys ("b" an object, "a/" a directory) they sort as the keys
	// they begin do.
	parts := names[:0]
	for _, name := range names {
		if e, ok := strings.CutSuffix(name, fileSuffix); ok {
			parts = append(parts, e)
		} else if e, ok := strings.CutSuffix(name, dirSuffix); ok {
			parts = append(parts, e+"/")
		}
	}
	slices.Sort(parts)
	for _, part := range parts {
		if len(w.out) == w.limit {
			return nil
		}
		key := base + part
		if element, isDir := strings.CutSuffix(part, "/"); isDir {
			if w.mayHold(key) {
				err = w.dir(w.store.fs.PathJoin(path, element+dirSuffix), key)
			}
		} else if strings.HasPrefix(key, w.prefix) && key > w.after {
			err = w.object(w.store.fs.PathJoin(path, part+fileSuffix), key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mayHold says whether keys that begin with base can be in the range.
func (w *walk) mayHold(base string) bool {
	if !strings.HasPrefix(base, w.prefix) && !strings.HasPrefix(w.prefix, base) {
		return false
	}
	return base > w.after || strings.HasPrefix(w.after, base)
}

func (w *walk) object(path, key string) error {
	mu := w.store.lock(key) // not before the name is durable
	mu.RLock()
	fi, err := w.store.fs.Stat(path)
	mu.RUnlock()
	if oserror.IsNotExist(err) {
		return nil // deleted since
	}
	if err != nil {
		return err
	}
	w.out = append(w.out, blob.Info{Key: key, Size: fi.Size() - headerSize})
	return nil
}
