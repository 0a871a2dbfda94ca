package state

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/wire"
)

// filled gives a file system with flushed tables in it.
func filled(t *testing.T) *vfs.MemFS {
	t.Helper()
	fs := vfs.NewMem()
	d := openMem(t, fs, Options{})
	write(t, d, 1, func(b *Batch) {
		for _, id := range []string{"a", "b", "c"} {
			b.PutFlow(flow(id, false, 2000))
			b.PutEvent(id, event(1, 0))
		}
	})
	must(t, d.Flush())
	must(t, d.Close())
	return fs
}

// damage overwrites or cuts the first file whose name has part in it.
func damage(t *testing.T, fs vfs.FS, part string, change func([]byte) []byte) {
	t.Helper()
	names, err := fs.List("p")
	must(t, err)
	for _, name := range names {
		if !strings.Contains(name, part) || strings.HasPrefix(name, "marker") {
			continue
		}
		path := fs.PathJoin("p", name)
		f, err := fs.Open(path)
		must(t, err)
		data, err := io.ReadAll(f)
		must(t, err)
		must(t, f.Close())
		f, err = fs.Create(path, vfs.WriteCategoryUnspecified)
		must(t, err)
		_, err = f.Write(change(data))
		must(t, err)
		must(t, f.Close())
		return
	}
	t.Fatalf("no file %q among %v", part, names)
}

func flip(b []byte) []byte {
	for i := range b {
		b[i] ^= 0x55
	}
	return b
}

func TestDamagedFolderIsNamedWithTheWayOut(t *testing.T) {
	for name, hurt := range map[string]func(t *testing.T, fs vfs.FS){
		"manifest flipped": func(t *testing.T, fs vfs.FS) { damage(t, fs, "MANIFEST", flip) },
		"manifest empty":   func(t *testing.T, fs vfs.FS) { damage(t, fs, "MANIFEST", func(b []byte) []byte { return nil }) },
		"table cut":        func(t *testing.T, fs vfs.FS) { damage(t, fs, ".sst", func(b []byte) []byte { return b[:10] }) },
		"table flipped":    func(t *testing.T, fs vfs.FS) { damage(t, fs, ".sst", flip) },
		"table missing": func(t *testing.T, fs vfs.FS) {
			names, err := fs.List("p")
			must(t, err)
			for _, n := range names {
				if strings.HasSuffix(n, ".sst") {
					must(t, fs.Remove(fs.PathJoin("p", n)))
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			fs := filled(t)
			hurt(t, fs)
			d, err := Open("p", Options{FS: fs})
			if err == nil {
				d.Close()
				t.Fatal("opened")
			}
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), `"p"`) || !strings.Contains(err.Error(), "restore") {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestLockedFolderIsNotCalledDamaged(t *testing.T) {
	fs := vfs.NewMem()
	openMem(t, fs, Options{})
	if _, err := Open("p", Options{FS: fs}); err == nil || errors.Is(err, ErrDamaged) {
		t.Errorf("error %v", err)
	}
}

// TestDamagedBlockIsFoundByReading: the folder opens, since Pebble reads rows
// when asked for them, and the read says what is wrong.
func TestDamagedBlockIsFoundByReading(t *testing.T) {
	fs := filled(t)
	damage(t, fs, ".sst", func(b []byte) []byte { flip(b[20:200]); return b })
	var said []string
	d, err := Open("p", Options{FS: fs, Log: func(l Level, m string) {
		if l == Error {
			said = append(said, m)
		}
	}})
	if err != nil {
		if !errors.Is(err, ErrDamaged) {
			t.Fatal(err)
		}
		return
	}
	defer d.Close()
	err = d.Flows("", "", 0, false, func(*wire.Flow) error { return nil })
	_, herr := d.Hash()
	if !errors.Is(herr, ErrDamaged) {
		t.Errorf("errors %v, %v", err, herr)
	}
	if d.Metrics().BackgroundErrors == 0 && len(said) == 0 {
		t.Error("damage was not reported")
	}
}

func TestLayoutOfANewerProgramIsRefused(t *testing.T) {
	fs := vfs.NewMem()
	d := openMem(t, fs, Options{})
	write(t, d, 1, func(b *Batch) { b.PutFlow(flow("f", false, 1)) })
	row := make([]byte, progressBytes)
	row[0] = rowVersion + 1
	must(t, d.db.Set([]byte{tableProgress}, row, pebble.NoSync))
	must(t, d.Flush())
	must(t, d.Close())
	if _, err := Open("p", Options{FS: fs}); err == nil || errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "newer program") {
		t.Errorf("error %v", err)
	}
}

// TestCutManifestGoesBackToAPrefix: a cut at the end is what a crash leaves,
// so it is no damage; the LSN tells the caller how far the tables go.
func TestCutManifestGoesBackToAPrefix(t *testing.T) {
	fs := filled(t)
	damage(t, fs, "MANIFEST", func(b []byte) []byte { return b[:len(b)-8] })
	d := openMem(t, fs, Options{})
	if got, ids := d.AppliedLSN(), flowIDs(t, d, "", "", 0, false); got != 0 || ids != nil {
		t.Errorf("tables at LSN %d with %v", got, ids)
	}
}
