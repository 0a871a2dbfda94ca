package state

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func valued(lsn uint64, sizes map[string]int) *wire.Flow {
	f := flow("f", false, 1)
	f.Attributes = nil
	for _, name := range []string{"a", "b", "c"} {
		if n := sizes[name]; n > 0 {
			f.Attributes = append(f.Attributes, &wire.Attribute{Name: name, Lsn: lsn, Value: bytes.Repeat([]byte(name), n)})
		}
	}
	return f
}

func TestLargeValuesHaveRowsOfTheirOwn(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	first := valued(1, map[string]int{"a": 10, "b": largeValue, "c": 3 * largeValue})
	write(t, d, 1, func(b *Batch) { b.PutFlowSince(first, 1) })
	size := 0
	write(t, d, 2, func(b *Batch) { b.PutFlowSince(first, 2); size = b.Len() })
	if size >= largeValue {
		t.Errorf("a flow whose large values did not change takes %d bytes of a batch", size)
	}
	for i, a := range first.Attributes {
		if len(a.Value) == 0 || a.Size != 0 {
			t.Errorf("PutFlowSince changed attribute %d", i)
		}
	}
	got, err := d.Flow("f")
	must(t, err)
	if !got.EqualVT(first) {
		t.Errorf("read %v", got)
	}
	write(t, d, 3, func(b *Batch) {
		b.DropValue("f", "c")
		b.PutFlowSince(valued(3, map[string]int{"a": 2 * largeValue, "b": 5}), 3)
	})
	one, err := d.Hash()
	must(t, err)
	got, err = d.Flow("f")
	must(t, err)
	if len(got.Attributes) != 2 || len(got.Attributes[0].Value) != 2*largeValue || len(got.Attributes[1].Value) != 5 {
		t.Errorf("read %v", got.Attributes)
	}
	other := openMem(t, vfs.NewMem(), Options{})
	write(t, other, 3, func(b *Batch) { b.PutFlow(valued(3, map[string]int{"a": 2 * largeValue, "b": 5})) })
	if two, _ := other.Hash(); one != two {
		t.Error("a row that nobody refers to counts in the hash")
	}
	write(t, d, 4, func(b *Batch) { b.DeleteFlow("f") })
	rows := 0
	must(t, d.scan([]byte{tablePart}, []byte{tablePart + 1}, 0, false, func(_, _ []byte) error { rows++; return nil }))
	if rows != 0 {
		t.Errorf("%d values are left of a deleted flow", rows)
	}
}

func TestRequestsHaveRowsOfTheirOwn(t *testing.T) {
	d := openMem(t, vfs.NewMem(), Options{})
	f := flow("f", false, 1)
	f.Requests = []*wire.Request{{RequestId: "old"}} // of before keys had a number
	f.NextRequest = 0
	total := 0
	for lsn := uint64(1); lsn <= 600; lsn++ {
		f.Requests = append(f.Requests, &wire.Request{RequestId: fmt.Sprint("r", lsn), MessageId: "m", Seq: f.NextRequest, Lsn: lsn})
		f.NextRequest++
		f.Requests = f.Requests[max(0, len(f.Requests)-core.MaxRequests):]
		write(t, d, lsn, func(b *Batch) { b.PutFlowSince(f, lsn); total = b.Len() })
		if lsn == 3 || lsn == 256 || lsn == 257 || lsn == 600 {
			got, err := d.Flow("f")
			must(t, err)
			if !got.EqualVT(f) {
				t.Fatalf("at %d: read %d requests, first %v", lsn, len(got.Requests), got.Requests[0])
			}
		}
	}
	if total > 1000 {
		t.Errorf("a commit of one key among %d takes %d bytes", len(f.Requests), total)
	}
	f.Requests, f.FirstRequest = nil, f.NextRequest // a new run
	write(t, d, 601, func(b *Batch) { b.PutFlowSince(f, 601) })
	if got, err := d.Flow("f"); err != nil || len(got.Requests) != 0 {
		t.Errorf("a new run has %d keys of the former one (%v)", len(got.Requests), err)
	}
}
