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
//	snapshot/<epoch>-<sequence>          a manifest, written once
//	table/<sha256>-<epoch>-<sequence>    a table file, written once: by which
//	                                     snapshot of which owner
//
// Numbers have 16 hex digits. A manifest holds the small files itself, so that
// the only things shared by snapshots are table files. No key ever comes again
// once deleted, which is what docs/adr/0024-snapshots-that-a-zombie-cannot-hurt.md
// rests on.
//
// Format 1 had the keys snapshot/<sequence> and table/<sha256>; both are read,
// as of epoch 0.
const (
	snapshotFormat   = 2
	maxSnapshotFiles = 100_000
	manifestMagic    = "perdure-snapshot "
)

// Manifest describes one snapshot.
type Manifest struct {
	Format     int            `json:"format"`
	Epoch      uint64         `json:"epoch,omitempty"` // the ownership that wrote it; 0 in format 1
	Sequence   uint64         `json:"sequence"`        // rises with each snapshot; newest is the highest (Epoch, Sequence)
	AppliedLSN uint64         `json:"applied_lsn"`     // all rows up to here are in; later ones may be
	Files      []ManifestFile `json:"files"`

	Stats SnapshotStats `json:"-"` // what writing it cost; only Snapshot sets it
}

// SnapshotStats counts the requests of one snapshot, its pruning included.
type SnapshotStats struct {
	Puts, Gets, Lists, Deletes int64
	PutBytes, GotBytes         int64
	NewTables, Tables          int // table files uploaded, and in all
}

// ManifestFile is one file of a snapshot.
type ManifestFile struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	Object string `json:"object,omitempty"` // of a table file: its key below table/; in format 1 the checksum
	Data   []byte `json:"data,omitempty"`   // content, unless it is a table file
}

// IsTable reports whether the file's content is an object of its own.
func (f *ManifestFile) IsTable() bool { return isTable(f.Name) }

// Matches reports whether data is the file's content.
func (f *ManifestFile) Matches(data []byte) bool {
	return int64(len(data)) == f.Size && sum(data) == f.SHA256
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
	if (m.Format == 1) != (m.Epoch == 0) {
		return bad("format %d with epoch %d", m.Format, m.Epoch)
	}
	if m.Format < 1 || len(m.Files) == 0 || len(m.Files) > maxSnapshotFiles {
		return bad("format %d with %d files", m.Format, len(m.Files))
	}
	seen := make(map[string]bool, len(m.Files))
	for i := range m.Files {
		f := &m.Files[i]
		if m.Format == 1 && f.IsTable() && f.Object == "" {
			f.Object = f.SHA256
		}
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
	case !f.IsTable() && f.Object != "":
		return fmt.Errorf("file %s is inline and an object", f.Name)
	case !f.IsTable() && !f.Matches(f.Data):
		return fmt.Errorf("file %s is not as its checksum says", f.Name)
	case f.IsTable() && f.Data != nil:
		return fmt.Errorf("table file %s is inline", f.Name)
	}
	if !f.IsTable() {
		return nil
	}
	if o, ok := parseTable(f.Object); !ok || o.sum != f.SHA256 {
		return fmt.Errorf("table file %s has the object %q", f.Name, clip([]byte(f.Object)))
	}
	return nil
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
