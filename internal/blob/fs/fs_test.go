package fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/env"
)

const root = "data/blobs"

func mustOpen(t testing.TB, fs env.FS) *Store {
	t.Helper()
	s, err := Open(fs, root)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformance(t *testing.T) {
	t.Run("mem", func(t *testing.T) {
		blobtest.Run(t, func(t *testing.T) blob.Store { return mustOpen(t, vfs.NewCrashableMem()) })
	})
	t.Run("disk", func(t *testing.T) {
		blobtest.Run(t, func(t *testing.T) blob.Store {
			s, err := Open(vfs.Default, t.TempDir()+"/a/b")
			if err != nil {
				t.Fatal(err)
			}
			return s
		})
	})
}

func TestReopenKeepsTokens(t *testing.T) {
	fs := vfs.NewMem()
	token, err := mustOpen(t, fs).Put(t.Context(), "a/b", []byte("x"), blob.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mustOpen(t, fs).Put(t.Context(), "a/b", []byte("y"), blob.PutOptions{IfMatch: token}); err != nil {
		t.Fatal(err)
	}
}

func TestDamageIsReported(t *testing.T) {
	orig := []byte("some content")
	size := headerSize + len(orig)
	for i := range size {
		fs := vfs.NewMem()
		s := mustOpen(t, fs)
		if _, err := s.Put(t.Context(), "a/b", orig, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		_, path := s.path("a/b")
		f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, size)
		_, _ = f.ReadAt(b, 0)
		if _, err := f.WriteAt([]byte{b[i] ^ 4}, int64(i)); err != nil {
			t.Fatal(err)
		}
		if o, err := s.Get(t.Context(), "a/b"); !errors.Is(err, blob.ErrCorrupt) {
			t.Fatalf("byte %d: %q %v", i, o.Data, err)
		}
	}
}

// TestCrashes runs writes and crashes before a random file operation, losing a
// random part of what was not synced.
func TestCrashes(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 2))
		disk := vfs.NewCrashableMem()
		sure := map[string]string{}  // acknowledged content, "" is none
		maybe := map[string]string{} // at most one: the write in flight
		for life := range 5 {
			var clone *vfs.MemFS
			n, crashAt := 0, 1+rng.IntN(150)
			src := disk
			fs := errorfs.Wrap(src, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind.ReadOrWrite() == errorfs.OpIsRead && op.Kind != errorfs.OpOpenDir {
					return nil
				}
				if n++; n < crashAt {
					return nil
				}
				if clone == nil {
					clone = src.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 30, 80}[rng.IntN(3)], RNG: rng})
				}
				return errorfs.ErrInjected
			}))
			if s, err := Open(fs, root); err == nil {
				settle(t, s, sure, maybe)
				writeSome(t, s, rng, fmt.Sprintf("%d.%d", seed, life), sure, maybe)
			}
			if clone == nil {
				clone = src.CrashClone(vfs.CrashCloneCfg{})
			}
			disk = clone
			settleCopy(t, disk.CrashClone(vfs.CrashCloneCfg{}), sure, maybe, fmt.Sprintf("seed %d life %d", seed, life))
		}
	}
}

// settle reads what became of the write in flight; from then on it is sure.
func settle(t *testing.T, s *Store, sure, maybe map[string]string) {
	t.Helper()
	for key, alternative := range maybe {
		got := read(t, s, key)
		if got != alternative && got != sure[key] {
			t.Fatalf("%s is %q, want %q or %q", key, got, sure[key], alternative)
		}
		sure[key] = got
		delete(maybe, key)
	}
}

func settleCopy(t *testing.T, fs env.FS, sure, maybe map[string]string, what string) {
	t.Helper()
	s := mustOpen(t, fs)
	for key, want := range sure {
		got := read(t, s, key)
		if alternative, open := maybe[key]; got != want && (!open || got != alternative) {
			t.Fatalf("%s: %s is %.20q, want %.20q", what, key, got, want)
		}
	}
	if left, err := fs.List(fs.PathJoin(root, tempDir)); err != nil || len(left) > 0 {
		t.Fatalf("%s: leftovers %v, %v", what, left, err)
	}
}

func read(t *testing.T, s *Store, key string) string {
	t.Helper()
	o, err := s.Get(t.Context(), key)
	if errors.Is(err, blob.ErrNotFound) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(o.Data)
}

// writeSome writes until the disk fails or enough is written.
func writeSome(t *testing.T, s *Store, rng *rand.Rand, mark string, sure, maybe map[string]string) {
	t.Helper()
	for i := range 30 {
		key := fmt.Sprintf("d%d/k%d", rng.IntN(3), rng.IntN(3))
		data := strings.Repeat(fmt.Sprintf("%s.%d ", mark, i), 1+rng.IntN(2000))
		var err error
		if rng.IntN(4) == 0 {
			data = ""
			err = s.Delete(context.Background(), key, blob.DeleteOptions{})
		} else {
			_, err = s.Put(context.Background(), key, []byte(data), blob.PutOptions{})
		}
		if err != nil {
			// The machine crashes here, so even a sure failure is in doubt
			// only if the store said so.
			if errors.Is(err, blob.ErrAmbiguous) {
				maybe[key] = data
			}
			if _, seen := sure[key]; !seen {
				sure[key] = ""
			}
			return
		}
		sure[key] = data
	}
}

func TestFailedDirectorySyncEndsWriting(t *testing.T) {
	var fail bool
	disk := vfs.NewMem()
	s := mustOpen(t, errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if fail && op.Kind == errorfs.OpFileSync && strings.HasSuffix(op.Path, dirSuffix) {
			return errorfs.ErrInjected
		}
		return nil
	})))
	put := func(data string) error {
		_, err := s.Put(t.Context(), "a/b", []byte(data), blob.PutOptions{})
		return err
	}
	if err := put("one"); err != nil {
		t.Fatal(err)
	}
	fail = true
	if err := put("two"); !errors.Is(err, blob.ErrAmbiguous) {
		t.Fatal(err)
	}
	fail = false
	if err := put("three"); !errors.Is(err, blob.ErrUnavailable) {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), "a/b", blob.DeleteOptions{}); !errors.Is(err, blob.ErrUnavailable) {
		t.Fatal(err)
	}
	s = mustOpen(t, disk)
	if got := read(t, s, "a/b"); got != "two" {
		t.Fatalf("%q", got)
	}
	if err := put("four"); err != nil {
		t.Fatal(err)
	}
}

func TestFailedContentSyncChangesNothing(t *testing.T) {
	var fail bool
	disk := vfs.NewMem()
	s := mustOpen(t, errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if fail && op.Kind == errorfs.OpFileSync {
			return errorfs.ErrInjected
		}
		return nil
	})))
	data := bytes.Repeat([]byte("x"), 200<<10)
	if _, err := s.Put(t.Context(), "a/b", data, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	fail = true
	if _, err := s.Put(t.Context(), "a/b", []byte("two"), blob.PutOptions{}); err == nil || errors.Is(err, blob.ErrAmbiguous) {
		t.Fatal(err)
	}
	if got := read(t, s, "a/b"); got != string(data) {
		t.Fatalf("%d bytes", len(got))
	}
	if left, _ := disk.List(disk.PathJoin(root, tempDir)); len(left) != 0 {
		t.Fatalf("leftovers %v", left)
	}
}

func FuzzObjectFile(f *testing.F) {
	f.Add(append(encodeHeader(5, blob.ContentToken([]byte("hello"))), "hello"...))
	f.Add(encodeHeader(0, blob.ContentToken(nil)))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		fs := vfs.NewMem()
		s := mustOpen(t, fs)
		if err := fs.MkdirAll(root+"/objects/a.d", 0o755); err != nil {
			t.Fatal(err)
		}
		file, err := fs.Create(root+"/objects/a.d/b.o", vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.Write(bytes.Clone(b)); err != nil {
			t.Fatal(err)
		}
		o, err := s.Get(t.Context(), "a/b")
		if err != nil {
			if !errors.Is(err, blob.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(append(encodeHeader(len(o.Data), o.Token), o.Data...), b) {
			t.Fatal("accepted a file that Put does not write")
		}
	})
}

// TestKilledBeforeTheNameWasDurable: the process, not the machine, stops
// between rename and directory sync. What the next one shows must last.
func TestKilledBeforeTheNameWasDurable(t *testing.T) {
	disk := vfs.NewCrashableMem()
	var kill bool
	s := mustOpen(t, errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if kill && op.Kind == errorfs.OpOpenDir && strings.HasSuffix(op.Path, "a.d") {
			return errorfs.ErrInjected
		}
		return nil
	})))
	kill = true
	if _, err := s.Put(t.Context(), "a/b", []byte("x"), blob.PutOptions{}); !errors.Is(err, blob.ErrAmbiguous) {
		t.Fatal(err)
	}
	if got := read(t, mustOpen(t, disk), "a/b"); got != "x" {
		t.Fatalf("%q", got)
	}
	if got := read(t, mustOpen(t, disk.CrashClone(vfs.CrashCloneCfg{})), "a/b"); got != "x" {
		t.Fatalf("%q after the crash", got)
	}
}
