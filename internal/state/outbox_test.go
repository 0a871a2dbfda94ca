package state

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/perdure-dev/perdure/internal/wire"
)

func outbox(t testing.TB, d *DB, lsn uint64, n uint32, limit int) []string {
	t.Helper()
	var got []string
	must(t, d.Outbox(lsn, n, limit, func(lsn uint64, n uint32, id string, e *wire.Event) error {
		got = append(got, fmt.Sprintf("%d.%d %s %s", lsn, n, id, e.GetData()))
		return nil
	}))
	return got
}

func TestOutboxGivesEventsInOrderUntilTrimmed(t *testing.T) {
	fs := vfs.NewMem()
	d := openMem(t, fs, Options{Outbox: true})
	write(t, d, 2, func(b *Batch) {
		b.PutEvent("b", event(1, 0))
		b.PutEvent("a", event(1, 1))
		b.PutEvent("a", event(2, 0))
	})
	write(t, d, 3, func(b *Batch) { b.PutEvent("c", event(3, 0)); b.DeleteFlow("b") })
	all := []string{"1.0 b ", "1.1 a 1.1", "2.0 a 2.0", "3.0 c 3.0"} // b was deleted: no data
	for _, c := range []struct {
		lsn   uint64
		n     uint32
		limit int
		want  []string
	}{{0, 0, 0, all}, {0, 0, 2, all[:2]}, {1, 0, 0, all[1:]}, {1, 1, 1, all[2:3]}, {3, 0, 0, nil}} {
		if got := outbox(t, d, c.lsn, c.n, c.limit); !slices.Equal(got, c.want) {
			t.Errorf("Outbox(%d, %d, %d) = %q, want %q", c.lsn, c.n, c.limit, got, c.want)
		}
	}
	hash, err := d.Hash()
	must(t, err)
	must(t, d.TrimOutbox(1, 1))
	must(t, d.TrimOutbox(1, 0)) // going back is nothing
	if got := outbox(t, d, 0, 0, 0); !slices.Equal(got, all[2:]) || d.OutboxLen() != 2 {
		t.Errorf("after trim: %q, length %d", got, d.OutboxLen())
	}
	// A trim ahead of what is applied does not hide what comes.
	must(t, d.TrimOutbox(100, 0))
	write(t, d, 4, func(b *Batch) { b.PutEvent("a", event(4, 0)) })
	if got := outbox(t, d, 0, 0, 0); !slices.Equal(got, []string{"4.0 a 4.0"}) || d.OutboxLen() != 1 {
		t.Errorf("after a trim ahead: %q, length %d", got, d.OutboxLen())
	}
	if after, _ := d.Hash(); after == hash {
		t.Error("hash did not change with an event")
	}
	// The mark and the count live on.
	must(t, d.Flush())
	must(t, d.Close())
	d = openMem(t, fs, Options{Outbox: true})
	if got := outbox(t, d, 0, 0, 0); !slices.Equal(got, []string{"4.0 a 4.0"}) || d.OutboxLen() != 1 {
		t.Errorf("reopened: %q, length %d", got, d.OutboxLen())
	}
}

// TestTrimmedRowsLeaveTheTables: the rows are deleted, not only hidden, and the
// outbox is no part of the hash.
func TestTrimmedRowsLeaveTheTables(t *testing.T) {
	with := openMem(t, vfs.NewMem(), Options{Outbox: true})
	without := openMem(t, vfs.NewMem(), Options{})
	const n = 5 * outboxWipe
	for lsn := uint64(1); lsn <= n; lsn++ {
		for _, d := range []*DB{with, without} {
			write(t, d, lsn, func(b *Batch) { b.PutEvent("f", event(lsn, 0)) })
		}
		must(t, with.TrimOutbox(lsn-1, 0))
	}
	if got := with.OutboxLen(); got != 1 {
		t.Errorf("length %d", got)
	}
	rows := 0
	must(t, with.scan([]byte{tableOutbox}, []byte{tableOutbox + 1}, 0, false, func(_, _ []byte) error { rows++; return nil }))
	if rows > outboxWipe+1 {
		t.Errorf("%d rows are in the table, at most %d should wait for deletion", rows, outboxWipe+1)
	}
	a, err := with.Hash()
	must(t, err)
	b, err := without.Hash()
	must(t, err)
	if a != b {
		t.Error("outbox rows are in the hash")
	}
}

func TestTrimWithoutACommitIsForgottenByACrashOnly(t *testing.T) {
	fs := vfs.NewCrashableMem()
	d := openMem(t, fs, Options{Outbox: true})
	write(t, d, 1, func(b *Batch) { b.PutEvent("f", event(1, 0)) })
	must(t, d.Flush())
	must(t, d.TrimOutbox(1, 0))
	clone := openMem(t, fs.CrashClone(vfs.CrashCloneCfg{}), Options{Outbox: true})
	if got := outbox(t, clone, 0, 0, 0); len(got) != 1 || clone.OutboxLen() != 1 {
		t.Errorf("after a crash: %q, length %d; the event must be seen again", got, clone.OutboxLen())
	}
	must(t, d.Flush())
	clone = openMem(t, fs.CrashClone(vfs.CrashCloneCfg{}), Options{Outbox: true})
	if got := outbox(t, clone, 0, 0, 0); len(got) != 0 || clone.OutboxLen() != 0 {
		t.Errorf("after a flush: %q, length %d", got, clone.OutboxLen())
	}
}
