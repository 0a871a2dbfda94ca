package flows

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Sweep deletes blobs that are more than an hour old and that nothing names: no
// attribute, no live step and no message of their flow, and nothing that the flow
// which carries them there is to send; those of flows that are gone, too, and
// what a put that did not finish has left. It says how many
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
		unnamed, err := g.s.unnamed(ctx, g.owner, g.old)
		if err != nil {
			return err
		}
		kept = len(g.old) - len(unnamed)
		for _, rest := range unnamed {
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

// unnamed gives those of an owner's objects whose blobs nothing names. Where a
// flow carries a blob, that one is asked before the owner: it forgets the blob
// only when the owner has it.
func (s *Service) unnamed(ctx context.Context, owner string, objects []string) ([]string, error) {
	named, err := s.named(ctx, owner)
	if err != nil {
		return nil, err
	}
	objects = without(objects, named)
	carried, err := s.carriedTo(ctx, owner, objects)
	if err != nil || len(carried) == 0 {
		return objects, err
	}
	if named, err = s.named(ctx, owner); err != nil {
		return nil, err
	}
	for _, refs := range carried {
		named = append(named, refs...)
	}
	return without(objects, named), nil
}

// carriedTo asks the flows that carry some of an owner's blobs for all that they
// carry, each once; a flow that is gone carries nothing.
func (s *Service) carriedTo(ctx context.Context, owner string, objects []string) (map[string][]string, error) {
	var by map[string][]string
	for _, rest := range objects {
		if !strings.HasSuffix(rest, fromSuffix) {
			continue
		}
		from, err := s.cfg.Blobs.Get(ctx, owner+"."+rest)
		if err != nil {
			return nil, fmt.Errorf("get who carries a blob: %w", err)
		}
		if _, asked := by[string(from.Data)]; asked {
			continue
		}
		refs, err := s.refsOf(ctx, string(from.Data), blobsCarried)
		if err != nil {
			return nil, err
		}
		if by == nil {
			by = map[string][]string{}
		}
		by[string(from.Data)] = refs
	}
	return by, nil
}

// without leaves out the objects of the blobs that are named.
func without(objects, named []string) []string {
	names := make(map[string]bool, len(named))
	for _, id := range named {
		if b, ok := parseBlobName(id); ok {
			names[b.name] = true
		}
	}
	var out []string
	for _, rest := range objects {
		if b, ok := parseBlobName(rest); !ok || !names[b.name] {
			out = append(out, rest)
		}
	}
	return out
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
	return s.refsOf(ctx, string(mark.Data), blobsOfFlow)
}

// refsOf gives what a flow names; nothing when it is gone.
func (s *Service) refsOf(ctx context.Context, flowID string, names func([]string, *wire.Flow) []string) ([]string, error) {
	var refs []string
	err := s.viewed(ctx, flowID, func(f *wire.Flow) { refs = names(nil, f) })
	var own *Error
	if errors.As(err, &own) && own.Code == core.NotFound {
		err = nil
	}
	return refs, err
}

// DropBlob deletes a blob that nothing names: one that was made for a call that is
// over. One that is gone already is no error. Its errors are *Error.
func (s *Service) DropBlob(ctx context.Context, tenant string, ref *wire.BlobRef) error {
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
	s.blobs.enter(owner)
	defer s.blobs.leave(owner)
	found, err := s.cfg.Blobs.List(ctx, owner+"."+b.name, "", maxParts)
	if err != nil || len(found) == 0 {
		return dropFailed(err)
	}
	objects := make([]string, len(found))
	for i, info := range found {
		objects[i] = strings.TrimPrefix(info.Key, owner+".")
	}
	unnamed, err := s.unnamed(ctx, owner, objects)
	switch {
	case err != nil:
		return dropFailed(err)
	case len(unnamed) < len(objects):
		return refuse(Conflict, "blob %q is named by flow %q, or is on its way there", ref.Blob, ref.FlowId)
	}
	for _, rest := range unnamed {
		if err := s.cfg.Blobs.Delete(ctx, owner+"."+rest, blob.DeleteOptions{}); err != nil {
			return dropFailed(err)
		}
	}
	return nil
}

// maxParts bounds the objects of one blob: its parts, the rest, and who carries it.
const maxParts = MaxBlob/partSize + 2

func dropFailed(err error) error {
	var own *Error
	if err == nil || errors.As(err, &own) {
		return err
	}
	return blobFailed("drop", err)
}
