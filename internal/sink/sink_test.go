package sink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/wire"
)

const logs = "data/logs"

func TestEventsAndMessagesAreWrittenOnce(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 3, func(c *Config) { c.ExportDir = "data/export"; c.BatchRecords = 4 })
	if w.clock.pending() != 0 {
		t.Fatal("a timer is set while nothing happens")
	}
	w.commit(0, "acme/s/one", "hs")
	w.commit(1, "beta/s/two", "stmd")
	w.commit(0, "acme/s/one", "tmd")
	w.commit(2, "acme/x/flow", "stmd") // no session: not for the logs
	w.kickAll()
	w.flush()
	w.journals[2] = nil
	w.check(logs)
	w.check("data/export")

	var ev, msg line
	for _, l := range w.lines(logs, Events) {
		if l.Cursor == "p1-1.3" {
			ev = l
		}
	}
	for _, l := range w.lines(logs, Transcripts) {
		if l.Cursor == "p1-1.2" {
			msg = l
		}
	}
	if ev.Tenant != "beta" || ev.Session != "two" || ev.TurnID != "t1" || ev.Event != "turn.completed" ||
		ev.At != "2026-03-01T10:00:00.000Z" || !strings.Contains(string(ev.Data), `"n":1`) {
		t.Errorf("event %+v", ev)
	}
	if msg.Tenant != "beta" || msg.Session != "two" || msg.TurnID != "t1" || string(msg.Message) != `{"role":"assistant","content":"yo"}` {
		t.Errorf("message %+v", msg)
	}
	st := w.sinks.Stats()
	if st.Events != 8 || st.Messages != 6 || st.OutboxRows != 0 || st.EventsDropped != 0 || st.WriteErrors != 0 {
		t.Errorf("%+v", st)
	}
	if st.Wait.Count != 8 || st.Wait.Max != 200 || st.Wait.Buckets[4] != 8 || st.Wait.Buckets[3] != 0 {
		t.Errorf("wait %+v", st.Wait)
	}
	set := w.clock.set
	w.clock.advance(time.Hour)
	if w.clock.set != set || w.clock.pending() != 0 {
		t.Error("timers run while nothing happens")
	}
	w.close()
}

// TestKickBeforeTheRowsAreVisible: the partition may say so a little early.
func TestKickBeforeTheRowsAreVisible(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 1, nil)
	w.sinks.Kick(0)
	w.clock.advance(w.cfg.FlushInterval)
	w.commit(0, "a/s/1", "stmd")
	w.flush()
	w.check(logs)
	w.close()
}

func TestCloseWritesWhatWaits(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 2, func(c *Config) { c.BatchRecords = 3 })
	for i := range 20 {
		w.commit(i%2, "a/s/1", "stmd")
	}
	w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a", RequestID: "r1"})
	must(t, w.sinks.Close(context.Background()))
	w.check(logs)
	if got := w.lines(logs, Access); len(got) != 1 || got[0].RequestID != "r1" {
		t.Errorf("access log %+v", got)
	}
	w.sinks.Access(Record{})
	w.sinks.Kick(0)
	if w.sinks.Stats().AccessDropped != 1 || w.clock.pending() != 0 {
		t.Error("closed sinks do something")
	}
}

// TestReopenGoesOn: outboxes that show all events again, as after a crash,
// give no line twice, also when a partition was quiet for many segments.
func TestReopenGoesOn(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 2, func(c *Config) { c.SegmentBytes = 4 << 10; c.ExportDir = "export" })
	w.commit(1, "a/s/quiet", "hstmd")
	w.kickAll()
	w.flush()
	for range 3 {
		for range 40 {
			w.commit(0, "a/s/1", "stmd")
			w.kickAll()
			w.flush()
		}
		must(t, w.sinks.Close(context.Background()))
		for _, db := range w.dbs {
			must(t, db.Close())
		}
		w.tables += "again" // fresh ones: their outboxes hold everything
		w.open()
		if w.dbs[0].OutboxLen() < 160 {
			t.Fatalf("outbox holds %d events", w.dbs[0].OutboxLen())
		}
		w.flush()
		w.check(logs)
		w.check("export")
	}
	if n := len(w.files(logs, Events)); n < 5 {
		t.Errorf("%d segments", n)
	}
	w.close()
}

func TestNewLifeOfTheData(t *testing.T) {
	t.Run("tables and journal are gone, the logs stay", func(t *testing.T) {
		w := newWorld(t, vfs.NewMem(), 1, nil)
		for range 9 {
			w.commit(0, "a/s/1", "sd")
		}
		w.close()
		must(t, w.fs.RemoveAll("data/p0"))
		w.journals[0] = nil
		w.open()
		for range 3 {
			w.commit(0, "a/s/1", "sd")
		}
		w.close()
		if n := len(w.lines(logs, Events)); n != 9*2+3*2 {
			t.Errorf("%d events", n)
		}
	})
	t.Run("another data directory exports to the same place", func(t *testing.T) {
		w := newWorld(t, vfs.NewMem(), 1, func(c *Config) { c.ExportDir = "export" })
		for range 3 {
			w.commit(0, "a/s/1", "sd")
		}
		w.close()
		must(t, w.fs.RemoveAll("data"))
		must(t, w.fs.MkdirAll("data", 0o755))
		w.clock.advance(time.Hour)
		w.journals[0] = nil
		w.cfg.ExportDir = ""
		w.open()
		for range 5 { // beyond what the first exported
			w.commit(0, "a/s/1", "sd")
		}
		w.cfg.ExportDir = "export"
		must(t, w.dbs[0].Close())
		w.open()
		w.close()
		if n := len(w.lines("export", Events)); n != 3*2+5*2 {
			t.Errorf("%d events", n)
		}
		if n := len(w.files("export", Events)); n != 2 {
			t.Errorf("%d files", n)
		}
	})
}

func TestRotationAndRetention(t *testing.T) {
	for _, c := range []struct {
		name      string
		change    func(*Config)
		step      time.Duration
		atMost    int64 // bytes of events
		atLeast   int   // segments of transcripts
		oldestDay string
	}{
		{"size", func(c *Config) { c.SegmentBytes, c.MaxBytes = 2<<10, 8<<10 }, time.Second, 11 << 10, 5, ""},
		{"age", func(c *Config) { c.Retention = 48 * time.Hour }, 6 * time.Hour, 1 << 20, 10, "20260324"},
		{"kept", func(*Config) {}, 6 * time.Hour, 1 << 20, 10, "20260301"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, vfs.NewMem(), 1, c.change)
			for i := range 100 {
				w.commit(0, "a/s/1", "smd")
				w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a", Status: 200, RequestID: fmt.Sprint(i)})
				w.kickAll()
				w.flush()
				w.clock.advance(c.step)
			}
			st := w.sinks.Stats()
			if st.EventsBytes > c.atMost || st.AccessBytes > c.atMost {
				t.Errorf("%d bytes of events, %d of access log", st.EventsBytes, st.AccessBytes)
			}
			_, messages := w.want()
			diff(t, "transcripts", w.keys(logs, Transcripts), messages)
			if n := len(w.files(logs, Transcripts)); n < c.atLeast {
				t.Errorf("%d segments of transcripts", n)
			}
			for _, kind := range []Kind{Events, Access} {
				names := w.files(logs, kind)
				if c.oldestDay != "" && !strings.HasPrefix(names[0], string(kind)+"-"+c.oldestDay) {
					t.Errorf("oldest segment is %s", names[0])
				}
			}
			kept := w.lines(logs, Events)
			if last := kept[len(kept)-1]; last.Cursor != "p0-100.2" {
				t.Errorf("newest event is %+v", last)
			}
			all, _ := w.fs.List(logs)
			places := 0
			for _, n := range all {
				if strings.HasSuffix(n, ".places") {
					places++
				}
			}
			if places != 2 {
				t.Errorf("%d files of places are left: %q", places, all)
			}
			w.close()
		})
	}
}

// TestFailingDisk: whatever fails, for however long, all lines are there once
// in the end, and the log of the server says so twice: when and when not.
func TestFailingDisk(t *testing.T) {
	for _, op := range []string{"create", "open", "write", "sync"} {
		t.Run(op, func(t *testing.T) {
			fs := &faultFS{FS: vfs.NewMem()}
			w := newWorld(t, fs, 2, func(c *Config) { c.SegmentBytes = 2 << 10; c.ExportDir = "data/export"; c.BatchRecords = 5 })
			for i := range 60 {
				if i%20 == 5 { // a new segment is due while it fails
					fs.on(func(o, name string) error {
						if o == op {
							return fmt.Errorf("%s %s: %w", o, name, errDisk)
						}
						return nil
					})
				}
				if i%20 == 15 {
					fs.on(nil)
				}
				w.commit(i%2, "a/s/1", "stmd")
				w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a"})
				w.kickAll()
				w.clock.advance(w.cfg.FlushInterval)
			}
			w.flush()
			w.check(logs)
			w.check("data/export")
			if n := len(w.lines(logs, Access)); n != 60 {
				t.Errorf("%d lines in the access log", n)
			}
			st := w.sinks.Stats()
			if st.WriteErrors == 0 || st.AccessQueue != 0 {
				t.Errorf("%+v", st)
			}
			if n := strings.Count(w.log.String(), "log of events and transcripts cannot be written"); n < 1 || n > 3 {
				t.Errorf("the failure is logged %d times:\n%s", n, w.log.String())
			}
			if a, b := strings.Count(w.log.String(), "cannot be written"), strings.Count(w.log.String(), "is written again"); a != b {
				t.Errorf("%d failures, %d recoveries are logged", a, b)
			}
			w.close()
		})
	}
}

// TestOneFailingLog: an export that fails holds back the trim, not the others'
// lines, and gets its own later.
func TestOneFailingLog(t *testing.T) {
	fs := &faultFS{FS: vfs.NewMem()}
	w := newWorld(t, fs, 1, func(c *Config) { c.ExportDir = "data/export" })
	fs.on(func(op, name string) error {
		if op == "write" && strings.Contains(name, "export/transcripts") {
			return errDisk
		}
		return nil
	})
	w.commit(0, "a/s/1", "stmd")
	w.kickAll()
	w.clock.advance(time.Minute)
	if len(w.lines(logs, Events)) != 4 || len(w.lines("data/export", Events)) != 4 || w.dbs[0].OutboxLen() != 4 {
		t.Errorf("%d events, %d exported, %d wait", len(w.lines(logs, Events)), len(w.lines("data/export", Events)), w.dbs[0].OutboxLen())
	}
	fs.on(nil)
	w.flush()
	w.check(logs)
	w.check("data/export")
	w.close()
}

func TestOverflowDropsOldestThatMayBe(t *testing.T) {
	fs := &faultFS{FS: vfs.NewMem()}
	w := newWorld(t, fs, 1, func(c *Config) { c.MaxBacklog = 10; c.BatchRecords = 8 })
	fs.on(func(string, string) error { return errDisk })
	for range 25 {
		w.commit(0, "a/s/1", "sttd") // 100 events, 50 of them droppable
	}
	w.kickAll()
	w.clock.advance(time.Minute)
	first := w.sinks.Stats().EventsDropped
	fs.on(nil)
	w.flush()
	if st := w.sinks.Stats(); first != 0 || st.EventsDropped != 44 && st.EventsDropped != 45 || st.OutboxRows != 0 {
		t.Errorf("%d dropped while it failed, then %+v", first, st)
	}
	var tools []string
	ends := 0
	for _, l := range w.lines(logs, Events) {
		switch l.Event {
		case "tool.completed":
			tools = append(tools, l.Cursor)
		case "turn.completed":
			ends++
		}
	}
	if ends != 25 || len(w.lines(logs, Transcripts)) != 25 {
		t.Errorf("%d terminal events, %d messages", ends, len(w.lines(logs, Transcripts)))
	}
	if want := []string{"p0-23.2", "p0-24.1", "p0-24.2", "p0-25.1", "p0-25.2"}; !slices.Equal(tools[max(len(tools)-5, 0):], want) || len(tools) > 6 {
		t.Errorf("kept %q", tools)
	}
	w.close()
}

func TestDeletedSessionsLeaveTheOutbox(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 1, nil)
	w.commit(0, "a/s/1", "stmd")
	b := w.dbs[0].NewBatch()
	b.DeleteFlow("a/s/1")
	must(t, b.Commit(2))
	b.Close()
	w.kickAll()
	w.flush()
	if st := w.sinks.Stats(); st.OutboxRows != 0 || st.EventsDeleted != 4 || st.EventsDropped != 0 {
		t.Errorf("%+v", st)
	}
	w.close()
}

// damaged is an outbox that fails while told to.
type damaged struct {
	Source
	err error
}

func (d *damaged) Outbox(lsn uint64, n uint32, limit int, fn func(uint64, uint32, string, *wire.Event) error) error {
	if d.err != nil {
		return d.err
	}
	return d.Source.Outbox(lsn, n, limit, fn)
}

func TestOneDamagedOutboxDoesNotHoldTheOthers(t *testing.T) {
	w := newWorld(t, vfs.NewMem(), 3, nil)
	bad := &damaged{w.dbs[1], errors.New("damaged")}
	w.cfg.Partitions = []Source{w.dbs[0], bad, w.dbs[2]}
	w.openSinks()
	for part := range 3 {
		w.commit(part, "a/s/1", "stmd")
	}
	w.kickAll()
	w.clock.advance(time.Second)
	if n := len(w.lines(logs, Events)); n != 8 || w.dbs[0].OutboxLen()+w.dbs[2].OutboxLen() != 0 {
		t.Errorf("%d events", n)
	}
	bad.err = nil
	w.flush()
	w.check(logs)
	w.close()
}

func TestAccessQueueIsBounded(t *testing.T) {
	fs := &faultFS{FS: vfs.NewMem()}
	w := newWorld(t, fs, 0, func(c *Config) { c.QueueRecords = 10 })
	fs.on(func(string, string) error { return errDisk })
	for i := range 15 {
		w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a", RequestID: fmt.Sprint(i)})
	}
	w.clock.advance(time.Second)
	w.sinks.Access(Record{})
	if st := w.sinks.Stats(); st.AccessQueue != 10 || st.AccessDropped != 6 || st.AccessLines != 0 {
		t.Errorf("%+v", st)
	}
	fs.on(nil)
	w.flush()
	if st := w.sinks.Stats(); st.AccessQueue != 0 || st.AccessLines != 10 {
		t.Errorf("%+v", st)
	}
	// Half a queue does not wait for the interval.
	for range 5 {
		w.sinks.Access(Record{Time: w.clock.Now(), Tenant: "a"})
	}
	w.clock.advance(0)
	if st := w.sinks.Stats(); st.AccessLines != 15 {
		t.Errorf("%+v", st)
	}
	w.close()
}

func TestAccessLine(t *testing.T) {
	r := Record{Time: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Tenant: "acme", Method: "POST", Route: "/v1/sessions/{id}/turns", Status: 200,
		BytesIn: 12, BytesOut: 3456, Duration: 2041*time.Millisecond + 7*time.Microsecond, TTFB: 1500 * time.Microsecond,
		Session: "s_1", Turn: "t_1", Remote: "127.0.0.1:5000", RequestID: "q\"\n" + strings.Repeat("x", 1000)}
	got := string(appendRecord(nil, &r))
	want := `{"at":"2026-01-02T03:04:05.006Z","tenant":"acme","method":"POST","route":"/v1/sessions/{id}/turns","status":200,"bytes_in":12,"bytes_out":3456,` +
		`"duration_ms":2041.007,"ttfb_ms":1.500,"session":"s_1","turn_id":"t_1","remote":"127.0.0.1:5000","request_id":"q\"\n` + strings.Repeat("x", 509) + `"}`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if !json.Valid([]byte(got)) {
		t.Error("no JSON")
	}
}

func TestConfigIsChecked(t *testing.T) {
	if _, err := Open(Config{}); err == nil {
		t.Error("opened with nothing")
	}
}
