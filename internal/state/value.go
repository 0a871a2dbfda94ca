package state

import (
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// largeValue is the bytes from which an attribute's value has a row of its own:
// a flow's row is written at each commit, such a value only when it was set.
const largeValue = 1 << 10

func isLarge(a *wire.Attribute) bool { return len(a.Value) >= largeValue && a.Blob == "" }

// putValues writes the large values set at lsn or later and gives the attributes
// as the flow's row has them: with a size instead of a large value.
func (b *Batch) putValues(id string, attrs []*wire.Attribute, lsn uint64) []*wire.Attribute {
	var row []*wire.Attribute
	for i, a := range attrs {
		if !isLarge(a) {
			if row != nil {
				row = append(row, a)
			}
			continue
		}
		if row == nil {
			row = append(make([]*wire.Attribute, 0, len(attrs)), attrs[:i]...)
		}
		row = append(row, &wire.Attribute{Name: a.Name, Lsn: a.Lsn, Index: a.Index, Size: uint64(len(a.Value))})
		if a.Lsn >= lsn {
			b.key = appendValueKey(b.key[:0], id, a.Name)
			b.fail(b.b.Set(b.key, a.Value, nil))
		}
	}
	if row == nil {
		return attrs
	}
	return row
}

// DropValue deletes the row of an attribute that was removed, if it has one. Put
// the flow after.
func (b *Batch) DropValue(flowID, name string) {
	if b.fail(CheckFlowID(flowID)) {
		return
	}
	b.key = appendValueKey(b.key[:0], flowID, name)
	b.fail(b.b.Delete(b.key, nil))
}

// inRow reports whether the value of an attribute read from a flow's row is in a
// row of its own.
func inRow(a *wire.Attribute) bool { return a.Size > 0 && len(a.Value) == 0 && a.Blob == "" }

// putRequests writes the idempotency keys of lsn or later, each as a row of its
// own, and gives those that stay in the flow's row: of before keys had a number.
func (b *Batch) putRequests(id string, requests []*wire.Request, lsn uint64) []*wire.Request {
	for i := len(requests) - 1; i >= 0 && requests[i].Lsn >= lsn && requests[i].Lsn != 0; i-- {
		b.key = appendRequestKey(b.key[:0], id, requests[i].Seq)
		b.put(b.key, requests[i])
	}
	old := 0
	for old < len(requests) && requests[old].Lsn == 0 {
		old++
	}
	return requests[:old]
}

// fillRequests reads the idempotency keys of the flow's run, oldest first.
func (d *DB) fillRequests(f *wire.Flow) error {
	if f.NextRequest == f.FirstRequest {
		return nil
	}
	first := f.FirstRequest
	if f.NextRequest > core.MaxRequests {
		first = max(first, f.NextRequest-core.MaxRequests)
	}
	found := make([]*wire.Request, f.NextRequest-first)
	err := d.scan(appendPartsKey(nil, f.Id, partRequest), appendPartsKey(nil, f.Id, partRequest+1), 0, false, func(_, row []byte) error {
		r := &wire.Request{}
		if err := r.UnmarshalVT(row); err != nil {
			return fmt.Errorf("%w: idempotency key of flow %q: %v", ErrDamaged, f.Id, err)
		}
		if r.Seq >= first && r.Seq < f.NextRequest {
			found[r.Seq-first] = r
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i, r := range found {
		if r == nil {
			return d.readError(fmt.Errorf("%w: idempotency key %d of flow %q is missing", ErrDamaged, first+uint64(i), f.Id))
		}
	}
	f.Requests = append(f.Requests, found...)
	f.Requests = f.Requests[max(0, len(f.Requests)-core.MaxRequests):]
	return nil
}

// fill reads what of a flow is not in its row.
func (d *DB) fill(f *wire.Flow) error {
	if err := d.fillRequests(f); err != nil {
		return err
	}
	for _, a := range f.Attributes {
		if !inRow(a) {
			continue
		}
		v, err := get(d, appendValueKey(nil, f.Id, a.Name), func(v []byte) (*[]byte, error) {
			c := append([]byte(nil), v...)
			return &c, nil
		})
		if err != nil {
			return err
		}
		if v == nil || uint64(len(*v)) != a.Size {
			return d.readError(fmt.Errorf("%w: value of attribute %q of flow %q is missing", ErrDamaged, a.Name, f.Id))
		}
		a.Value, a.Size = *v, 0
	}
	return nil
}

// hashParts adds what of a flow is not in its row to its hash: rows that no flow
// refers to any more do not count.
func (d *DB) hashParts(h *xxhash.Digest, row []byte) error {
	f, err := decodeFlow(row)
	if err != nil {
		return err
	}
	if err := d.fill(f); err != nil {
		return err
	}
	for _, a := range f.Attributes {
		_, _ = h.Write(a.Value) // a hash never fails
	}
	for _, r := range f.Requests {
		_, _ = h.WriteString(r.RequestId)
		_, _ = h.WriteString(r.MessageId)
	}
	return nil
}
