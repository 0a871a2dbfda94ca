package state

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/wire"
)

// BenchmarkCommit is what one step costs here: a flow and three events.
func BenchmarkCommit(b *testing.B) {
	for _, outbox := range []bool{false, true} {
		b.Run(fmt.Sprintf("outbox=%v", outbox), func(b *testing.B) {
			d, err := Open(b.TempDir(), Options{FS: vfs.Default, Outbox: outbox, MemTableBytes: 4 << 20})
			must(b, err)
			defer d.Close()
			flows := make([]*wire.Flow, 1000)
			for i := range flows {
				flows[i] = flow(fmt.Sprintf("tenant/s/%08d", i), i%2 == 0, 500)
			}
			ev := &wire.Event{Type: "step.started", Scope: "0123456789abcdef", Step: "model", Data: make([]byte, 200)}
			batch := d.NewBatch()
			defer batch.Close()
			b.ReportAllocs()
			lsn := uint64(0)
			for b.Loop() {
				lsn++
				f := flows[lsn%uint64(len(flows))]
				batch.PutFlow(f)
				for n := range uint32(3) {
					ev.Lsn, ev.N = lsn, n
					batch.PutEvent(f.Id, ev)
				}
				if err := batch.Commit(lsn); err != nil {
					b.Fatal(err)
				}
				if outbox && lsn%1000 == 0 {
					must(b, d.TrimOutbox(lsn, ^uint32(0)))
				}
			}
		})
	}
}

// BenchmarkFlow reads a flow from memory and from a table file.
func BenchmarkFlow(b *testing.B) {
	for _, flushed := range []bool{false, true} {
		b.Run(fmt.Sprintf("flushed=%v", flushed), func(b *testing.B) {
			d, err := Open(b.TempDir(), Options{FS: vfs.Default, MemTableBytes: 8 << 20})
			must(b, err)
			defer d.Close()
			ids := make([]string, 1000)
			for i := range ids {
				ids[i] = fmt.Sprintf("tenant/s/%08d", i)
				write(b, d, uint64(i+1), func(b *Batch) { b.PutFlow(flow(ids[i], false, 500)) })
			}
			if flushed {
				must(b, d.Flush())
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				if f, err := d.Flow(ids[i%len(ids)]); err != nil || f == nil {
					b.Fatal(f, err)
				}
			}
		})
	}
}

// TestMemoryOfOpenTables reports what open, empty tables cost, and bounds it.
func TestMemoryOfOpenTables(t *testing.T) {
	if testing.Short() {
		t.Skip("reads /proc")
	}
	before := pss(t)
	shared := NewShared(0, 0)
	defer shared.Close()
	root := t.TempDir()
	for i := range 4 {
		d, err := Open(fmt.Sprintf("%s/%d", root, i), Options{FS: vfs.Default, Shared: shared, Outbox: true})
		must(t, err)
		defer d.Close()
		if i == 0 {
			t.Logf("one: %d KiB", pss(t)-before)
		}
	}
	four := pss(t) - before
	t.Logf("four: %d KiB over %d KiB, %d goroutines", four, before, runtime.NumGoroutine())
	if four > 8<<10 {
		t.Errorf("four empty partitions cost %d KiB", four)
	}
}

// pss gives the process's proportional memory in KiB, after giving back what
// the collector can.
func pss(t *testing.T) int {
	debug.FreeOSMemory()
	data, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		t.Skip("no smaps_rollup on this system")
	}
	for _, line := range strings.Split(string(data), "\n") {
		var kib int
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			return kib
		}
	}
	t.Skip("no Pss line")
	return 0
}
