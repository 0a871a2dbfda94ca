package state

import (
	"encoding/binary"
	"math"
	"strings"

	"github.com/perdure-dev/perdure/internal/query"
)

// Rows of the search index. They have no value; all is in the key:
//
//	i                                            version of the index
//	i <tenant> 00 <field> <kind> <value> <place> status, type, closed
//	i <tenant> 00 fieldAttribute <name> 00 01 <kind> <value> <place>
//
// A place is <created:8, the newest first> <the flow's ID as its users see it>:
// rows of one value are in the order in which a search gives flows. A NUL in a
// name or text is written 00 ff, and 00 01 ends it, which keeps their order.
//
// Values are monotone, not exact: texts are cut, numbers are float64, instants
// are microseconds. So a range of values is a range of rows that has all of
// them and maybe more; what is found is matched again.
const (
	tableIndex = 'i'

	fieldStatus    = 1 // every flow has one: together they are all flows
	fieldType      = 2
	fieldClosed    = 3
	fieldAttribute = 4
)

// maxIndexedText is the bytes of a text that the index sees.
const maxIndexedText = 256

// Place orders the flows of a tenant: the newest first, those of one instant by
// ID. The zero Place is before all.
type Place struct {
	CreatedUs int64
	ID        string // as its users see it
}

// Before says whether p comes before q.
func (p Place) Before(q Place) bool {
	switch {
	case p == (Place{}) || q == (Place{}):
		return p != q && p == (Place{})
	case p.CreatedUs != q.CreatedUs:
		return p.CreatedUs > q.CreatedUs
	}
	return p.ID < q.ID
}

// Next is the first place behind p.
func (p Place) Next() Place { return Place{p.CreatedUs, p.ID + "\x00"} }

const placeBytes = 8 // and the ID

func appendPlace(b []byte, p Place) []byte {
	return append(appendCreated(b, p.CreatedUs), p.ID...)
}

func appendCreated(b []byte, us int64) []byte {
	return binary.BigEndian.AppendUint64(b, ^ordered(us))
}

func decodePlace(b []byte) Place {
	us := int64(^binary.BigEndian.Uint64(b) ^ 1<<63)
	return Place{us, string(b[placeBytes:])}
}

// ordered makes the order of int64 the order of uint64.
func ordered(n int64) uint64 { return uint64(n) ^ 1<<63 }

// userFlow splits the ID of a flow that users started.
func userFlow(flowID string) (tenant, id string, ok bool) {
	tenant, rest, _ := strings.Cut(flowID, "/")
	if len(rest) < 3 || tenant == "" || rest[0] != 'f' || rest[1] != '/' {
		return "", "", false
	}
	return tenant, rest[2:], true
}

func appendIndexPrefix(b []byte, tenant string) []byte {
	return append(append(append(b, tableIndex), tenant...), 0)
}

// appendField begins an entry: what of a key is between tenant and place.
func appendField(b []byte, f query.Field, name string) []byte {
	switch f {
	case query.Status:
		return append(b, fieldStatus)
	case query.Type:
		return append(b, fieldType)
	case query.Closed:
		return append(b, fieldClosed)
	}
	return append(appendEscaped(append(b, fieldAttribute), name), 0, 1)
}

func appendEscaped(b []byte, s string) []byte {
	for {
		i := strings.IndexByte(s, 0)
		if i < 0 {
			return append(b, s...)
		}
		b = append(append(b, s[:i]...), 0, 0xff)
		s = s[i+1:]
	}
}

// cut bounds a text to what the index sees of it.
func cut(s string) string { return s[:min(len(s), maxIndexedText)] }

// appendValue writes kind and value. A prefix has no end: more may follow.
func appendValue(b []byte, v query.Value, prefix bool) []byte {
	b = append(b, byte(v.Kind))
	switch v.Kind {
	case query.Text:
		if b = appendEscaped(b, cut(v.Text)); prefix {
			return b
		}
		return append(b, 0, 1)
	case query.Instant:
		return binary.BigEndian.AppendUint64(b, ordered(v.At.UnixMicro()))
	case query.Number:
		f := v.Float
		if !v.IsFloat {
			f = float64(v.Int)
		}
		return binary.BigEndian.AppendUint64(b, orderedFloat(f))
	}
	return append(b, byte(v.Int))
}

func orderedFloat(f float64) uint64 {
	bits := math.Float64bits(f + 0) // -0 is 0
	if bits>>63 != 0 {
		return ^bits
	}
	return bits | 1<<63
}

// valueEnd gives where the value behind a kind ends; ok is false for damage.
func valueEnd(key []byte, kind query.Kind) (n int, ok bool) {
	switch kind {
	case query.Text:
		for i := 0; i+1 < len(key); i++ {
			if key[i] == 0 {
				if key[i+1] == 1 {
					return i + 2, true
				}
				i++
			}
		}
		return 0, false
	case query.Instant, query.Number:
		n = 8
	default:
		n = 1
	}
	return n, len(key) >= n
}
