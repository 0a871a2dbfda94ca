package sink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// clock moves only when told; its timers run on the goroutine that moves it.
type clock struct {
	mu     sync.Mutex
	now    time.Time
	timers []*timer
	set    int // timers ever set
}

type timer struct {
	c  *clock
	at time.Time
	f  func()
}

func newClock() *clock { return &clock{now: time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) AfterFunc(d time.Duration, f func()) env.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set++
	t := &timer{c, c.now.Add(d), f}
	c.timers = append(c.timers, t)
	return t
}

func (t *timer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	i := slices.Index(t.c.timers, t)
	if i >= 0 {
		t.c.timers = slices.Delete(t.c.timers, i, i+1)
	}
	return i >= 0
}

func (c *clock) pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.timers)
}

// advance moves the time and runs what is due, in order.
func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	end := c.now.Add(d)
	for {
		sort.SliceStable(c.timers, func(i, j int) bool { return c.timers[i].at.Before(c.timers[j].at) })
		if len(c.timers) == 0 || c.timers[0].at.After(end) {
			break
		}
		t := c.timers[0]
		c.timers = c.timers[1:]
		if t.at.After(c.now) {
			c.now = t.at
		}
		c.mu.Unlock()
		t.f()
		c.mu.Lock()
	}
	c.now = end
	c.mu.Unlock()
}

// commit is one journaled entry: what a crash of the tables brings back.
type commit struct {
	lsn    uint64
	flow   string
	events []*wire.Event
}

// world is a server as the sinks see it: tables on a disk, and journals that
// never lose what was committed.
type world struct {
	t        testing.TB
	fs       vfs.FS
	clock    *clock
	cfg      Config
	dbs      []*state.DB
	journals [][]commit
	tables   string // distinguishes lives of the tables
	sinks    *Sinks
	log      strings.Builder
}

func newWorld(t testing.TB, fs vfs.FS, partitions int, change func(*Config)) *world {
	w := &world{t: t, fs: fs, clock: newClock(), journals: make([][]commit, partitions)}
	w.cfg = Config{Dir: "data/logs", FlushInterval: 200 * time.Millisecond}
	if change != nil {
		change(&w.cfg)
	}
	must(t, fs.MkdirAll("data", 0o755))
	must(t, syncDir(fs, fs.PathDir("data")))
	w.open()
	return w
}

// open starts the tables from the disk and the journal, then the sinks.
func (w *world) open() {
	w.dbs = nil
	for i, journal := range w.journals {
		dir := fmt.Sprintf("data/p%d%s", i, w.tables)
		must(w.t, w.fs.MkdirAll(dir, 0o755))
		must(w.t, syncDir(w.fs, "data"))
		db, err := state.Open(dir, state.Options{FS: w.fs, Outbox: true, Manual: true})
		must(w.t, err)
		w.dbs = append(w.dbs, db)
		for _, c := range journal {
			if c.lsn > db.AppliedLSN() {
				w.apply(i, c)
			}
		}
	}
	w.openSinks()
}

func (w *world) openSinks() {
	cfg := w.cfg
	cfg.FS, cfg.Clock, cfg.Describe = w.fs, w.clock, describe
	cfg.Log = slog.New(slog.NewTextHandler(&w.log, nil))
	if cfg.Partitions == nil {
		for _, db := range w.dbs {
			cfg.Partitions = append(cfg.Partitions, db)
		}
	}
	s, err := Open(cfg)
	must(w.t, err)
	w.sinks = s
}

func describe(ev *wire.Event) (string, []byte) {
	switch ev.Type {
	case core.EventStarted:
		return "", nil
	case core.EventStepStarted:
		return session.EventTurnStarted, session.Data(ev)
	}
	return ev.Type, session.Data(ev)
}

func (w *world) apply(part int, c commit) {
	b := w.dbs[part].NewBatch()
	defer b.Close()
	for _, ev := range c.events {
		b.PutEvent(c.flow, ev)
	}
	must(w.t, b.Commit(c.lsn))
}

// commit journals and applies an entry with events of these kinds: s(tarted,
// with a message), t(ool), m(essage), d(one), h(idden, with two messages).
func (w *world) commit(part int, flow, kinds string) {
	c := commit{lsn: uint64(len(w.journals[part])) + 1, flow: flow}
	for i, k := range kinds {
		ev := &wire.Event{Lsn: c.lsn, N: uint32(i), Scope: fmt.Sprintf("t%d", c.lsn), AtUs: w.clock.Now().UnixMicro()}
		switch k {
		case 's':
			ev.Type, ev.Step, ev.Items = core.EventStepStarted, agent.StepTurn, [][]byte{[]byte(`{"role":"user","content":"hi"}`)}
		case 't':
			ev.Type, ev.Data = agent.EventTool, []byte(`{"name":"x"}`)
		case 'm':
			ev.Type, ev.Items = agent.EventMessage, [][]byte{[]byte("{\"role\":\"assistant\",\n\"content\":\"yo\"}")}
		case 'd':
			ev.Type, ev.Data = agent.EventCompleted, []byte(`{"n":1}`)
		case 'h':
			ev.Type, ev.Items = core.EventStarted, [][]byte{[]byte(`{"content":"a"}`), []byte(`{"content":"b"}`)}
		}
		c.events = append(c.events, ev)
	}
	w.journals[part] = append(w.journals[part], c)
	w.apply(part, c)
}

// flush lets the timers of the sinks run until they are at rest.
func (w *world) flush() {
	for i := 0; w.clock.pending() > 0; i++ {
		w.clock.advance(w.cfg.FlushInterval)
		if i > 10_000 {
			w.t.Fatal("the sinks do not come to rest")
		}
	}
}

func (w *world) kickAll() {
	for i := range w.dbs {
		w.sinks.Kick(i)
	}
}

func (w *world) close() {
	must(w.t, w.sinks.Close(context.Background()))
	for _, db := range w.dbs {
		must(w.t, db.Close())
	}
}

// want gives the lines that all commits should have given, as keys.
func (w *world) want() (events, messages []string) {
	for part, journal := range w.journals {
		for _, c := range journal {
			for _, ev := range c.events {
				if name, _ := describe(ev); name != "" {
					events = append(events, fmt.Sprintf("p%d-%d.%d %s", part, ev.Lsn, ev.N, name))
				}
				for i := range ev.Items {
					messages = append(messages, fmt.Sprintf("p%d-%d.%d #%d", part, ev.Lsn, ev.N, i))
				}
			}
		}
	}
	slices.Sort(events)
	slices.Sort(messages)
	return events, messages
}

type line struct {
	Cursor, Tenant, Session, Event, At string
	TurnID                             string `json:"turn_id"`
	Item                               int
	Data, Message                      json.RawMessage
	RequestID                          string `json:"request_id"`
}

func (l line) key(kind Kind) string {
	if kind == Transcripts {
		return fmt.Sprintf("%s #%d", l.Cursor, l.Item)
	}
	return l.Cursor + " " + l.Event
}

// files gives the names of the segments of a log, oldest first.
func (w *world) files(dir string, kind Kind) []string {
	names, err := w.fs.List(dir)
	must(w.t, err)
	var out []string
	for _, n := range names {
		if _, _, ok := parseSegmentName(kind, n); ok {
			out = append(out, n)
		}
	}
	sort.Slice(out, func(i, j int) bool {
		_, a, _ := parseSegmentName(kind, out[i])
		_, b, _ := parseSegmentName(kind, out[j])
		return a < b
	})
	return out
}

func (w *world) read(path string) []byte {
	f, err := w.fs.Open(path)
	must(w.t, err)
	defer f.Close()
	raw, err := io.ReadAll(f)
	must(w.t, err)
	return raw
}

// lines reads all segments of a log; a line that is no JSON fails the test.
func (w *world) lines(dir string, kind Kind) []line {
	w.t.Helper()
	var out []line
	for _, name := range w.files(dir, kind) {
		raw := w.read(dir + "/" + name)
		if len(raw) > 0 && raw[len(raw)-1] != '\n' {
			w.t.Errorf("%s has a torn end", name)
		}
		for l := range strings.Lines(string(raw)) {
			var v line
			if err := json.Unmarshal([]byte(l), &v); err != nil {
				w.t.Fatalf("%s: %v in %.100q", name, err, l)
			}
			out = append(out, v)
		}
	}
	return out
}

func (w *world) keys(dir string, kind Kind) []string {
	var keys []string
	for _, l := range w.lines(dir, kind) {
		keys = append(keys, l.key(kind))
	}
	slices.Sort(keys)
	return keys
}

// check holds all lines of a directory against the commits.
func (w *world) check(dir string) {
	w.t.Helper()
	events, messages := w.want()
	diff(w.t, dir+" events", w.keys(dir, Events), events)
	diff(w.t, dir+" transcripts", w.keys(dir, Transcripts), messages)
	for i, db := range w.dbs {
		if n := db.OutboxLen(); n != 0 {
			w.t.Errorf("%d events wait in outbox %d", n, i)
		}
	}
}

func diff(t testing.TB, what string, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	count := map[string]int{}
	for _, k := range want {
		count[k]--
	}
	for _, k := range got {
		count[k]++
	}
	for k, n := range count {
		if n != 0 {
			t.Errorf("%s: %q is there %+d times too often", what, k, n)
		}
	}
}

// faultFS fails operations as told, writes after a part of their bytes.
type faultFS struct {
	vfs.FS
	mu     sync.Mutex
	before func(op, name string) error
}

var errDisk = errors.New("no space left on device")

func (f *faultFS) on(before func(op, name string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = before
}

func (f *faultFS) ask(op, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.before == nil || !strings.Contains(name, "logs") && !strings.Contains(name, "export") {
		return nil
	}
	return f.before(op, name)
}

func (f *faultFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := f.ask("create", name); err != nil {
		return nil, err
	}
	file, err := f.FS.Create(name, c)
	return &faultFile{file, f, name}, err
}

func (f *faultFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	if err := f.ask("open", name); err != nil {
		return nil, err
	}
	file, err := f.FS.OpenReadWrite(name, c, o...)
	return &faultFile{file, f, name}, err
}

func (f *faultFS) OpenDir(name string) (vfs.File, error) {
	file, err := f.FS.OpenDir(name)
	return &faultFile{file, f, name}, err
}

func (f *faultFS) Rename(a, b string) error {
	if err := f.ask("rename", a); err != nil {
		return err
	}
	return f.FS.Rename(a, b)
}

type faultFile struct {
	vfs.File
	fs   *faultFS
	name string
}

func (f *faultFile) Write(p []byte) (int, error) {
	if err := f.fs.ask("write", f.name); err != nil {
		return 0, err
	}
	return f.File.Write(p)
}

func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.ask("write", f.name); err != nil {
		n, _ := f.File.WriteAt(p[:len(p)*2/3], off)
		return n, err
	}
	return f.File.WriteAt(p, off)
}

func (f *faultFile) Sync() error {
	if err := f.fs.ask("sync", f.name); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *faultFile) SyncData() error {
	if err := f.fs.ask("sync", f.name); err != nil {
		return err
	}
	return f.File.SyncData()
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }
