package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"sync"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	keepSnapshots = 2
	putTries      = 3 // of a write whose outcome is unknown
	maxSnapshots  = 1 << 16
)

// snapshotter is what snapshots remember from one to the next.
type snapshotter struct {
	mu   sync.Mutex        // one snapshot at a time
	sums map[string]string // checksums of table files by name; they never change
}

func checkpointDir(dir string) string { return dir + ".checkpoint" }

// Snapshot writes the tables to the store below prefix: only table files that
// are not there yet, then a manifest. What it wrote was read back and compared
// when it returns, so the journal may be trimmed up to the manifest's
// AppliedLSN. Of older snapshots one is kept.
//
// Only the owner of the partition may write below prefix. Close waits for a
// running snapshot: end its context first. An error leaves older snapshots as
// they were; trying again is safe.
func (d *DB) Snapshot(ctx context.Context, store blob.Store, prefix string) (Manifest, error) {
	if !d.gate.enter() {
		return Manifest{}, ErrClosed
	}
	defer d.gate.leave()
	d.snap.mu.Lock()
	defer d.snap.mu.Unlock()
	m, err := d.snapshot(ctx, snapshots{store, prefix})
	if err != nil {
		return Manifest{}, fmt.Errorf("state: snapshot of tables in %q: %w", d.dir, err)
	}
	return m, nil
}

func (d *DB) snapshot(ctx context.Context, to snapshots) (Manifest, error) {
	if err := d.Flush(); err != nil {
		return Manifest{}, err
	}
	lsn := d.FlushedLSN() // before the checkpoint: it has at least these rows
	cp := checkpointDir(d.dir)
	if err := d.o.FS.RemoveAll(cp); err != nil {
		return Manifest{}, err
	}
	defer d.o.FS.RemoveAll(cp) // what is left goes with the next one
	if err := d.db.Checkpoint(cp); err != nil {
		return Manifest{}, err
	}
	older, err := to.sequences(ctx)
	if err != nil {
		return Manifest{}, err
	}
	m := Manifest{Format: snapshotFormat, Sequence: 1, AppliedLSN: lsn}
	if len(older) > 0 {
		m.Sequence = older[len(older)-1] + 1
	}
	if m.Files, err = d.upload(ctx, to, cp); err != nil {
		return Manifest{}, err
	}
	data, err := m.encode()
	if err != nil {
		return Manifest{}, err
	}
	if err := to.putOnce(ctx, to.manifestKey(m.Sequence), data); err != nil {
		return Manifest{}, err
	}
	if err := to.prune(ctx, append(older, m.Sequence)); err != nil {
		d.log(Error, fmt.Sprintf("old snapshots of tables in %q are left for the next time: %v", d.dir, err))
	}
	return m, nil
}

// upload puts the files of a checkpoint into the store and describes them.
func (d *DB) upload(ctx context.Context, to snapshots, cp string) ([]ManifestFile, error) {
	there, err := to.tables(ctx)
	if err != nil {
		return nil, err
	}
	names, err := d.o.FS.List(cp)
	if err != nil {
		return nil, err
	}
	if len(names) > maxSnapshotFiles {
		return nil, fmt.Errorf("%d files, at most %d", len(names), maxSnapshotFiles)
	}
	sums := map[string]string{}
	var files []ManifestFile
	for _, name := range names {
		f, err := d.uploadFile(ctx, to, d.o.FS.PathJoin(cp, name), there)
		if err != nil {
			return nil, err
		}
		if f.Name = name; isTable(name) {
			sums[name] = f.SHA256
		}
		files = append(files, f)
	}
	d.snap.sums = sums
	return files, nil
}

func (d *DB) uploadFile(ctx context.Context, to snapshots, file string, there map[string]int64) (ManifestFile, error) {
	name := d.o.FS.PathBase(file)
	info, err := d.o.FS.Stat(file)
	if err != nil {
		return ManifestFile{}, err
	}
	f := ManifestFile{Size: info.Size(), SHA256: d.snap.sums[name]}
	if f.Size > blob.MaxObjectSize {
		return ManifestFile{}, fmt.Errorf("%s has %d bytes, at most %d", name, f.Size, blob.MaxObjectSize)
	}
	has := func() bool { size, ok := there[f.SHA256]; return ok && size == f.Size }
	if f.SHA256 != "" && has() {
		return f, nil
	}
	data, err := readFile(d.o.FS, file)
	if err != nil {
		return ManifestFile{}, err
	}
	f.Size, f.SHA256 = int64(len(data)), sum(data)
	if !isTable(name) {
		f.Data = data
		return f, nil
	}
	if has() {
		return f, nil
	}
	return f, to.putContent(ctx, to.tableKey(f.SHA256), data)
}

// snapshots is the part of a store that one partition's snapshots are in.
type snapshots struct {
	store  blob.Store
	prefix string
}

func (s snapshots) manifestKey(seq uint64) string {
	return path.Join(s.prefix, fmt.Sprintf("snapshot/%016x", seq))
}

func (s snapshots) tableKey(sum string) string { return path.Join(s.prefix, "table", sum) }

// sequences lists the snapshots there are, oldest first.
func (s snapshots) sequences(ctx context.Context) ([]uint64, error) {
	var out []uint64
	err := s.list(ctx, "snapshot", func(name string, _ int64) error {
		if seq, err := strconv.ParseUint(name, 16, 64); err == nil && path.Base(s.manifestKey(seq)) == name {
			out = append(out, seq)
		}
		if len(out) > maxSnapshots {
			return fmt.Errorf("over %d snapshots below %q", maxSnapshots, s.prefix)
		}
		return nil
	})
	return out, err
}

// tables lists the table files there are, with their sizes.
func (s snapshots) tables(ctx context.Context) (map[string]int64, error) {
	out := map[string]int64{}
	err := s.list(ctx, "table", func(name string, size int64) error {
		out[name] = size
		if len(out) > maxSnapshotFiles*(keepSnapshots+1) {
			return fmt.Errorf("over %d table files below %q", maxSnapshotFiles*(keepSnapshots+1), s.prefix)
		}
		return nil
	})
	return out, err
}

func (s snapshots) list(ctx context.Context, folder string, fn func(name string, size int64) error) error {
	prefix := path.Join(s.prefix, folder) + "/"
	for after := ""; ; {
		infos, err := s.store.List(ctx, prefix, after, blob.MaxList)
		if err != nil {
			return err
		}
		for _, i := range infos {
			if err := fn(i.Key[len(prefix):], i.Size); err != nil {
				return err
			}
			after = i.Key
		}
		if len(infos) < blob.MaxList {
			return nil
		}
	}
}

// putContent writes an object whose key is its content's: again does no harm.
func (s snapshots) putContent(ctx context.Context, key string, data []byte) error {
	for try := 1; ; try++ {
		_, err := s.store.Put(ctx, key, data, blob.PutOptions{})
		if err == nil {
			return s.compare(ctx, key, data)
		}
		if !errors.Is(err, blob.ErrAmbiguous) || try == putTries || ctx.Err() != nil {
			return err
		}
	}
}

// putOnce writes an object that nobody else may have written.
func (s snapshots) putOnce(ctx context.Context, key string, data []byte) error {
	for try := 1; ; try++ {
		_, err := s.store.Put(ctx, key, data, blob.PutOptions{IfNoneMatch: true})
		switch {
		case err == nil, errors.Is(err, blob.ErrPrecondition):
			return s.compare(ctx, key, data) // ours, if an answer before was lost
		case !errors.Is(err, blob.ErrAmbiguous), try == putTries, ctx.Err() != nil:
			return err
		}
	}
}

// compare reads back what was written.
func (s snapshots) compare(ctx context.Context, key string, data []byte) error {
	o, err := s.store.Get(ctx, key)
	if err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	if !bytes.Equal(o.Data, data) {
		return fmt.Errorf("read back %s: %d bytes differ from the %d written; is there another writer?", key, len(o.Data), len(data))
	}
	return nil
}

// prune removes all but the newest snapshots, and then the table files that
// these do not name. A manifest that cannot be read keeps all files.
func (s snapshots) prune(ctx context.Context, seqs []uint64) error {
	cut := max(0, len(seqs)-keepSnapshots)
	named := map[string]bool{}
	for _, seq := range seqs[cut:] {
		m, err := s.manifest(ctx, seq)
		if err != nil {
			return err
		}
		for _, f := range m.Files {
			named[f.SHA256] = true
		}
	}
	for _, seq := range seqs[:cut] {
		if err := s.store.Delete(ctx, s.manifestKey(seq), blob.DeleteOptions{}); err != nil {
			return err
		}
	}
	there, err := s.tables(ctx)
	if err != nil {
		return err
	}
	for name := range there {
		if named[name] {
			continue
		}
		if err := s.store.Delete(ctx, s.tableKey(name), blob.DeleteOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func (s snapshots) manifest(ctx context.Context, seq uint64) (Manifest, error) {
	o, err := s.store.Get(ctx, s.manifestKey(seq))
	if err != nil {
		return Manifest{}, err
	}
	m, err := decodeManifest(o.Data)
	if err == nil && m.Sequence != seq {
		err = fmt.Errorf("%w: snapshot %d is under the key of %d", ErrDamaged, m.Sequence, seq)
	}
	return m, err
}

func readFile(fs env.FS, name string) (data []byte, err error) {
	f, err := fs.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	return io.ReadAll(io.LimitReader(f, blob.MaxObjectSize+1))
}
