package state

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// TestFullDiskAnswers: while table files cannot be written, Flush and Commit
// give an error instead of waiting for ever, and afterwards all goes on.
func TestFullDiskAnswers(t *testing.T) {
	full := errors.New("disk is full")
	var on atomic.Bool
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if on.Load() && op.Kind == errorfs.OpCreate && strings.HasSuffix(op.Path, ".sst") {
			return full
		}
		return nil
	}))
	var mu sync.Mutex
	var said []string
	d := openMem(t, fs, Options{MemTableBytes: 64 << 10, Log: func(l Level, m string) {
		mu.Lock()
		defer mu.Unlock()
		if l == Error {
			said = append(said, m)
		}
	}})
	write(t, d, 1, func(b *Batch) { b.PutFlow(flow("f", false, 1)) })
	on.Store(true)
	if err := d.Flush(); !errors.Is(err, full) {
		t.Fatalf("Flush: %v", err)
	}
	if d.FlushedLSN() != 0 {
		t.Fatalf("flushed LSN %d", d.FlushedLSN())
	}
	var err error
	b := d.NewBatch()
	defer b.Close()
	lsn := uint64(1)
	for ; err == nil && lsn < 1000; lsn++ {
		b.PutFlow(flow(fmt.Sprint(lsn), true, 10<<10))
		err = b.Commit(lsn + 1)
	}
	if !errors.Is(err, full) {
		t.Fatalf("commit %d: %v", lsn, err)
	}
	applied := d.AppliedLSN()
	on.Store(false)
	err = d.Flush()
	for tries := 0; err != nil && tries < 100; tries++ {
		err = d.Flush() // an attempt from before may end with its error now
	}
	must(t, err)
	if got := d.FlushedLSN(); got != applied {
		t.Errorf("flushed LSN %d, applied %d", got, applied)
	}
	if err := d.trouble.get(); err != nil {
		t.Errorf("trouble is not over: %v", err)
	}
	// The flow of the refused commit is not taken for indexed.
	write(t, d, applied+1, func(b *Batch) { b.PutFlow(flow(fmt.Sprint(lsn-1), true, 1)) })
	checkDerived(t, d)
	mu.Lock()
	defer mu.Unlock()
	if len(said) == 0 || len(said) > 20 || d.Metrics().BackgroundErrors == 0 {
		t.Errorf("%d log lines, %d errors", len(said), d.Metrics().BackgroundErrors)
	}
}
