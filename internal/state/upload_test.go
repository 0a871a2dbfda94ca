package state

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

// crowd is a store whose first writes wait for each other.
type crowd struct {
	blob.Store
	want int // writes that must be under way at the same time

	mu        sync.Mutex
	now, most int
	met       chan struct{} // closed when want writes were
}

func (s *crowd) Put(ctx context.Context, key string, data []byte, o blob.PutOptions) (blob.Token, error) {
	if !strings.Contains(key, "/table/") {
		return s.Store.Put(ctx, key, data, o)
	}
	s.mu.Lock()
	s.now++
	if s.most = max(s.most, s.now); s.now == s.want {
		select {
		case <-s.met:
		default:
			close(s.met)
		}
	}
	s.mu.Unlock()
	<-s.met
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.now--
	}()
	return s.Store.Put(ctx, key, data, o)
}

func TestUploadsRunTogetherWithinTheirBound(t *testing.T) {
	const tables = 3 * uploadsAtOnce
	s := &crowd{Store: mem.New(mem.Options{}), want: uploadsAtOnce, met: make(chan struct{})}
	d := openMem(t, vfs.NewMem(), Options{})
	for lsn := range uint64(tables) {
		write(t, d, lsn+1, func(b *Batch) { b.PutFlow(flow(fmt.Sprint(lsn), true, 100)) })
		must(t, d.Flush())
	}
	first, err := d.Snapshot(t.Context(), s, "p", SnapshotOptions{Epoch: 1})
	must(t, err)
	if s.most != uploadsAtOnce {
		t.Errorf("%d uploads at once, want %d", s.most, uploadsAtOnce)
	}
	st := first.Stats
	if st.NewTables != st.Tables || st.Tables == 0 || st.Puts != int64(st.NewTables)+1 || st.Gets != st.Puts || st.GotBytes != st.PutBytes || st.Lists != 2 || st.Deletes != 0 {
		t.Errorf("first snapshot: %+v", st)
	}
	// What did not change is neither written nor read.
	again, err := d.Snapshot(t.Context(), s, "p", SnapshotOptions{Epoch: 1})
	must(t, err)
	if st := again.Stats; st.NewTables != 0 || st.Tables != first.Stats.Tables || st.Puts != 1 || st.Gets != 1 {
		t.Errorf("second snapshot: %+v", st)
	}
	if hash, lsn, _ := restored(t, s); lsn != tables {
		t.Errorf("restored up to %d, hash %x", lsn, hash)
	}
}

func FuzzSnapshotKey(f *testing.F) {
	f.Add("snapshot/0000000000000002")
	f.Add("snapshot/000000000000000a-0000000000000002")
	f.Add("table/" + sum(nil))
	f.Add("table/" + sum(nil) + "-000000000000000a-0000000000000002")
	f.Fuzz(func(t *testing.T, key string) {
		id, manifest, table := SnapshotKey("p", "p/"+key)
		switch {
		case manifest && ManifestKey("p", id) != "p/"+key:
			t.Errorf("%q is a manifest of %v, whose key is %q", key, id, ManifestKey("p", id))
		case table:
			o, ok := parseTable(strings.TrimPrefix(key, "table/"))
			if !ok || o.by != id || TableKey("p", ManifestFile{Object: o.String()}) != "p/"+key {
				t.Errorf("%q is the table %v", key, o)
			}
		}
	})
}
