package state

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// FuzzKeys: what decodes encodes to the same bytes, and order of keys is order
// of events.
func FuzzKeys(f *testing.F) {
	f.Add(appendEventKey(nil, "tenant/s/1", pos{7, 3}), "a", "a\x01", uint64(1), uint32(2))
	f.Add(appendOutboxKey(nil, pos{1 << 40, 1}), "", "b", uint64(0), ^uint32(0))
	f.Add([]byte("e\x00"), "a\x00b", "c", ^uint64(0), uint32(0))
	f.Fuzz(func(t *testing.T, key []byte, a, b string, lsn uint64, n uint32) {
		if id, p, err := decodeEventKey(key); err == nil {
			if CheckFlowID(id) != nil {
				t.Fatalf("key %x decodes to the refused flow ID %q", key, id)
			}
			if again := appendEventKey(nil, id, p); !bytes.Equal(again, key) {
				t.Fatalf("event key %x became %x", key, again)
			}
		} else if !errors.Is(err, ErrDamaged) {
			t.Fatal(err)
		}
		if p, err := decodeOutboxKey(key); err == nil {
			if again := appendOutboxKey(nil, p); !bytes.Equal(again, key) {
				t.Fatalf("outbox key %x became %x", key, again)
			}
		}
		if CheckFlowID(a) != nil || CheckFlowID(b) != nil || a == b {
			return
		}
		p := pos{lsn, n}
		ka := appendEventKey(nil, a, p)
		if id, q, err := decodeEventKey(ka); err != nil || id != a || q != p {
			t.Fatalf("key of (%q, %v) decodes to (%q, %v), %v", a, p, id, q, err)
		}
		if kb := appendEventsKey(nil, b); bytes.Compare(kb, ka) <= 0 && bytes.Compare(ka, afterEvents(nil, b)) < 0 {
			t.Fatalf("an event of %q lies among those of %q", a, b)
		}
		if next, ok := p.next(); ok && bytes.Compare(ka, appendEventKey(nil, a, next)) >= 0 {
			t.Fatalf("key of %v is not below the key of %v", p, next)
		}
		end := prefixEnd(appendIDKey(nil, tableFlow, b))
		if in := bytes.Compare(appendIDKey(nil, tableFlow, a), end) < 0 && a >= b; in != strings.HasPrefix(a, b) {
			t.Fatalf("%q among the prefix %q: %v", a, b, in)
		}
	})
}

// FuzzRows: any bytes give a row or an error, never a panic, and a row that
// was read is written and read again the same.
func FuzzRows(f *testing.F) {
	row, err := flow("f", true, 10).MarshalVT()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(row)
	if row, err = event(1, 2).MarshalVT(); err != nil {
		f.Fatal(err)
	}
	f.Add(row)
	row = make([]byte, progressBytes)
	progress{applied: 9, outbox: 3, trimmed: pos{8, 1}}.encode(row)
	f.Add(row)
	f.Add([]byte{rowVersion + 1})
	f.Fuzz(func(t *testing.T, row []byte) {
		if fl, err := decodeFlow(row); err == nil {
			core.HasOutstanding(fl)
			again, err := fl.MarshalVT()
			if err != nil {
				t.Fatal(err)
			}
			if back, err := decodeFlow(again); err != nil || !back.EqualVT(fl) {
				t.Fatalf("flow %v became %v, %v", fl, back, err)
			}
		}
		if e, err := decodeEvent(row); err == nil {
			again, err := e.MarshalVT()
			if err != nil {
				t.Fatal(err)
			}
			if back := (&wire.Event{}); back.UnmarshalVT(again) != nil || !back.EqualVT(e) {
				t.Fatalf("event %v became %v", e, back)
			}
		}
		if p, err := decodeProgress(row); err == nil {
			again := make([]byte, progressBytes)
			if p.encode(again); !bytes.Equal(again, row) {
				t.Fatalf("progress %x became %x", row, again)
			}
		}
	})
}
