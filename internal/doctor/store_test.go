package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testStore is a store of one partition whose log has frames 3 to 5 of epoch 1,
// a seal at 6, what epoch 1 put too late at 7, and frames 10 and 11 of epoch 2;
// entries 1 to 4 are in snapshots.
type testStore struct {
	*mem.Store
	t      testing.TB
	tables *state.DB
}

const window = 4

func newTestStore(t testing.TB) *testStore {
	s := &testStore{Store: mem.New(mem.Options{}), t: t}
	s.put("layout.json", []byte(`{"format":1,"partitions":2}`))
	s.owner(cluster.Manifest{Format: 1, Epoch: 2, Node: "n1", Nonce: "00000000000000aa", Window: window, HeadSeq: 3, HeadLSN: 3})
	for seq := uint64(3); seq <= 5; seq++ {
		s.frame(1, seq, seq, 1)
	}
	s.put(objectlog.Key("p000", 2), bytes.Repeat([]byte("x"), 99)) // a trim that was cut short
	s.seal(2, 6, 10)
	s.frame(1, 7, 7, 1)
	s.frame(2, 10, 6, 2)
	s.frame(2, 11, 8, 1)
	var err error
	s.tables, err = state.Open("t", state.Options{FS: vfs.NewMem(), Manual: true})
	must(t, err)
	t.Cleanup(func() { must(t, s.tables.Close()) })
	s.snapshot(3)
	s.snapshot(4)
	s.put("nodes/n1.json", []byte(`{"format":1,"id":"n1","address":"","version":"","nonce":"00000000000000aa","counter":1,"ttl_ms":10000,"released":false}`))
	s.put("blobs/00/x", []byte("value"))
	s.put("types/default", []byte("types"))
	return s
}

func (s *testStore) put(key string, data []byte) {
	_, err := s.Put(context.Background(), key, data, blob.PutOptions{})
	must(s.t, err)
}

func (s *testStore) remove(key string) {
	must(s.t, s.Delete(context.Background(), key, blob.DeleteOptions{}))
}

func (s *testStore) owner(m cluster.Manifest) {
	raw, err := json.Marshal(m)
	must(s.t, err)
	s.put(cluster.OwnerKey(0), raw)
}

func (s *testStore) frame(epoch, seq, lsn uint64, count uint32) {
	var body []byte
	for range count {
		body = journal.AppendEntry(body, []byte("entry"))
	}
	s.put(objectlog.Key("p000", seq), journal.AppendFrame(nil, journal.Frame{Epoch: epoch, Nonce: epoch, Seq: seq, FirstLSN: lsn, Count: count, Body: body}))
}

func (s *testStore) seal(epoch, seq, resume uint64) {
	s.put(objectlog.Key("p000", seq), objectlog.AppendSeal(nil, objectlog.Seal{Epoch: epoch, Nonce: epoch, Seq: seq, Resume: resume}))
}

func (s *testStore) snapshot(lsn uint64) {
	b := s.tables.NewBatch()
	defer b.Close()
	b.PutFlow(&wire.Flow{Id: fmt.Sprint("f", lsn)})
	must(s.t, b.Commit(lsn))
	_, err := s.tables.Snapshot(context.Background(), s, "p000/snapshot", state.SnapshotOptions{Epoch: 2})
	must(s.t, err)
}

// keys are those that begin with prefix.
func (s *testStore) keys(prefix string) (out []string) {
	infos, err := s.List(context.Background(), prefix, "", blob.MaxList)
	must(s.t, err)
	for _, i := range infos {
		out = append(out, i.Key)
	}
	return out
}

func (s *testStore) flip(key string) {
	o, err := s.Get(context.Background(), key)
	must(s.t, err)
	o.Data[len(o.Data)/2] ^= 1
	s.put(key, o.Data)
}

func TestStoreReport(t *testing.T) {
	s := newTestStore(t)
	var objects, size int64
	r, err := Store(t.Context(), s, func(o, b int64) { objects, size = o, b })
	must(t, err)
	if r.Status() != "ok" || r.ExitStatus() != 0 || r.Counts[Harmless] != 1 {
		t.Errorf("%+v", r)
	}
	want := PartitionReport{
		ID: 0, Epoch: 2, Node: "n1", HeadSeq: 3, HeadLSN: 3, TailSeq: 12, TailLSN: 9,
		Frames: 5, Entries: 6, Seals: 1, Left: 2, Snapshots: 2, SnapshotLSN: 4, Tables: 2,
	}
	if len(r.Partitions) != 2 || r.Partitions[0] != want || r.Partitions[1] != (PartitionReport{ID: 1}) {
		t.Errorf("partitions %+v", r.Partitions)
	}
	if r.Objects != int64(len(s.keys(""))) || r.Nodes != 1 || r.Values != 1 || objects != r.Read || size != r.ReadBytes || r.Read == 0 {
		t.Errorf("%+v", r)
	}
	var text, raw bytes.Buffer
	must(t, r.WriteText(&text))
	must(t, r.WriteJSON(&raw))
	if !strings.Contains(text.String(), "log: from object 3, the next is 12; entries up to 8 (5 frames, 1 seal)") {
		t.Error(text.String())
	}
	var back struct {
		Status   string
		Findings []Finding
	}
	must(t, json.Unmarshal(raw.Bytes(), &back))
	if back.Status != "ok" || len(back.Findings) != 1 {
		t.Errorf("%+v", back)
	}
}

func TestStoreFindings(t *testing.T) {
	log := func(seq uint64) string { return objectlog.Key("p000", seq) }
	newest := state.ManifestKey("p000/snapshot", state.SnapshotID{Epoch: 2, Sequence: 2})
	older := state.ManifestKey("p000/snapshot", state.SnapshotID{Epoch: 2, Sequence: 1})
	good := cluster.Manifest{Format: 1, Epoch: 2, Node: "n1", Nonce: "00000000000000aa", Window: window, HeadSeq: 3, HeadLSN: 3}
	for name, c := range map[string]struct {
		hurt func(s *testStore)
		want []string // "severity key: words"; harmless ones are left out
	}{
		"nothing":            {func(*testStore) {}, nil},
		"layout gone":        {func(s *testStore) { s.remove("layout.json") }, []string{"damage layout.json: is missing"}},
		"layout damaged":     {func(s *testStore) { s.put("layout.json", []byte("{")) }, []string{"damage layout.json: not as it was written"}},
		"layout too new":     {func(s *testStore) { s.put("layout.json", []byte(`{"format":2,"partitions":1}`)) }, []string{"warning layout.json: format 2"}},
		"partition too many": {func(s *testStore) { s.put("p007/owner.json", nil) }, []string{"warning p007: nothing reads"}},
		"owner gone":         {func(s *testStore) { s.remove("p000/owner.json") }, []string{"damage p000/owner.json: is missing"}},
		"owner damaged":      {func(s *testStore) { s.flip("p000/owner.json"); s.put("p000/owner.json", []byte("x")) }, []string{"damage p000/owner.json: cannot be read"}},
		"owner put back":     {func(s *testStore) { m := good; m.Epoch = 1; s.owner(m) }, []string{"damage p000/owner.json: older manifest"}},
		"head at a seal":     {func(s *testStore) { m := good; m.HeadSeq, m.HeadLSN = 6, 6; s.owner(m) }, []string{"damage p000/snapshot: between are lost"}},
		"released":           {func(s *testStore) { m := good; m.Released, m.TailSeq = true, 12; s.owner(m) }, nil},
		"released and cut":   {func(s *testStore) { m := good; m.Released, m.TailSeq = true, 13; s.owner(m) }, []string{"damage p000/owner.json: released the partition at sequence 13"}},
		"first of log gone":  {func(s *testStore) { s.remove(log(3)) }, []string{"damage " + log(3) + ": objects 3 to 3 of the log"}},
		"seal gone":          {func(s *testStore) { s.remove(log(6)) }, []string{"damage " + log(6) + ": objects 6 to 6 of the log"}},
		"last gone":          {func(s *testStore) { s.remove(log(11)) }, nil}, // nothing tells
		"all behind snap gone": {func(s *testStore) {
			s.remove(log(4))
			s.remove(log(5))
			s.remove(log(6))
			s.remove(log(7))
			s.remove(log(10))
			s.remove(log(11))
		}, []string{"damage p000/log: ends before entry 4"}},
		"ahead of the end":     {func(s *testStore) { s.frame(2, 13, 10, 1); s.frame(2, 15, 12, 1) }, nil},
		"too far ahead":        {func(s *testStore) { s.frame(2, 16, 10, 1) }, []string{"damage " + log(12) + ": objects 12 to 15"}},
		"frame damaged":        {func(s *testStore) { s.flip(log(10)) }, []string{"damage " + log(10) + ": cannot be read"}},
		"left one damaged":     {func(s *testStore) { s.flip(log(7)) }, nil},
		"seal damaged":         {func(s *testStore) { s.flip(log(6)) }, []string{"damage " + log(6) + ": cannot be read"}},
		"frame moved":          {func(s *testStore) { o, _ := s.Get(t.Context(), log(4)); s.put(log(5), o.Data) }, []string{"damage " + log(5) + ": number 4"}},
		"entries skipped":      {func(s *testStore) { s.frame(2, 11, 9, 1) }, []string{"damage " + log(11) + ": first entry is 9"}},
		"epoch without a seal": {func(s *testStore) { s.frame(3, 11, 8, 1) }, []string{"damage " + log(11) + ": no seal since epoch 2", "damage p000/owner.json: older manifest"}},
		"seal of old epoch":    {func(s *testStore) { s.seal(2, 12, 16) }, []string{"damage " + log(12) + ": seal of epoch 2 follows"}},
		"count is wrong": {func(s *testStore) {
			s.put(log(11), journal.AppendFrame(nil, journal.Frame{Epoch: 2, Nonce: 2, Seq: 11, FirstLSN: 8, Count: 2}))
		}, []string{"damage " + log(11) + ": has 0 entries"}},
		"log key": {func(s *testStore) { s.put("p000/log/7", nil) }, []string{"warning p000/log/7: nothing that perdure"}},
		"unknown keys": {func(s *testStore) {
			s.put("a", nil)
			s.put("p000/a", nil)
			s.put("p000/snapshot/a", nil)
			s.put("z/z", nil)
		}, []string{"warning a: ", "warning z/z: ", "warning p000/a: ", "warning p000/snapshot/a: "}},
		"proof left":       {func(s *testStore) { s.put("proof/x/y", nil) }, nil},
		"node damaged":     {func(s *testStore) { s.put("nodes/n2.json", []byte("x")) }, []string{"warning nodes/n2.json: "}},
		"manifest damaged": {func(s *testStore) { s.flip(newest) }, []string{"damage " + newest + ": "}},
		"older damaged":    {func(s *testStore) { s.flip(older) }, []string{"warning " + older + ": "}},
		"no snapshot":      {func(s *testStore) { s.remove(older); s.remove(newest) }, []string{"damage p000/snapshot: holds entries up to 0"}},
		"journal in files": {func(s *testStore) { s.put("p000/owner.json", []byte(`{"epoch":2}`)) }, []string{"warning p000/log/: local files"}},
		"tables damaged": {func(s *testStore) {
			for _, k := range s.keys("p000/snapshot/table/") {
				s.flip(k)
			}
		}, []string{"warning p000/snapshot/table/: not whole", "damage p000/snapshot/table/: not whole", "damage p000/snapshot/table/: not whole", "damage p000/snapshot: holds entries up to 0"}},
		"table gone": {func(s *testStore) { s.remove(s.keys("p000/snapshot/table/")[0]) }, []string{"* p000/snapshot/table/: not whole"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTestStore(t)
			c.hurt(s)
			r, err := Store(t.Context(), s, nil)
			must(t, err)
			got := slices.DeleteFunc(slices.Clone(r.Findings), func(f Finding) bool { return f.Severity == Harmless })
			for _, w := range c.want {
				head, words, _ := strings.Cut(w, ": ")
				severity, key, _ := strings.Cut(head, " ")
				at := slices.IndexFunc(got, func(f Finding) bool {
					return (severity == "*" || string(f.Severity) == severity) && strings.HasPrefix(f.Key, key) && strings.Contains(f.Detail, words)
				})
				if at < 0 {
					t.Errorf("not found: %s", w)
				} else {
					got = slices.Delete(got, at, at+1)
				}
			}
			if name == "table gone" {
				return // a table of one snapshot or of both
			}
			if len(got) > 0 {
				t.Errorf("found beside: %+v", got)
			}
		})
	}
}

// TestStoreWhileServersWork: what is trimmed, appended and replaced between two
// requests is no finding.
func TestStoreWhileServersWork(t *testing.T) {
	for at := range uint64(60) {
		s := newTestStore(t)
		busy := false
		working := blob.NewFaulty(s, func(op blob.Op) blob.Fault {
			if op.N == at && !busy {
				busy = true
				for seq := uint64(12); seq < 30; seq++ {
					s.frame(2, seq, seq-3, 1)
				}
				for lsn := uint64(5); lsn <= 12; lsn++ {
					s.snapshot(lsn)
				}
				s.owner(cluster.Manifest{Format: 1, Epoch: 2, Node: "n1", Nonce: "00000000000000aa", Window: window, HeadSeq: 15, HeadLSN: 12})
				for _, seq := range []uint64{3, 4, 5, 10, 11, 12, 13, 14} {
					s.remove(objectlog.Key("p000", seq))
				}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		r, err := Store(t.Context(), working, nil)
		must(t, err)
		if r.Status() != "ok" {
			t.Errorf("changed at request %d: %+v", at, r.Findings)
		}
	}
}

func TestStoreThatFails(t *testing.T) {
	s := newTestStore(t)
	for at := uint64(1); ; at++ {
		asked := false
		failing := blob.NewFaulty(s, func(op blob.Op) blob.Fault {
			if op.N == at {
				asked = true
				return blob.Fault{Outcome: blob.Refused}
			}
			return blob.Fault{}
		}, blob.FaultHooks{})
		_, err := Store(t.Context(), failing, nil)
		if !asked {
			break
		}
		if err == nil {
			t.Errorf("request %d failed, and the report is there", at)
		}
	}
}
