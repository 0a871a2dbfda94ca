package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// layoutKey holds what is fixed for the life of a data directory.
const layoutKey = "layout.json"

// layoutFormat is the newest layout this program writes and reads.
const layoutFormat = 1

type layout struct {
	Format     int `json:"format"`
	Partitions int `json:"partitions"`
}

// checkLayout writes the layout of a new data directory and refuses one that
// does not fit: sessions would be looked for where they are not.
func checkLayout(ctx context.Context, store blob.Store, partitions int) error {
	want := layout{Format: layoutFormat, Partitions: partitions}
	raw, err := json.Marshal(want)
	if err != nil {
		return fmt.Errorf("encode layout: %w", err)
	}
	_, err = store.Put(ctx, layoutKey, raw, blob.PutOptions{IfNoneMatch: true})
	if err == nil || !errors.Is(err, blob.ErrPrecondition) {
		return err
	}
	obj, err := store.Get(ctx, layoutKey)
	if err != nil {
		return fmt.Errorf("read %s: %w", layoutKey, err)
	}
	var have layout
	if err := json.Unmarshal(obj.Data, &have); err != nil {
		return fmt.Errorf("%s is damaged: %w", layoutKey, err)
	}
	switch {
	case have.Format > layoutFormat:
		return fmt.Errorf("the data directory has layout %d, this program reads up to %d: use a newer one", have.Format, layoutFormat)
	case have.Partitions != partitions:
		return fmt.Errorf("the data directory has %d partitions, kernel.partitions says %d: the count is fixed when a directory is made; set it back to %d or use a new directory",
			have.Partitions, partitions, have.Partitions)
	}
	return nil
}

// makeDir makes dir and syncs the directories that hold its name and those of
// its parents that were missing: a directory whose name is not synced is lost
// in a power failure, with all that was synced in it.
func makeDir(fsys env.FS, dir string) error {
	var holders []string // the deepest first
	for d := dir; ; {
		parent := fsys.PathDir(d)
		if parent == d {
			break
		}
		holders = append(holders, parent)
		if _, err := fsys.Stat(parent); err == nil {
			break
		}
		d = parent
	}
	if err := fsys.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	for _, h := range holders {
		if err := syncDir(fsys, h); err != nil && !errors.Is(err, fs.ErrPermission) { // not ours to read: whoever made it saw to it
			return fmt.Errorf("sync %s: %w", h, err)
		}
	}
	return nil
}

func syncDir(fsys env.FS, dir string) error {
	d, err := fsys.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

type owner struct {
	Epoch uint64 `json:"epoch"`
}

func ownerKey(id int) string { return fmt.Sprintf("p%03d/owner.json", id) }

// takeOwnership begins a new epoch of a partition, by compare-and-swap: frames
// and attempts of the former owner are told apart from this one's for ever.
func takeOwnership(ctx context.Context, store blob.Store, id int) (uint64, error) {
	key := ownerKey(id)
	var o owner
	put := blob.PutOptions{IfNoneMatch: true}
	obj, err := store.Get(ctx, key)
	switch {
	case err == nil:
		if err := json.Unmarshal(obj.Data, &o); err != nil {
			return 0, fmt.Errorf("%s is damaged: %w", key, err)
		}
		put = blob.PutOptions{IfMatch: obj.Token}
	case !errors.Is(err, blob.ErrNotFound):
		return 0, fmt.Errorf("read %s: %w", key, err)
	}
	o.Epoch++
	raw, err := json.Marshal(o)
	if err != nil {
		return 0, fmt.Errorf("encode owner: %w", err)
	}
	if _, err := store.Put(ctx, key, raw, put); err != nil {
		return 0, fmt.Errorf("take ownership of partition %d: %w", id, err)
	}
	return o.Epoch, nil
}
