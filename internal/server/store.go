package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"github.com/perdure-dev/perdure/internal/backup"
	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
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
func (s *Server) checkLayout(ctx context.Context) error {
	store, partitions := s.store, s.cfg.Kernel.Partitions
	want := layout{Format: layoutFormat, Partitions: partitions}
	raw, err := json.Marshal(want)
	if err != nil {
		return fmt.Errorf("encode layout: %w", err)
	}
	err = s.insist(ctx, func() error {
		_, err := store.Put(ctx, layoutKey, raw, blob.PutOptions{IfNoneMatch: true})
		return err
	})
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
	case have.Format == backup.Unfinished:
		return errors.New("the store is a copy that was not finished: empty it and copy again")
	case have.Format > layoutFormat:
		return fmt.Errorf("the data directory has layout %d, this program reads up to %d: use a newer one", have.Format, layoutFormat)
	case have.Partitions != partitions:
		return fmt.Errorf("the data directory has %d partitions, kernel.partitions says %d: the count is fixed when a directory is made; set it back to %d or use a new directory",
			have.Partitions, partitions, have.Partitions)
	}
	return nil
}

// insistTries and insistEvery bound how often a request is made again that the
// store did not take.
const (
	insistTries = 20
	insistEvery = 250 * time.Millisecond
)

// insist makes a request again while the store does not answer it.
func (s *Server) insist(ctx context.Context, request func() error) error {
	for try := 1; ; try++ {
		err := request()
		if !errors.Is(err, blob.ErrUnavailable) && !errors.Is(err, blob.ErrAmbiguous) || try == insistTries || !s.wait(ctx, insistEvery) {
			return err
		}
	}
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

// claim is what this process says of itself in the partitions' manifests.
func (s *Server) claim() cluster.Claim {
	c := cluster.Claim{Node: s.node, Address: s.address(), Window: 1, Rand: s.env.Rand, Clock: s.env.Clock}
	if s.objects != nil {
		c.Window, c.Valid = s.cfg.Journal.MaxInFlight, s.objects.valid
	}
	return c
}

// address is where others reach this process.
func (s *Server) address() string {
	switch {
	case s.cfg.Cluster.Advertise != "":
		return s.cfg.Cluster.Advertise
	case s.site.Listener != nil:
		return s.site.Listener.Addr().String()
	}
	return s.cfg.Listen
}

// checkAddress refuses an address that the other processes could not use.
func (s *Server) checkAddress() error {
	host, _, err := net.SplitHostPort(s.address())
	if ip, perr := netip.ParseAddr(host); err != nil || host == "" || perr == nil && ip.IsUnspecified() {
		return fmt.Errorf("the other processes of the store cannot reach this one at %q: say with --advertise HOST:PORT where they can", s.address())
	}
	return nil
}

func (s *Server) nodeID() (string, error) {
	if s.cfg.Cluster.NodeID != "" {
		return s.cfg.Cluster.NodeID, nil
	}
	return cluster.NodeID(s.env.FS, s.dir, s.env.Rand)
}
