package flows

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Sweep deletes blobs that are more than an hour old and that nothing of their
// flow names: no attribute and no input of a live step; those of flows that are
// gone, too, and what a put that did not finish has left. It says how many
// objects it deleted. The log may name blobs that are gone. Run it now and then,
// one at a time, while the partitions run.
func (s *Service) Sweep(ctx context.Context) (deleted int, err error) {
	if s.cfg.Blobs == nil {
		return 0, nil
	}
	g := sweepGroup{s: s}
	after := ""
	for {
		page, err := s.cfg.Blobs.List(ctx, blobPrefix, after, blob.MaxList)
		if err != nil {
			return g.deleted, fmt.Errorf("list blobs: %w", err)
		}
		for _, info := range page {
			if err := g.add(ctx, info.Key); err != nil {
				return g.deleted, err
			}
			after = info.Key
		}
		if len(page) < blob.MaxList {
			return g.deleted, g.finish(ctx)
		}
	}
}

// sweepGroup is the objects of one flow; they come one after the other. Its
// size is bounded by what one flow has put within the safety age and what it
// names: older ones go with each group.
type sweepGroup struct {
	s       *Service
	owner   string // key without what follows the hash
	mark    bool   // the owner's ID is there
	young   bool   // an object is too young to be judged
	old     []string
	deleted int
}

func (g *sweepGroup) add(ctx context.Context, key string) error {
	owner, rest, ok := strings.Cut(key, ".")
	if !ok {
		return nil // not ours
	}
	if owner != g.owner {
		if err := g.finish(ctx); err != nil {
			return err
		}
		*g = sweepGroup{s: g.s, owner: owner, deleted: g.deleted}
	}
	b, named := parseBlobName(rest)
	switch {
	case "."+rest == ownerSuffix:
		g.mark = true
	case !named:
	case g.s.cfg.Env.Clock.Now().Sub(b.made) > blobSafety:
		g.old = append(g.old, rest)
	default:
		g.young = true
	}
	return nil
}

// finish deletes what nothing names. Without its mark a group is left alone:
// whose it is cannot be known.
func (g *sweepGroup) finish(ctx context.Context) error {
	if !g.mark {
		return nil
	}
	var kept int
	if len(g.old) > 0 {
		named, err := g.s.named(ctx, g.owner)
		if err != nil {
			return err
		}
		for _, rest := range g.old {
			if slices.ContainsFunc(named, func(id string) bool { return sameBlob(id, rest) }) {
				kept++
				continue
			}
			if err := g.remove(ctx, g.owner+"."+rest); err != nil {
				return err
			}
		}
	}
	if kept > 0 || g.young {
		return nil
	}
	return g.removeMark(ctx)
}

// sameBlob reports whether an object is of the blob.
func sameBlob(id, object string) bool {
	a, okA := parseBlobName(id)
	b, okB := parseBlobName(object)
	return okA && okB && a.name == b.name
}

func (g *sweepGroup) remove(ctx context.Context, key string) error {
	if err := g.s.cfg.Blobs.Delete(ctx, key, blob.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete a blob: %w", err)
	}
	g.deleted++
	return nil
}

// removeMark deletes the mark of an owner without blobs, unless one is being put.
func (g *sweepGroup) removeMark(ctx context.Context) error {
	g.s.blobs.mu.Lock()
	defer g.s.blobs.mu.Unlock()
	if g.s.blobs.active[g.owner] > 0 {
		return nil
	}
	left, err := g.s.cfg.Blobs.List(ctx, g.owner+".", "", 1)
	if err != nil {
		return fmt.Errorf("list blobs: %w", err)
	}
	if len(left) > 0 && left[0].Key != g.owner+ownerSuffix {
		return nil // put meanwhile; the mark comes last in the order of keys
	}
	return g.remove(ctx, g.owner+ownerSuffix)
}

// named gives the blobs that the owner's flow names; none when it is gone.
func (s *Service) named(ctx context.Context, owner string) ([]string, error) {
	mark, err := s.cfg.Blobs.Get(ctx, owner+ownerSuffix)
	if err != nil {
		return nil, fmt.Errorf("get the owner of blobs: %w", err)
	}
	var refs []string
	err = s.viewed(ctx, string(mark.Data), func(f *wire.Flow) { refs = blobsOfFlow(nil, f) })
	var own *Error
	if errors.As(err, &own) && own.Code == core.NotFound {
		err = nil
	}
	return refs, err
}
