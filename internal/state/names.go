package state

import (
	"cmp"
	"fmt"
	"path"
	"strconv"
	"strings"
)

const (
	snapshotFolder = "snapshot"
	tableFolder    = "table"
	hexDigits      = 16 // of a number in a key
	sumDigits      = 64
)

// SnapshotID names one snapshot of a partition.
type SnapshotID struct {
	Epoch    uint64 // the ownership that wrote it; 0 for format 1
	Sequence uint64
}

// Compare orders snapshots from old to new. What a former owner still writes
// is older than anything of its successor.
func (s SnapshotID) Compare(o SnapshotID) int {
	return cmp.Or(cmp.Compare(s.Epoch, o.Epoch), cmp.Compare(s.Sequence, o.Sequence))
}

func (s SnapshotID) String() string {
	if s.Epoch == 0 {
		return fmt.Sprintf("%016x", s.Sequence)
	}
	return fmt.Sprintf("%016x-%016x", s.Epoch, s.Sequence)
}

// parseSnapshot is the inverse of String.
func parseSnapshot(name string) (id SnapshotID, ok bool) {
	if epoch, seq, two := strings.Cut(name, "-"); two {
		e, ok1 := parseHex(epoch)
		s, ok2 := parseHex(seq)
		return SnapshotID{e, s}, ok1 && ok2 && e > 0
	}
	id.Sequence, ok = parseHex(name)
	return id, ok
}

// tableObject is the name of a table file's object: content, and the snapshot
// that uploaded it. By is zero for format 1.
type tableObject struct {
	sum string
	by  SnapshotID
}

func (t tableObject) String() string {
	if t.by.Epoch == 0 {
		return t.sum
	}
	return t.sum + "-" + t.by.String()
}

// parseTable is the inverse of String.
func parseTable(name string) (t tableObject, ok bool) {
	if len(name) < sumDigits {
		return t, false
	}
	t.sum = name[:sumDigits]
	if strings.Trim(t.sum, "0123456789abcdef") != "" {
		return t, false
	}
	rest := name[sumDigits:]
	if rest == "" {
		return t, true
	}
	t.by, ok = parseSnapshot(strings.TrimPrefix(rest, "-"))
	return t, ok && rest[0] == '-' && t.by.Epoch > 0
}

// parseHex takes only what %016x prints.
func parseHex(s string) (uint64, bool) {
	n, err := strconv.ParseUint(s, 16, 64)
	return n, err == nil && len(s) == hexDigits && strings.ToLower(s) == s
}

// ManifestKey is the key of a snapshot's manifest.
func ManifestKey(prefix string, id SnapshotID) string {
	return path.Join(prefix, snapshotFolder, id.String())
}

// TableKey is the key of a table file named by a manifest; f.IsTable holds.
func TableKey(prefix string, f ManifestFile) string {
	return path.Join(prefix, tableFolder, f.Object)
}

// SnapshotKey says what the key of an object below a snapshot prefix names: a
// manifest, a table file, or (neither) something foreign.
func SnapshotKey(prefix, key string) (id SnapshotID, manifest, table bool) {
	folder, name, _ := strings.Cut(strings.TrimPrefix(key, prefix+"/"), "/")
	switch folder {
	case snapshotFolder:
		id, manifest = parseSnapshot(name)
	case tableFolder:
		var t tableObject
		t, table = parseTable(name)
		id = t.by
	}
	return id, manifest, table
}
