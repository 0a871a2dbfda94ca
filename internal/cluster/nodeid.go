package cluster

import (
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// nodeIDFile is the name of the file that keeps a node's ID.
const nodeIDFile = "node-id"

// NodeID is the ID of the node whose data directory is dir, which is there and is
// locked by the caller. It is made at the first call and kept.
func NodeID(fs env.FS, dir string, r env.Rand) (string, error) {
	path := fs.PathJoin(dir, nodeIDFile)
	id, err := readNodeID(fs, path)
	if !errors.Is(err, iofs.ErrNotExist) {
		return id, err
	}
	id = fmt.Sprintf("%016x", r.Uint64())
	temp := path + ".tmp"
	if err := writeNodeID(fs, temp, id); err != nil {
		return "", fmt.Errorf("cluster: write %s: %w", temp, err)
	}
	if err := fs.Rename(temp, path); err != nil {
		return "", fmt.Errorf("cluster: %w", err)
	}
	d, err := fs.OpenDir(dir)
	if err != nil {
		return "", fmt.Errorf("cluster: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return "", fmt.Errorf("cluster: sync %s: %w", dir, err)
	}
	return id, nil
}

func readNodeID(fs env.FS, path string) (id string, err error) {
	f, err := fs.Open(path)
	if err != nil {
		return "", fmt.Errorf("cluster: read the node's ID: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	raw, err := io.ReadAll(io.LimitReader(f, MaxNodeID+2))
	if err != nil {
		return "", fmt.Errorf("cluster: read %s: %w", path, err)
	}
	id = strings.TrimSuffix(string(raw), "\n")
	if err := checkNode(id); err != nil {
		return "", fmt.Errorf("%w: %s: %w: delete the file while no process uses the directory; the node then gets a new ID", ErrDamaged, path, err)
	}
	return id, nil
}

func writeNodeID(fs env.FS, path, id string) error {
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte(id + "\n"))
	return errors.Join(err, f.Sync(), f.Close())
}
