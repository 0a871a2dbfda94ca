package sink

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestCrashAtAnyWrite takes the disk away at each operation of the sinks in
// turn, with any part of what was not synced, and starts again from what is
// left, the journals included: each line must be there once.
func TestCrashAtAnyWrite(t *testing.T) {
	seeds := uint64(150)
	if testing.Short() {
		seeds = 20
	}
	for seed := range seeds {
		r := seeded(seed)
		mem := vfs.NewCrashableMem()
		fs := &faultFS{FS: mem}
		w := newWorld(t, fs, 3, func(c *Config) {
			c.SegmentBytes, c.BatchRecords = 2<<10, 6
			if seed%3 == 0 { // writes of several disk blocks
				c.SegmentBytes, c.BatchRecords, c.FlushInterval = 64<<10, 500, 4*time.Second
			}
			if seed%2 == 0 {
				c.ExportDir = "export"
			}
		})
		var clone *vfs.MemFS
		var had []int // entries journaled at the crash
		left := r.IntN(300)
		fs.on(func(op, name string) error {
			if left--; left == 0 {
				clone = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: r.IntN(101), RNG: r})
				for _, j := range w.journals {
					had = append(had, len(j))
				}
			}
			return nil
		})
		for i := 0; i < 120 && clone == nil; i++ {
			w.step(r.IntN)
			if r.IntN(10) == 0 { // the tables of one partition get ahead on disk
				must(t, w.dbs[r.IntN(3)].Flush())
			}
		}
		if clone == nil {
			clone = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: r.IntN(101), RNG: r})
		}
		for i := range had { // what came after the crash did not happen
			w.journals[i] = w.journals[i][:had[i]]
		}
		_ = w.sinks.Close(context.Background())
		w.fs = &faultFS{FS: clone}
		for range 10 {
			w.open()
			w.step(r.IntN)
			w.kickAll()
			w.flush()
			w.check(logs)
			if w.cfg.ExportDir != "" {
				w.check("export")
			}
			w.close()
			if r.IntN(3) == 0 {
				break
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// step is a bit of life: an entry, a request, some time.
func (w *world) step(intn func(int) int) {
	part := intn(len(w.dbs))
	if intn(4) > 0 {
		part = 0 // the others are quiet, for segments sometimes
	}
	w.commit(part, "a/s/1", []string{"hs", "stmd", "ttt", "sd", "h"}[intn(5)])
	w.sinks.Kick(part)
	w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a"})
	w.clock.advance(time.Duration(intn(300)) * time.Millisecond)
}

func TestTornEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		tear func(raw []byte) []byte
		lost int // lines of an untracked log that are gone
	}{
		{"half a line", func(raw []byte) []byte { return append(raw, `{"cursor":"p0-9`...) }, 0},
		{"last line cut", func(raw []byte) []byte { return raw[:len(raw)-7] }, 1},
		{"only the end is missing", func(raw []byte) []byte { return raw[:len(raw)-1] }, 1},
		{"zeroes behind", func(raw []byte) []byte { return append(raw, make([]byte, 5000)...) }, 0},
		{"hole", func(raw []byte) []byte { clear(raw[len(raw)-200 : len(raw)-20]); return raw }, 1},
		{"hole with lines behind", func(raw []byte) []byte { clear(raw[len(raw)/2-40 : len(raw)/2+20]); return raw }, 1},
		{"everything", func(raw []byte) []byte { return nil }, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, vfs.NewMem(), 1, nil)
			for range 3 {
				w.commit(0, "a/s/1", "hstmd")
				w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a", RequestID: strings.Repeat("r", 150)})
			}
			w.close()
			for _, kind := range []Kind{Events, Transcripts, Access} {
				path := logs + "/" + w.files(logs, kind)[0]
				raw := c.tear(slices.Clone(w.read(path)))
				must(t, writeFile(w.fs, logs, path, raw))
			}
			w.tables = "again" // what was not whole is in the outbox still
			w.open()
			w.flush()
			w.check(logs)
			w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a", RequestID: "next"})
			w.flush()
			recs, _, err := w.sinks.Tail(context.Background(), Access, "a", "", 0)
			must(t, err)
			if len(recs) != 4-c.lost || !strings.Contains(string(recs[len(recs)-1]), "next") {
				t.Errorf("%d records in the access log: %s", len(recs), recs)
			}
			all, _ := w.fs.List(logs)
			for _, n := range all {
				if strings.HasSuffix(n, tmpSuffix) {
					t.Errorf("%s is left", n)
				}
			}
			w.close()
		})
	}
}

// TestCutOnAFullDisk: the server starts, and cuts when there is room.
func TestCutOnAFullDisk(t *testing.T) {
	fs := &faultFS{FS: vfs.NewMem()}
	w := newWorld(t, fs, 1, nil)
	w.commit(0, "a/s/1", "stmd")
	w.close()
	path := logs + "/" + w.files(logs, Events)[0]
	must(t, writeFile(fs, logs, path, append(w.read(path), "torn"...)))
	fs.on(func(op, _ string) error {
		if op == "write" || op == "create" {
			return errDisk
		}
		return nil
	})
	w.open()
	w.commit(0, "a/s/1", "stmd")
	w.kickAll()
	w.clock.advance(time.Second)
	fs.on(nil)
	w.flush()
	w.check(logs)
	w.close()
}

func TestTail(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, vfs.NewMem(), 1, func(c *Config) { c.SegmentBytes = 3 << 10 })
	tail := func(kind Kind, tenant, after string, limit int) (cursors []string, next string) {
		t.Helper()
		recs, next, err := w.sinks.Tail(ctx, kind, tenant, after, limit)
		must(t, err)
		for _, r := range recs {
			if !strings.Contains(string(r), `"tenant":"`+tenant+`",`) {
				t.Errorf("tenant %s sees %s", tenant, r)
			}
			c, _, _ := strings.Cut(strings.TrimPrefix(string(r), `{"cursor":"`), `"`)
			cursors = append(cursors, c)
		}
		return cursors, next
	}
	if got, next := tail(Events, "a", "", 0); len(got) != 0 || next != "0:0" {
		t.Errorf("empty log: %q, next %q", got, next)
	}
	var a, b []string
	for i := range 60 {
		tenant := "a"
		if i%3 == 0 {
			tenant = "b"
		}
		w.commit(0, tenant+"/s/1", "d")
		w.sinks.Access(Record{Time: w.clock.Now(), Tenant: tenant})
		w.kickAll()
		w.flush()
		c := fmt.Sprintf("p0-%d.0", i+1)
		if tenant == "a" {
			a = append(a, c)
		} else {
			b = append(b, c)
		}
	}
	if n := len(w.files(logs, Events)); n < 3 {
		t.Fatalf("%d segments", n)
	}
	for _, c := range []struct {
		tenant string
		all    []string
	}{{"a", a}, {"b", b}, {"", nil}, {"c", nil}} {
		for _, limit := range []int{1, 7, 1000} {
			got, next := tail(Events, c.tenant, "", limit)
			if want := c.all[max(len(c.all)-limit, 0):]; !slices.Equal(got, want) {
				t.Errorf("newest %d of %q: %q, want %q", limit, c.tenant, got, want)
			}
			if more, again := tail(Events, c.tenant, next, limit); len(more) != 0 || again != next {
				t.Errorf("at the end: %q, next %q after %q", more, again, next)
			}
			var walked []string
			for at := "0:0"; ; {
				page, next := tail(Events, c.tenant, at, limit)
				walked = append(walked, page...)
				if next == at {
					break
				}
				if len(page) > limit {
					t.Errorf("page of %d", len(page))
				}
				at = next
			}
			if !slices.Equal(walked, c.all) {
				t.Errorf("walk by %d of %q: %q", limit, c.tenant, walked)
			}
		}
	}
	_, next := tail(Events, "a", "", 1)
	w.commit(0, "a/s/1", "d")
	w.kickAll()
	w.flush()
	if got, _ := tail(Events, "a", next, 5); !slices.Equal(got, []string{"p0-61.0"}) {
		t.Errorf("new records: %q", got)
	}
	if got, _ := tail(Access, "a", "", 1000); len(got) != 40 {
		t.Errorf("%d requests of a", len(got))
	}
	// Cursors that no page gave: within a line, of a removed segment, beyond.
	for _, after := range []string{"1:5", "1:0", "2:100"} {
		if got, _ := tail(Events, "a", after, 1000); !slices.Contains(got, "p0-60.0") {
			t.Errorf("after %s: %q", after, got)
		}
	}
	for _, after := range []string{"999:0", "1:999999999"} {
		_, next := tail(Events, "a", after, 10)
		if _, err := parseMark(next); err != nil {
			t.Errorf("after %s: next %q", after, next)
		}
	}
	for _, after := range []string{"x", "1", "1:", ":1", "-1:0", "1:-1", "1:1:1", "99999999999999999999:0"} {
		if _, _, err := w.sinks.Tail(ctx, Events, "a", after, 1); err != ErrBadCursor {
			t.Errorf("cursor %q: %v", after, err)
		}
	}
	if _, _, err := w.sinks.Tail(ctx, "passwords", "a", "", 1); err != ErrNoLog {
		t.Errorf("%v", err)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if _, _, err := w.sinks.Tail(gone, Events, "a", "0:0", 1); err == nil {
		t.Error("a cancelled Tail answered")
	}
	w.close()
}

// TestTailIsBounded: much of another tenant makes pages short, not calls long.
func TestTailIsBounded(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 0, func(c *Config) { c.QueueRecords = 1 << 20 })
	long := strings.Repeat("x", 500)
	add := func(tenant string, n int) {
		for range n {
			w.sinks.Access(Record{Time: w.clock.Now(), Tenant: tenant, RequestID: long, Session: long})
		}
		w.flush()
	}
	add("a", 1)
	for range 4 {
		add("noise", 2500)
	}
	ctx := context.Background()
	recs, next, err := w.sinks.Tail(ctx, Access, "a", "", 10)
	must(t, err)
	if len(recs) != 0 {
		t.Errorf("%d records from behind the bound", len(recs))
	}
	at, calls, found := "0:0", 0, 0
	for at != next {
		recs, to, err := w.sinks.Tail(ctx, Access, "a", at, 10)
		must(t, err)
		if found += len(recs); to == at {
			t.Fatalf("no progress at %s", at)
		}
		at = to
		calls++
	}
	if found != 1 || calls < 2 {
		t.Errorf("%d records in %d calls", found, calls)
	}
	recs, _, err = w.sinks.Tail(ctx, Access, "noise", "", MaxTailRecords)
	must(t, err)
	if len(recs) >= MaxTailRecords+1 || len(recs) < 900 {
		t.Errorf("page of %d", len(recs))
	}
	w.close()
}

// TestTailOfLongLines: a line longer than a call's bound is still given.
func TestTailOfLongLines(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 1, nil)
	w.commit(0, "a/s/1", "d")
	ev := w.journals[0][0].events[0]
	big := ev.CloneVT()
	big.Lsn, big.Data = 2, []byte(`{"text":"`+strings.Repeat("y", 6<<20)+`"}`)
	w.journals[0] = append(w.journals[0], commit{2, "a/s/1", append(w.journals[0][0].events[:0:0], big)})
	w.apply(0, w.journals[0][1])
	w.commit(0, "a/s/1", "d")
	w.kickAll()
	w.flush()
	w.check(logs)
	ctx := context.Background()
	var cursors []string
	for at := "0:0"; len(cursors) < 4; {
		recs, next, err := w.sinks.Tail(ctx, Events, "a", at, 1)
		must(t, err)
		if next == at {
			break
		}
		for _, r := range recs {
			cursors = append(cursors, string(r[11:17]))
		}
		at = next
	}
	if !slices.Equal(cursors, []string{"p0-1.0", "p0-2.0", "p0-3.0"}) {
		t.Errorf("%q", cursors)
	}
	recs, _, err := w.sinks.Tail(ctx, Events, "a", "", 2)
	must(t, err)
	if len(recs) == 0 {
		t.Error("the newest page is empty")
	}
	w.close()
}
