package state

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/wire"
)

// grown gives tables whose memtable has grown, and the last LSN.
func grown(t *testing.T, o Options) (*DB, uint64) {
	d := openMem(t, vfs.NewMem(), o)
	lsn := uint64(0)
	for m := d.Metrics(); m.Flushes < 3 || m.MemTableBytes < DefaultMemTableBytes; m = d.Metrics() {
		if lsn++; lsn > 10000 {
			t.Fatal("memtable does not grow")
		}
		write(t, d, lsn, func(b *Batch) {
			b.PutFlow(flow(fmt.Sprint(lsn%50), lsn%2 == 0, 4<<10))
			b.PutEvent("1", event(lsn, 0))
		})
	}
	return d, lsn
}

func TestShrinkGivesMemoryBackAndNothingElse(t *testing.T) {
	d, lsn := grown(t, Options{Outbox: true})
	open := d.NewBatch()
	defer open.Close()
	open.PutFlow(flow("later", true, 1))
	before, rows, hash := d.Metrics(), dump(t, d), hashOf(t, d)
	if done, err := d.Shrink(); !done || err != nil {
		t.Fatalf("Shrink = %v, %v", done, err)
	}
	after := d.Metrics()
	if after.MemTableBytes > initialMemTable {
		t.Errorf("memtable has %d bytes", after.MemTableBytes)
	}
	if after.Flushes <= before.Flushes || after.FlushedBytes < before.FlushedBytes || after.OutboxRows != before.OutboxRows {
		t.Errorf("metrics went back: %+v, before %+v", after, before)
	}
	if dump(t, d) != rows || hashOf(t, d) != hash || d.AppliedLSN() != lsn || d.FlushedLSN() != lsn {
		t.Error("rows changed")
	}
	must(t, open.Commit(lsn+1)) // a batch lives through it
	checkDerived(t, d)
	if done, err := d.Shrink(); done || err != nil {
		t.Errorf("second Shrink = %v, %v", done, err)
	}
}

func hashOf(t *testing.T, d *DB) uint64 {
	h, err := d.Hash()
	must(t, err)
	return h
}

func TestShrinkStandsBackForUse(t *testing.T) {
	d, _ := grown(t, Options{})
	must(t, d.Flows("", "", 1, false, func(*wire.Flow) error {
		if done, err := d.Shrink(); done || err != nil {
			t.Errorf("within a callback: Shrink = %v, %v", done, err)
		}
		return nil
	}))
	if done, err := d.Shrink(); !done || err != nil {
		t.Errorf("Shrink = %v, %v", done, err)
	}
}

// TestShrinkBesideUse: whoever calls meanwhile waits, and sees what it must.
func TestShrinkBesideUse(t *testing.T) {
	d, lsn := grown(t, Options{Outbox: true})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if f, err := d.Flow("1"); err != nil || f == nil {
					t.Errorf("Flow = %v, %v", f, err)
					return
				}
				if d.FlushedLSN() > d.AppliedLSN() {
					t.Error("flushed more than was applied")
				}
				d.Metrics()
			}
		})
	}
	shrunk := 0
	for i := 0; i < 100 && shrunk < 3; i++ {
		lsn++
		write(t, d, lsn, func(b *Batch) { b.PutFlow(flow(fmt.Sprint(i%50), true, 4<<10)) })
		done, err := d.Shrink()
		must(t, err)
		if done {
			shrunk++
		}
	}
	close(stop)
	wg.Wait()
	if d.AppliedLSN() != lsn {
		t.Errorf("applied %d, want %d", d.AppliedLSN(), lsn)
	}
	checkDerived(t, d)
	must(t, d.Close())
	if _, err := d.Shrink(); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}
