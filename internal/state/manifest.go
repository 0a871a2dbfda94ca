package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
)

// Layout in the store, below the caller's prefix:
//
//	snapshot/<sequence, 16 hex digits>   a manifest, written once
//	table/<sha256, 64 hex digits>        a table file, by content
//
// A manifest holds the small files itself, so that the only things shared by
// snapshots are table files, whose content never comes again once deleted.
const (
	snapshotFormat   = 1
	maxSnapshotFiles = 100_000
	manifestMagic    = "perdure-snapshot "
)

// Manifest describes one snapshot.
type Manifest struct {
	Format     int            `json:"format"`
	Sequence   uint64         `json:"sequence"`
	AppliedLSN uint64         `json:"applied_lsn"` // all rows up to here are in; later ones may be
	Files      []ManifestFile `json:"files"`
}

// ManifestFile is one file of a snapshot.
type ManifestFile struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	Data   []byte `json:"data,omitempty"` // content, unless it is a table file
}

func isTable(name string) bool { return strings.HasSuffix(name, ".sst") }

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}

// encode gives the object: a line with the checksum, then JSON.
func (m *Manifest) encode() ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("state: encode snapshot manifest: %w", err)
	}
	return append([]byte(manifestMagic+sum(body)+"\n"), body...), nil
}

// decodeManifest takes only what encode gives: names are plain file names, and
// what is inline is as its checksum says. Errors are ErrDamaged but for a
// format that this program is too old for.
func decodeManifest(data []byte) (Manifest, error) {
	bad := func(format string, args ...any) (Manifest, error) {
		return Manifest{}, fmt.Errorf("%w: snapshot manifest: %s", ErrDamaged, fmt.Sprintf(format, args...))
	}
	head, body, ok := bytes.Cut(data, []byte("\n"))
	if !ok || string(head) != manifestMagic+sum(body) {
		return bad("checksum does not match")
	}
	var m Manifest
	if err := json.Unmarshal(body, &m); err != nil {
		return bad("%v", err)
	}
	if m.Format > snapshotFormat {
		return Manifest{}, fmt.Errorf("state: snapshot has format %d, this program reads up to %d: use a newer program", m.Format, snapshotFormat)
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return bad("%v", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return bad("more behind its end")
	}
	if m.Format < 1 || len(m.Files) == 0 || len(m.Files) > maxSnapshotFiles {
		return bad("format %d with %d files", m.Format, len(m.Files))
	}
	seen := make(map[string]bool, len(m.Files))
	for _, f := range m.Files {
		if err := f.check(); err != nil {
			return bad("%v", err)
		}
		if seen[f.Name] {
			return bad("file %q is there twice", f.Name)
		}
		seen[f.Name] = true
	}
	return m, nil
}

func (f *ManifestFile) check() error {
	if !plainName(f.Name) {
		return fmt.Errorf("file name %q", clip([]byte(f.Name)))
	}
	if raw, err := hex.DecodeString(f.SHA256); err != nil || len(raw) != sha256.Size || strings.ToLower(f.SHA256) != f.SHA256 {
		return fmt.Errorf("file %s has a checksum of another form", f.Name)
	}
	switch {
	case f.Size < 0 || f.Size > blob.MaxObjectSize:
		return fmt.Errorf("file %s has %d bytes", f.Name, f.Size)
	case isTable(f.Name) && f.Data != nil:
		return fmt.Errorf("table file %s is inline", f.Name)
	case !isTable(f.Name) && !f.matches(f.Data):
		return fmt.Errorf("file %s is not as its checksum says", f.Name)
	}
	return nil
}

func (f *ManifestFile) matches(data []byte) bool {
	return int64(len(data)) == f.Size && sum(data) == f.SHA256
}

// plainName keeps a manifest from naming a file outside of the folder.
func plainName(name string) bool {
	if name == "" || len(name) > 255 || name[0] == '.' {
		return false
	}
	for i := range len(name) {
		c := name[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && c != '.' && c != '-' && c != '_' {
			return false
		}
	}
	return true
}
