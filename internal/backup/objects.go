package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/blob"
)

// progress counts what was written.
type progress struct {
	mu sync.Mutex // guards what is below, and is held while progress is told
	Progress
}

func (c *copier) tell(n int) {
	c.done.mu.Lock()
	defer c.done.mu.Unlock()
	c.done.Objects++
	c.done.Bytes += int64(n)
	if c.o.Progress != nil {
		c.o.Progress(c.done.Progress)
	}
}

// put writes an object of the target and reads it back. That it is there already
// with the same content, from a try before, is fine.
func (c *copier) put(ctx context.Context, key string, data []byte) error {
	var err error
	for range putTries {
		_, err = c.to.Put(ctx, key, data, blob.PutOptions{IfNoneMatch: true})
		if !errors.Is(err, blob.ErrAmbiguous) || ctx.Err() != nil {
			break
		}
	}
	if err != nil && !errors.Is(err, blob.ErrPrecondition) {
		return err
	}
	before := err != nil
	if err := c.compare(ctx, key, data); err != nil {
		return err
	}
	if !before {
		c.tell(len(data))
	}
	return nil
}

// replace writes over an object of the target whose token is known.
func (c *copier) replace(ctx context.Context, key string, data []byte, token blob.Token) error {
	var err error
	for range putTries {
		_, err = c.to.Put(ctx, key, data, blob.PutOptions{IfMatch: token})
		if !errors.Is(err, blob.ErrAmbiguous) || ctx.Err() != nil {
			break
		}
	}
	if err != nil && !errors.Is(err, blob.ErrPrecondition) {
		return err
	}
	if err := c.compare(ctx, key, data); err != nil {
		return err
	}
	c.tell(len(data))
	return nil
}

func (c *copier) compare(ctx context.Context, key string, data []byte) error {
	o, err := c.to.Get(ctx, key)
	if err != nil {
		return fmt.Errorf("read back from the target: %w", err)
	}
	if !bytes.Equal(o.Data, data) {
		return fmt.Errorf("read back %s from the target: %d bytes differ from the %d written; is there another writer?", key, len(o.Data), len(data))
	}
	return nil
}

const valuesPrefix = "blobs/"

// values copies the large values there are. What the logs that are copied later
// name is here, or in rest: a value is put before the entry that names it, and
// is deleted long after the last one.
func (c *copier) values(ctx context.Context) error {
	return c.copyKeys(ctx, valuesPrefix, func(string) bool { return true })
}

// rest copies what is neither a partition's nor of a running server, values that
// have come since included.
func (c *copier) rest(ctx context.Context) error {
	return c.copyKeys(ctx, "", func(key string) bool {
		folder, _, inside := strings.Cut(key, "/")
		passing := folder == "nodes" || folder == "cluster" || folder == "proof" || isPartition(folder)
		return key != layoutKey && !(inside && passing)
	})
}

func isPartition(folder string) bool {
	return len(folder) == 4 && folder[0] == 'p' && strings.Trim(folder[1:], "0123456789") == ""
}

// copyKeys copies the objects whose keys begin with prefix, that want takes, and
// that the target does not have.
func (c *copier) copyKeys(ctx context.Context, prefix string, want func(key string) bool) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(copiesAtOnce)
	source, target := lister{store: c.from, prefix: prefix}, lister{store: c.to, prefix: prefix}
	err := func() error {
		there, err := target.next(gctx)
		for err == nil {
			var key string
			if key, err = source.next(gctx); err != nil || key == "" {
				return err
			}
			for err == nil && there != "" && there < key {
				there, err = target.next(gctx)
			}
			if err == nil && key != there && want(key) {
				g.Go(func() error { return c.copyObject(gctx, key) })
			}
		}
		return err
	}()
	if werr := g.Wait(); werr != nil {
		return werr
	}
	return err
}

// copyObject copies one object; what was deleted meanwhile nobody names.
func (c *copier) copyObject(ctx context.Context, key string) error {
	o, err := c.from.Get(ctx, key)
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return nil
	case errors.Is(err, blob.ErrCorrupt):
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	case err != nil:
		return err
	}
	return c.put(ctx, key, o.Data)
}

// lister gives keys one after another. Partitions are passed over: their logs
// are long.
type lister struct {
	store  blob.Store
	prefix string
	infos  []blob.Info
	after  string
	end    bool
}

// next gives "" at the end.
func (l *lister) next(ctx context.Context) (string, error) {
	for {
		if len(l.infos) == 0 {
			if l.end {
				return "", nil
			}
			var err error
			if l.infos, err = l.store.List(ctx, l.prefix, l.after, blob.MaxList); err != nil {
				return "", err
			}
			if l.end = len(l.infos) < blob.MaxList; len(l.infos) == 0 {
				return "", nil
			}
		}
		key := l.infos[0].Key
		l.infos, l.after = l.infos[1:], key
		if folder, _, inside := strings.Cut(key, "/"); inside && isPartition(folder) {
			l.infos, l.after, l.end = nil, folder+"0", false // the character behind the slash
			continue
		}
		return key, nil
	}
}
