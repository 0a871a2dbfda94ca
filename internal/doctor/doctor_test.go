package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
)

// fakeClock moves by itself on each reading, so that what is measured takes time.
type fakeClock struct {
	mu   sync.Mutex
	now  time.Time
	step time.Duration
	fire bool // timers fire at once
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(c.step)
	return c.now
}

func (c *fakeClock) AfterFunc(_ time.Duration, f func()) env.Timer {
	if c.fire {
		f()
	}
	return fakeTimer{}
}

type fakeTimer struct{}

func (fakeTimer) Stop() bool { return true }

type fakeSystem uint64

func (n fakeSystem) OpenFiles() (uint64, bool) { return uint64(n), n > 0 }

// diskFS is a memory file system with a size, that may be read-only.
type diskFS struct {
	vfs.FS
	avail    uint64
	readOnly bool
	locked   bool
	removed  []string
}

func (d *diskFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: d.avail, TotalBytes: 100 << 30}, nil
}

func (d *diskFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if d.readOnly {
		return nil, errors.New("read-only file system")
	}
	return d.FS.Create(name, c)
}

func (d *diskFS) Lock(name string) (io.Closer, error) {
	if d.locked {
		return nil, errors.New("resource temporarily unavailable")
	}
	return d.FS.Lock(name)
}

func (d *diskFS) Remove(name string) error {
	d.removed = append(d.removed, name)
	return d.FS.Remove(name)
}

type prober func(ctx context.Context) error

func (p prober) Check(ctx context.Context) error { return p(ctx) }

func put(t *testing.T, fs vfs.FS, name, text string) {
	t.Helper()
	if err := fs.MkdirAll(fs.PathDir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// healthy is a machine on which every check is ok.
func healthy(t *testing.T) (Input, *diskFS, *fakeClock) {
	t.Helper()
	disk := &diskFS{FS: vfs.NewMem(), avail: 50 << 30}
	put(t, disk, "/data/x", "")
	put(t, disk, "/proc/meminfo", "MemTotal: 99 kB\nMemAvailable:   8000000 kB\n")
	clk := &fakeClock{now: time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC), step: time.Millisecond}
	c := config.Default()
	c.Data = "/data"
	c.Providers["real"] = &config.Provider{Type: "openai", ConcurrencyLimit: 8, APIKey: config.NewSecret("sk-secret")}
	return Input{
		Config: c, Env: env.Env{Clock: clk, FS: disk}, System: fakeSystem(1 << 20),
		Providers: map[string]Prober{"real": prober(func(context.Context) error { return nil })},
	}, disk, clk
}

func find(t *testing.T, checks []Check, name string) Check {
	t.Helper()
	for _, c := range checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q in %+v", name, checks)
	return Check{}
}

func TestHealthyMachine(t *testing.T) {
	in, disk, _ := healthy(t)
	checks := Run(t.Context(), in)
	for _, c := range checks {
		if c.Status != OK || c.Hint != "" {
			t.Errorf("%+v", c)
		}
	}
	if len(checks) != 10 || ExitStatus(checks) != 0 {
		t.Errorf("%d checks, exit status %d", len(checks), ExitStatus(checks))
	}
	if names, _ := disk.List("/data"); len(names) != 1 || len(disk.removed) != 1 {
		t.Errorf("left in the data directory: %v", names)
	}
	if c := find(t, checks, "fdatasync"); !strings.Contains(c.Detail, "p50 1ms") || !strings.Contains(c.Detail, "of 50") {
		t.Errorf("%+v", c)
	}
}

func TestFindings(t *testing.T) {
	tests := []struct {
		name, check string
		spoil       func(in *Input, disk *diskFS, clk *fakeClock)
		want        Status
		say         string
	}{
		{"insecure", "config", func(in *Input, _ *diskFS, _ *fakeClock) { in.Config.Insecure = true }, Warn, "agent"},
		{"warnings of the configuration", "config", func(in *Input, _ *diskFS, _ *fakeClock) { in.Warnings = []string{"odd"} }, Warn, "agent"},
		{"clock at the epoch", "clock", func(_ *Input, _ *diskFS, c *fakeClock) { c.now = time.Unix(0, 0) }, Fail, "1970"},
		{"clock set back", "clock", func(_ *Input, d *diskFS, c *fakeClock) {
			put(t, d, "/data/LOCK", "")
			c.now = time.Date(2025, 2, 1, 0, 0, 0, 0, time.UTC)
		}, Warn, "was used at"},
		{"few files", "open files", func(in *Input, _ *diskFS, _ *fakeClock) { in.System = fakeSystem(1024) }, Warn, "ulimit -n is 1024"},
		{"no files", "open files", func(in *Input, _ *diskFS, _ *fakeClock) { in.System = fakeSystem(100) }, Fail, "ulimit -n is 100"},
		{"no limit", "open files", func(in *Input, _ *diskFS, _ *fakeClock) { in.System = fakeSystem(0) }, OK, "no limit"},
		{"little memory", "memory", func(_ *Input, d *diskFS, _ *fakeClock) { put(t, d, "/proc/meminfo", "MemAvailable: 90000 kB\n") }, Warn, "87 MiB"},
		{"no memory", "memory", func(_ *Input, d *diskFS, _ *fakeClock) { put(t, d, "/proc/meminfo", "MemAvailable: 10 kB\n") }, Fail, "0 MiB"},
		{"control group", "memory", func(_ *Input, d *diskFS, _ *fakeClock) {
			put(t, d, "/sys/fs/cgroup/memory.max", "104857600\n")
			put(t, d, "/sys/fs/cgroup/memory.current", "94371840\n")
		}, Fail, "10 MiB available"},
		{"control group without limit", "memory", func(_ *Input, d *diskFS, _ *fakeClock) { put(t, d, "/sys/fs/cgroup/memory.max", "max\n") }, OK, "available"},
		{"nothing persisted", "data", func(in *Input, _ *diskFS, _ *fakeClock) { in.Config.Store = "mem:" }, Warn, "nothing is persisted"},
		{"read-only", "data", func(_ *Input, d *diskFS, _ *fakeClock) { d.readOnly = true }, Fail, "read-only file system"},
		{"a file in the way", "data", func(in *Input, _ *diskFS, _ *fakeClock) { in.Config.Data = "/data/x" }, Fail, "not a directory"},
		{"not made yet", "data", func(in *Input, _ *diskFS, _ *fakeClock) { in.Config.Data = "/data/a/b" }, OK, "will be made"},
		{"in use", "data in use", func(_ *Input, d *diskFS, _ *fakeClock) { put(t, d, "/data/LOCK", ""); d.locked = true }, Warn, "another process"},
		{"not in use", "data in use", func(_ *Input, d *diskFS, _ *fakeClock) { put(t, d, "/data/LOCK", "") }, OK, "no process"},
		{"little space", "free space", func(_ *Input, d *diskFS, _ *fakeClock) { d.avail = 1 << 30 }, Warn, "1024 MiB"},
		{"no space", "free space", func(_ *Input, d *diskFS, _ *fakeClock) { d.avail = 1 << 20 }, Fail, "1 MiB"},
		{"slow disk", "fdatasync", func(_ *Input, _ *diskFS, c *fakeClock) { c.step = 200 * time.Millisecond }, Warn, "p50 200ms"},
		{"RAM disk", "fdatasync", func(_ *Input, _ *diskFS, c *fakeClock) { c.step = time.Microsecond }, Warn, "p50 1µs"},
		{"provider down", "provider real", func(in *Input, _ *diskFS, _ *fakeClock) {
			in.Providers["real"] = prober(func(context.Context) error { return errors.New("401 for key sk-secret") })
		}, Fail, "401 for key [redacted]"},
		{"provider silent", "provider real", func(in *Input, _ *diskFS, c *fakeClock) {
			c.fire = true
			in.Providers["real"] = prober(func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		}, Fail, "no answer within 10s"},
		{"provider not asked", "provider real", func(in *Input, _ *diskFS, _ *fakeClock) { in.Providers = nil }, Warn, "not asked"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in, disk, clk := healthy(t)
			tt.spoil(&in, disk, clk)
			checks := Run(t.Context(), in)
			c := find(t, checks, tt.check)
			if c.Status != tt.want || !strings.Contains(c.Detail, tt.say) {
				t.Errorf("got %+v, want %s with %q", c, tt.want, tt.say)
			}
			if c.Status == Fail && c.Hint == "" {
				t.Error("a failure without a hint")
			}
			if want := map[bool]int{true: 1}[tt.want == Fail]; ExitStatus(checks) != want {
				t.Errorf("exit status %d", ExitStatus(checks))
			}
		})
	}
}

func TestBadConfigIsTheOnlyCheck(t *testing.T) {
	_, err := config.Parse("p.yaml", []byte("kernl: 1\ndata: ''\n"))
	checks := Run(t.Context(), Input{ConfigErr: err})
	if len(checks) != 1 || ExitStatus(checks) != 1 || !strings.Contains(checks[0].Detail, "p.yaml:1: kernl") {
		t.Errorf("%+v", checks)
	}
}

func TestRender(t *testing.T) {
	checks := []Check{{"config", OK, "fine", ""}, {"open files", Warn, "two\nlines", "do this"}}
	var text strings.Builder
	if err := WriteText(&text, checks); err != nil {
		t.Fatal(err)
	}
	want := "ok    config      fine\nwarn  open files  two\n                  lines\n                  → do this\n"
	if text.String() != want {
		t.Errorf("got\n%s", text.String())
	}
	var buf strings.Builder
	if err := WriteJSON(&buf, checks); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Status string
		Checks []Check
	}
	if err := json.Unmarshal([]byte(buf.String()), &got); err != nil || got.Status != "warn" || len(got.Checks) != 2 || strings.Count(buf.String(), "\n") != 1 {
		t.Errorf("%v %s", err, buf.String())
	}
}

// TestThisMachine runs on the real system and a real directory.
func TestThisMachine(t *testing.T) {
	c := config.Default()
	c.Data = t.TempDir()
	checks := Run(t.Context(), Input{Config: c, Env: env.Real(), System: ThisSystem{}})
	for _, name := range []string{"config", "clock", "data", "fdatasync", "provider demo"} {
		if got := find(t, checks, name); got.Status == Fail {
			t.Errorf("%+v", got)
		}
	}
}
