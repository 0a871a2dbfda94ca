package sink

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// place is where a line stands in a partition's order of events. Item counts
// the lines that one event gives.
type place struct {
	lsn     uint64
	n, item uint32
}

func (p place) less(q place) bool {
	if p.lsn != q.lsn {
		return p.lsn < q.lsn
	}
	if p.n != q.n {
		return p.n < q.n
	}
	return p.item < q.item
}

func (p place) String() string { return fmt.Sprintf("%d.%d.%d", p.lsn, p.n, p.item) }

func parsePlace(s string) (place, bool) {
	lsn, rest, ok1 := strings.Cut(s, ".")
	n, item, ok2 := strings.Cut(rest, ".")
	a, err1 := strconv.ParseUint(lsn, 10, 64)
	b, err2 := strconv.ParseUint(n, 10, 32)
	c, err3 := strconv.ParseUint(item, 10, 32)
	return place{a, uint32(b), uint32(c)}, ok1 && ok2 && err1 == nil && err2 == nil && err3 == nil
}

// appendCursor writes a cursor as it stands in lines: p3-12.0.
func appendCursor(b []byte, part int, lsn uint64, n uint32) []byte {
	b = append(b, 'p')
	b = strconv.AppendInt(b, int64(part), 10)
	b = append(b, '-')
	b = strconv.AppendUint(b, lsn, 10)
	b = append(b, '.')
	return strconv.AppendUint(b, uint64(n), 10)
}

// Every line that comes from a partition begins so; the item follows in
// transcripts.
var (
	lineHead = []byte(`{"cursor":"p`)
	itemHead = []byte(`","item":`)
)

// linePlace reads where a line stands; ok is false for bytes that no writer
// finished: what a crash left of a write that was not synced.
func linePlace(line []byte) (part int, p place, ok bool) {
	rest, ok := bytes.CutPrefix(line, lineHead)
	if !ok || line[len(line)-1] != '}' || bytes.IndexByte(line, 0) >= 0 {
		return 0, place{}, false
	}
	number := func(bits int, end byte) uint64 {
		i := bytes.IndexByte(rest, end)
		if i < 0 || !ok {
			ok = false
			return 0
		}
		v, err := strconv.ParseUint(string(rest[:i]), 10, bits)
		ok = err == nil
		rest = rest[i+1:]
		return v
	}
	id := number(16, '-')
	p.lsn = number(64, '.')
	p.n = uint32(number(32, '"'))
	if !ok {
		return 0, place{}, false
	}
	if after, is := bytes.CutPrefix(rest, itemHead[1:]); is {
		rest = after
		p.item = uint32(number(32, ','))
	}
	return int(id), p, ok
}

// Segments are named <kind>-<UTC time it began>-<sequence>.jsonl.
const (
	segmentTime   = "20060102T150405"
	segmentSuffix = ".jsonl"
	seqDigits     = 8
)

func segmentName(kind Kind, start time.Time, seq uint64) string {
	return fmt.Sprintf("%s-%s-%0*d%s", kind, start.UTC().Format(segmentTime), seqDigits, seq, segmentSuffix)
}

func parseSegmentName(kind Kind, name string) (start time.Time, seq uint64, ok bool) {
	rest, ok := strings.CutPrefix(name, string(kind)+"-")
	rest, ok2 := strings.CutSuffix(rest, segmentSuffix)
	at, digits, ok3 := strings.Cut(rest, "-")
	if !ok || !ok2 || !ok3 {
		return time.Time{}, 0, false
	}
	start, err := time.ParseInLocation(segmentTime, at, time.UTC)
	seq, err2 := strconv.ParseUint(digits, 10, 63)
	if err != nil || err2 != nil || seq == 0 || segmentName(kind, start, seq) != name {
		return time.Time{}, 0, false
	}
	return start, seq, true
}

// placesName is the hidden file beside a segment with the places that were
// written before it: a quiet partition has no line in the newest segment.
func placesName(segment string) string {
	return "." + strings.TrimSuffix(segment, segmentSuffix) + ".places"
}

// placesFile is the form of it. Store tells data directories apart: the places
// of another one say nothing about this one's events.
type placesFile struct {
	Format int      `json:"format"`
	Store  string   `json:"store"`
	Places []string `json:"places"` // lsn.n.item, by partition
}

const (
	placesFormat   = 1
	maxPlacesBytes = 1 << 20
	maxPartitions  = 1 << 12
)

func encodePlaces(store string, places []place) ([]byte, error) {
	f := placesFile{Format: placesFormat, Store: store, Places: make([]string, len(places))}
	for i, p := range places {
		f.Places[i] = p.String()
	}
	return json.Marshal(f)
}

func decodePlaces(raw []byte) (store string, places []place, err error) {
	var f placesFile
	if len(raw) > maxPlacesBytes {
		return "", nil, fmt.Errorf("places have %d bytes, at most %d", len(raw), maxPlacesBytes)
	}
	if err := json.Unmarshal(raw, &f); err != nil {
		return "", nil, fmt.Errorf("places are damaged: %w", err)
	}
	if f.Format != placesFormat {
		return "", nil, fmt.Errorf("places have format %d, this program reads %d", f.Format, placesFormat)
	}
	if f.Store == "" || len(f.Places) > maxPartitions {
		return "", nil, errors.New("places are damaged: no store, or too many partitions")
	}
	places = make([]place, len(f.Places))
	for i, s := range f.Places {
		p, ok := parsePlace(s)
		if !ok {
			return "", nil, fmt.Errorf("places are damaged: %q of partition %d", s, i)
		}
		places[i] = p
	}
	return f.Store, places, nil
}

// mark is a place in the segments of a log, as readers carry it.
type mark struct {
	seq    uint64
	offset int64
}

func (m mark) String() string {
	return strconv.FormatUint(m.seq, 10) + ":" + strconv.FormatInt(m.offset, 10)
}

func parseMark(s string) (mark, error) {
	a, b, ok := strings.Cut(s, ":")
	seq, err1 := strconv.ParseUint(a, 10, 63)
	off, err2 := strconv.ParseUint(b, 10, 63)
	if !ok || err1 != nil || err2 != nil {
		return mark{}, ErrBadCursor
	}
	return mark{seq, int64(off)}, nil
}
