package state

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/wire"
)

// objects lists what is in the store, "table" or "snapshot".
func objects(t testing.TB, store blob.Store, folder string) []string {
	t.Helper()
	infos, err := store.List(t.Context(), "p/"+folder+"/", "", blob.MaxList)
	must(t, err)
	var keys []string
	for _, i := range infos {
		keys = append(keys, i.Key)
	}
	return keys
}

// restored restores into a fresh file system and gives hash and LSN of it.
func restored(t testing.TB, store blob.Store) (hash, lsn uint64, m Manifest) {
	t.Helper()
	fs := vfs.NewCrashableMem()
	m, err := Restore(t.Context(), store, "p", fs, "p")
	must(t, err)
	// What was restored is durable.
	d := openMem(t, fs.CrashClone(vfs.CrashCloneCfg{}), Options{Outbox: true})
	defer d.Close()
	checkDerived(t, d)
	hash, err = d.Hash()
	must(t, err)
	return hash, d.AppliedLSN(), m
}

func fill(t testing.TB, d *DB, s script, m *model, from, to uint64) {
	t.Helper()
	for lsn := from; lsn <= to; lsn++ {
		write(t, d, lsn, func(b *Batch) { s.batch(lsn, b, m) })
	}
}

func emptyModel() *model { return &model{map[string]*wire.Flow{}, map[string][]string{}} }

func TestSnapshotsUploadOnlyWhatIsNew(t *testing.T) {
	var puts []string
	store := blob.NewFaulty(mem.New(mem.Options{Immutable: func(string) bool { return true }}), func(op blob.Op) blob.Fault {
		if op.Kind == blob.KindPut {
			puts = append(puts, op.Key)
		}
		return blob.Fault{}
	}, blob.FaultHooks{})
	d := openMem(t, vfs.NewMem(), Options{Manual: true, Outbox: true})
	s, model := script{1, 8 << 10}, emptyModel()
	var all []string
	for i := range uint64(6) {
		fill(t, d, s, model, i*40+1, i*40+40)
		puts = nil
		m, err := d.Snapshot(t.Context(), store, "p", SnapshotOptions{Epoch: 1})
		must(t, err)
		if m.AppliedLSN != i*40+40 {
			t.Errorf("snapshot at LSN %d, want %d", m.AppliedLSN, i*40+40)
		}
		for _, key := range puts {
			if slices.Contains(all, key) {
				t.Errorf("snapshot %d wrote %s again", i, key)
			}
		}
		all = append(all, puts...)
		tables := slices.DeleteFunc(slices.Clone(m.Files), func(f ManifestFile) bool { return !isTable(f.Name) })
		if i > 0 && len(puts)-1 >= len(tables) {
			t.Errorf("snapshot %d wrote %d of its %d tables", i, len(puts)-1, len(tables))
		}
		want, err := d.Hash()
		must(t, err)
		if hash, lsn, _ := restored(t, store); hash != want || lsn != m.AppliedLSN {
			t.Errorf("restored hash %x at %d, want %x at %d", hash, lsn, want, m.AppliedLSN)
		}
		if got := objects(t, store, "snapshot"); len(got) != min(int(i)+1, 2) {
			t.Errorf("after snapshot %d there are %v", i, got)
		}
	}
	// Compaction replaces all tables; three snapshots later the old ones are gone:
	// two until no snapshot names them, and one of grace.
	must(t, d.Compact(t.Context()))
	var named []string
	for range 4 {
		m, err := d.Snapshot(t.Context(), store, "p", SnapshotOptions{Epoch: 1})
		must(t, err)
		for _, f := range m.Files {
			if isTable(f.Name) && !slices.Contains(named, "p/table/"+f.Object) {
				named = append(named, "p/table/"+f.Object)
			}
		}
	}
	slices.Sort(named)
	if got := objects(t, store, "table"); !slices.Equal(got, named) {
		t.Errorf("tables in the store %v, named by snapshots %v", got, named)
	}
	if names, _ := d.o.FS.List(checkpointDir("p")); names != nil {
		t.Errorf("checkpoint is left: %v", names)
	}
}

// TestRestoreFallsBackOnDamageOnly breaks objects of the newest snapshot.
func TestRestoreFallsBackOnDamageOnly(t *testing.T) {
	ctx := t.Context()
	setup := func(t *testing.T) (store *mem.Store, newest Manifest, own string) {
		store = mem.New(mem.Options{})
		d := openMem(t, vfs.NewMem(), Options{Manual: true})
		write(t, d, 1, func(b *Batch) { b.PutFlow(flow("a", true, 100)) })
		first, err := d.Snapshot(ctx, store, "p", SnapshotOptions{Epoch: 1})
		must(t, err)
		write(t, d, 2, func(b *Batch) { b.PutFlow(flow("b", true, 100)) })
		newest, err = d.Snapshot(ctx, store, "p", SnapshotOptions{Epoch: 1})
		must(t, err)
		for _, f := range newest.Files {
			if isTable(f.Name) && !slices.ContainsFunc(first.Files, func(g ManifestFile) bool { return g.SHA256 == f.SHA256 }) {
				own = "p/table/" + f.Object
			}
		}
		return store, newest, own
	}
	put := func(t *testing.T, s blob.Store, key, data string) {
		_, err := s.Put(ctx, key, []byte(data), blob.PutOptions{})
		must(t, err)
	}
	manifest := "p/snapshot/0000000000000001-0000000000000002"
	for name, hurt := range map[string]func(t *testing.T, s blob.Store, own string){
		"table gone":       func(t *testing.T, s blob.Store, own string) { must(t, s.Delete(ctx, own, blob.DeleteOptions{})) },
		"table changed":    func(t *testing.T, s blob.Store, own string) { put(t, s, own, "junk") },
		"manifest changed": func(t *testing.T, s blob.Store, _ string) { put(t, s, manifest, "junk") },
		"manifest misnamed": func(t *testing.T, s blob.Store, _ string) {
			copyObject(t, s, "p/snapshot/0000000000000001-0000000000000001", manifest)
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, _, own := setup(t)
			hurt(t, store, own)
			_, lsn, m := restored(t, store)
			if lsn != 1 || m.Sequence != 1 {
				t.Errorf("restored snapshot %d at LSN %d", m.Sequence, lsn)
			}
			// With the older one broken as well it is an error that says so.
			must(t, store.Delete(ctx, "p/snapshot/0000000000000001-0000000000000001", blob.DeleteOptions{}))
			_, err := Restore(ctx, store, "p", vfs.NewMem(), "p")
			if err == nil || !strings.Contains(err.Error(), "no snapshot below \"p\" is whole") {
				t.Errorf("error %v", err)
			}
		})
	}
	t.Run("store does not answer", func(t *testing.T) {
		store, _, own := setup(t)
		down := blob.NewFaulty(store, func(op blob.Op) blob.Fault {
			if op.Key == own {
				return blob.Fault{Outcome: blob.Refused}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		fs := vfs.NewMem()
		if _, err := Restore(ctx, down, "p", fs, "p"); !errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("error %v", err)
		}
		if names, _ := fs.List("p"); len(names) > 0 {
			t.Errorf("left %v", names)
		}
	})
	t.Run("no snapshot", func(t *testing.T) {
		if _, err := Restore(ctx, mem.New(mem.Options{}), "p", vfs.NewMem(), "p"); !errors.Is(err, ErrNoSnapshot) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("folder in use", func(t *testing.T) {
		store, _, _ := setup(t)
		if _, err := Restore(ctx, store, "p", filled(t), "p"); err == nil || !strings.Contains(err.Error(), "move it away") {
			t.Errorf("error %v", err)
		}
	})
}

func copyObject(t *testing.T, s blob.Store, from, to string) {
	o, err := s.Get(t.Context(), from)
	must(t, err)
	_, err = s.Put(t.Context(), to, o.Data, blob.PutOptions{})
	must(t, err)
}

// TestSnapshotUnderFaults: whatever the store does, a snapshot that was
// returned is there and whole, and so is the newest one before it.
func TestSnapshotUnderFaults(t *testing.T) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			inner := mem.New(mem.Options{Immutable: func(string) bool { return true }})
			var late []func()
			decide := blob.Seeded(r, blob.Rates{Refused: 2, Lost: 3, AnswerLost: 4, Late: 3})
			store := blob.NewFaulty(inner, decide, blob.FaultHooks{Later: func(w func()) { late = append(late, w) }})
			d := openMem(t, vfs.NewMem(), Options{Manual: true, Outbox: true})
			s, model := script{seed, 2 << 10}, emptyModel()
			var lsn, hash uint64
			good := 0
			for i := range uint64(60) {
				fill(t, d, s, model, i*5+1, i*5+5)
				if r.IntN(10) == 0 {
					must(t, d.Compact(context.Background()))
				}
				m, err := d.Snapshot(t.Context(), store, "p", SnapshotOptions{Epoch: 1})
				for len(late) > 0 && r.IntN(2) == 0 {
					k := r.IntN(len(late))
					late[k]()
					late = slices.Delete(late, k, k+1)
				}
				if err == nil {
					good++
					lsn = m.AppliedLSN
					hash, err = d.Hash()
					must(t, err)
				}
				if good == 0 {
					continue
				}
				gotHash, gotLSN, _ := restored(t, inner)
				if gotLSN < lsn || (gotLSN == lsn && gotHash != hash) {
					t.Fatalf("round %d: restored LSN %d, hash %x; returned was %d, %x", i, gotLSN, gotHash, lsn, hash)
				}
			}
			if good < 5 {
				t.Fatalf("%d snapshots of 60", good)
			}
		})
	}
}

// TestRestoreReadsFormat1: a store of before epochs in keys restores, and the
// next snapshot goes on from it without writing its tables again.
func TestRestoreReadsFormat1(t *testing.T) {
	store := mem.New(mem.Options{Immutable: func(string) bool { return true }})
	fs := vfs.NewMem()
	d := openMem(t, fs, Options{Manual: true})
	var old Manifest
	for lsn := range uint64(3) {
		write(t, d, lsn+1, func(b *Batch) { b.PutFlow(flow(fmt.Sprint(lsn), true, 100)) })
		var err error
		old, err = snapshotByContent(t.Context(), d, store, SnapshotOptions{})
		must(t, err)
	}
	if _, lsn, m := restored(t, store); lsn != 3 || m.Format != 1 || m.Sequence != 3 {
		t.Fatalf("restored snapshot %v of format %d at LSN %d", m.id(), m.Format, lsn)
	}
	must(t, d.Close())
	d = openMem(t, fs, Options{Manual: true})
	for i := range 5 {
		m, err := d.Snapshot(t.Context(), store, "p", SnapshotOptions{Epoch: 9})
		must(t, err)
		if m.Format != 2 || m.Sequence != old.Sequence+1+uint64(i) || m.Stats.NewTables != 0 || m.Stats.Tables != 3 || m.Stats.Puts != 1 {
			t.Errorf("snapshot %d: %v of format %d, %+v", i, m.id(), m.Format, m.Stats)
		}
		if _, lsn, got := restored(t, store); lsn != 3 || got.id() != m.id() {
			t.Errorf("restored snapshot %v at LSN %d", got.id(), lsn)
		}
	}
	if got := objects(t, store, "snapshot"); len(got) != 2 {
		t.Errorf("snapshots that are left: %v", got)
	}
	if got := objects(t, store, "table"); len(got) != 3 {
		t.Errorf("tables that are left: %v", got)
	}
}

// TestRestoreBesidePrune: the owner deletes the snapshot being restored.
func TestRestoreBesidePrune(t *testing.T) {
	store, ctx := mem.New(mem.Options{}), t.Context()
	d := openMem(t, vfs.NewMem(), Options{Manual: true})
	lsn := uint64(0)
	take := func() {
		lsn++
		write(t, d, lsn, func(b *Batch) { b.PutFlow(flow("a", true, 100)) })
		must(t, d.Compact(ctx))
		_, err := d.Snapshot(ctx, store, "p", SnapshotOptions{Epoch: 1})
		must(t, err)
	}
	take()
	gets, busy := 0, false
	racing := blob.NewFaulty(store, func(op blob.Op) blob.Fault {
		if op.Kind == blob.KindGet && !busy && gets < 2 {
			gets, busy = gets+1, true
			for range 4 {
				take()
			}
			busy = false
		}
		return blob.Fault{}
	}, blob.FaultHooks{})
	m, err := Restore(ctx, racing, "p", vfs.NewMem(), "p")
	if err != nil || m.AppliedLSN != lsn || gets != 2 {
		t.Errorf("restored up to %d of %d, %v (%d times raced)", m.AppliedLSN, lsn, err, gets)
	}
}

func TestKeysOfSnapshotsAreParsed(t *testing.T) {
	sha := sum(nil)
	for name, want := range map[string]string{
		"snapshot/0000000000000002":                  "manifest 0 2",
		"snapshot/000000000000000a-0000000000000002": "manifest 10 2",
		"snapshot/000000000000000A-0000000000000002": "",
		"snapshot/0000000000000000-0000000000000002": "",
		"snapshot/a-2": "",
		"snapshot/":    "",
		"table/" + sha: "table 0 0",
		"table/" + sha + "-000000000000000a-0000000000000002": "table 10 2",
		"table/" + sha + "-0000000000000002":                  "",
		"table/" + sha + "000000000000000a-0000000000000002":  "",
		"table/" + sha[1:]:                                      "",
		"table/" + strings.ToUpper(sha):                         "",
		"table/" + sha + "-000000000000000a-0000000000000002/x": "",
		"other": "",
	} {
		got := ""
		switch id, manifest, table := SnapshotKey("p000/snapshot", "p000/snapshot/"+name); {
		case manifest:
			got = fmt.Sprint("manifest ", id.Epoch, id.Sequence)
		case table:
			got = fmt.Sprint("table ", id.Epoch, id.Sequence)
		}
		if got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// breaking writes other bytes than it was given under keys of one folder.
type breaking struct {
	blob.Store
	folder string
}

func (s breaking) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	if strings.Contains(key, s.folder) {
		data = flip(slices.Clone(data))
	}
	return s.Store.Put(ctx, key, data, o)
}

func TestSnapshotReadsBackWhatItWrote(t *testing.T) {
	for _, folder := range []string{"/table/", "/snapshot/"} {
		d := openMem(t, vfs.NewMem(), Options{})
		write(t, d, 1, func(b *Batch) { b.PutFlow(flow("f", true, 100)) })
		_, err := d.Snapshot(t.Context(), breaking{mem.New(mem.Options{}), folder}, "p", SnapshotOptions{Epoch: 1})
		if err == nil || !strings.Contains(err.Error(), "read back") {
			t.Errorf("%s: error %v", folder, err)
		}
	}
}

func FuzzManifest(f *testing.F) {
	good := Manifest{Format: 1, Sequence: 3, AppliedLSN: 9, Files: []ManifestFile{
		{Name: "000004.sst", Size: 10, SHA256: sum([]byte("x"))},
		{Name: "OPTIONS-000003", Size: 1, SHA256: sum([]byte("o")), Data: []byte("o")},
		{Name: "marker.manifest.000001.MANIFEST-000001", SHA256: sum(nil)},
	}}
	data, err := good.encode()
	if err != nil {
		f.Fatal(err)
	}
	_, body, _ := strings.Cut(string(data), "\n")
	f.Add(body)
	newer := good
	newer.Format, newer.Epoch, newer.Files = 2, 7, slices.Clone(good.Files)
	newer.Files[0].Object = tableObject{sum([]byte("x")), SnapshotID{6, 2}}.String()
	if data, err = newer.encode(); err != nil {
		f.Fatal(err)
	}
	_, newBody, _ := strings.Cut(string(data), "\n")
	f.Add(newBody)
	f.Add(strings.Replace(newBody, "-0000000000000006", "-6", 1))
	f.Add(strings.Replace(body, "000004.sst", "../4.sst", 1))
	f.Add(strings.Replace(body, `"format":1`, `"format":2`, 1))
	f.Fuzz(func(t *testing.T, body string) {
		// The checksum is made right, so that what is behind it is reached.
		m, err := decodeManifest([]byte(manifestMagic + sum([]byte(body)) + "\n" + body))
		if _, raw := decodeManifest([]byte(body)); raw == nil {
			t.Fatal("taken without a checksum")
		}
		if err != nil {
			return
		}
		for _, file := range m.Files {
			if strings.ContainsAny(file.Name, "/\\\x00") || strings.HasPrefix(file.Name, ".") {
				t.Fatalf("file name %q", file.Name)
			}
		}
		data, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeManifest(data)
		if err != nil || fmt.Sprint(again) != fmt.Sprint(m) {
			t.Fatalf("%v became %v, %v", m, again, err)
		}
	})
}
