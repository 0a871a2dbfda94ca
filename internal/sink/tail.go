package sink

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
)

// Bounds of one Tail.
const (
	MaxTailRecords   = 1000    // records of a page
	maxTailBytes     = 1 << 20 // bytes of a page, if it has more than one record
	maxTailScan      = 4 << 20 // bytes looked at, if it found a line
	maxTails         = 4       // readers at a time; more wait
	defaultTailLimit = 100
)

// Errors of Tail.
var (
	ErrBadCursor = errors.New("a log cursor has the form 3:1024, as in the page before")
	ErrNoLog     = errors.New("there is no such log: events, transcripts, access")
)

// Tail reads a log as one tenant sees it. Without a cursor it gives the newest
// records, with one those behind it, both oldest first. next goes on behind
// what was looked at. One call looks at a bounded part of the log: a page
// may be short, or empty though next has moved on; the end is reached when
// next is the cursor given. limit is 100 when 0, at most MaxTailRecords.
//
// Records that retention removed are skipped. Errors: ErrBadCursor, ErrNoLog,
// of ctx, of the disk.
func (s *Sinks) Tail(ctx context.Context, kind Kind, tenant, after string, limit int) (records []json.RawMessage, next string, err error) {
	l := s.logs[kind]
	if l == nil {
		return nil, "", ErrNoLog
	}
	if limit <= 0 {
		limit = defaultTailLimit
	}
	from, err := parseMark(after)
	if err != nil && after != "" {
		return nil, "", err
	}
	select {
	case s.tails <- struct{}{}:
		defer func() { <-s.tails }()
	case <-ctx.Done():
		return nil, "", context.Cause(ctx)
	}
	p := page{log: l, tenant: tenantField(tenant), records: []json.RawMessage{}, room: min(limit, MaxTailRecords), scan: maxTailScan}
	var end mark
	if after == "" {
		end, err = p.newest(ctx)
	} else {
		end, err = p.forward(ctx, from)
	}
	if err != nil {
		return nil, "", fmt.Errorf("read %s: %w", kind, err)
	}
	return p.records, end.String(), nil
}

// tenantField is how a tenant stands in its lines. Nothing before it in a line
// comes from a client, and within JSON strings its quotes would be escaped.
func tenantField(tenant string) []byte {
	return append(appendField(nil, `"tenant":`, tenant), ',')
}

// page is a page of records in the making.
type page struct {
	log     *segmentLog
	tenant  []byte
	records []json.RawMessage
	room    int  // records
	bytes   int  // taken
	scan    int  // bytes that may still be looked at
	looked  bool // at a line
}

// done reports whether the work of the page is done; one line is always looked at.
func (p *page) done() bool { return p.full() || p.scan <= 0 && p.looked }

func (p *page) full() bool { return p.room <= 0 || p.bytes >= maxTailBytes }

// take adds a line if it is the tenant's and whole.
func (p *page) take(line []byte) {
	p.looked = true
	// The tenant is the field behind the first, or the second of a transcript.
	head := line[:min(len(line), 96)]
	i := bytes.Index(head, []byte(`,"tenant":`))
	if i < 0 || !bytes.HasPrefix(line[i+1:], p.tenant) || !json.Valid(line) {
		return
	}
	p.records = append(p.records, bytes.Clone(line))
	p.room--
	p.bytes += len(line)
}

// newest reads backwards from the end.
func (p *page) newest(ctx context.Context) (mark, error) {
	segs := p.log.list()
	if len(segs) == 0 {
		return mark{}, nil
	}
	last := segs[len(segs)-1]
	for i := len(segs) - 1; i >= 0 && !p.done(); i-- {
		if err := p.backward(ctx, segs[i]); err != nil {
			return mark{}, err
		}
	}
	slices.Reverse(p.records)
	return mark{last.seq, last.size}, nil
}

// backward takes the lines of a segment from its end on.
func (p *page) backward(ctx context.Context, s segment) error {
	f, err := p.log.fs.Open(p.log.path(s))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed meanwhile
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var part []byte // begins within a line, unless at is 0
	for at := s.size; at > 0 && !p.done(); {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		n := min(at, max(readChunk, int64(len(part)))) // doubling: a long line is not copied for each chunk
		buf := make([]byte, n, n+int64(len(part)))
		if _, err := f.ReadAt(buf, at-n); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		p.scan -= int(n)
		at -= n
		part = append(buf, part...)
		if part = p.lines(part, at == 0); len(part) > maxLine {
			return nil // damaged
		}
	}
	return nil
}

// lines takes whole lines from the end of b and gives what is before them.
func (p *page) lines(b []byte, whole bool) []byte {
	for len(b) > 0 && !p.full() {
		i := bytes.LastIndexByte(b[:len(b)-1], '\n')
		if i < 0 && !whole {
			return b
		}
		p.take(bytes.TrimSuffix(b[i+1:], []byte{'\n'}))
		b = b[:i+1]
	}
	return b
}

// forward reads from a mark on.
func (p *page) forward(ctx context.Context, at mark) (mark, error) {
	segs := p.log.list()
	i, found := slices.BinarySearchFunc(segs, at.seq, func(s segment, seq uint64) int { return cmp.Compare(s.seq, seq) })
	if !found {
		if i == len(segs) {
			return at, nil // of another log, or nothing is there yet
		}
		at = mark{segs[i].seq, 0}
	}
	for ; i < len(segs); i++ {
		if at.seq != segs[i].seq {
			at = mark{segs[i].seq, 0}
		}
		off, err := p.segment(ctx, segs[i], at.offset)
		at.offset = off
		if err != nil || p.done() {
			return at, err
		}
	}
	return at, nil
}

// segment takes the lines of a segment from an offset on and says up to where.
func (p *page) segment(ctx context.Context, s segment, from int64) (int64, error) {
	if from >= s.size { // beyond it when a crash took the end
		return s.size, nil
	}
	f, err := p.log.fs.Open(p.log.path(s))
	if errors.Is(err, fs.ErrNotExist) {
		return from, nil // removed meanwhile
	}
	if err != nil {
		return from, err
	}
	defer f.Close()
	begin := max(from-1, 0) // a cursor made up by hand may point into a line: its rest is no line
	r := lineReader{r: io.NewSectionReader(f, begin, s.size-begin)}
	for first := from > 0; !p.done(); first = false {
		if err := ctx.Err(); err != nil {
			return begin + r.offset, context.Cause(ctx)
		}
		line, err := r.next()
		if errors.Is(err, io.EOF) {
			return max(s.size, from), nil // only whole lines are counted in the size
		}
		if err != nil {
			return max(begin+r.offset, from), err
		}
		p.scan -= len(line) + 1
		if !first {
			p.take(line)
		}
	}
	return max(begin+r.offset, from), nil
}
