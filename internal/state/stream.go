package state

import (
	"bytes"
	"slices"
	"sort"

	"github.com/cockroachdb/pebble/v2"

	"github.com/perdure-dev/perdure/internal/query"
)

// stream gives places in order. seek gives the first one that is not before at,
// which never goes back from call to call; it is good until the next call.
type stream interface {
	seek(at []byte) (place []byte, state streamState, err error)
}

type streamState uint8

const (
	there  streamState = iota
	ended              // there is none
	paused             // the bound of work was met: there is none before place
)

// rowStream is the rows behind a prefix.
type rowStream struct {
	s       *searcher
	it      *pebble.Iterator
	prefix  []byte
	key     []byte
	started bool
}

func (r *rowStream) seek(at []byte) ([]byte, streamState, error) {
	switch {
	case !r.started:
		r.started = true
		r.seekGE(at)
	case r.it.Valid() && bytes.Compare(r.place(), at) < 0:
		r.s.work++
		if r.it.Next() && bytes.Compare(r.place(), at) < 0 {
			r.seekGE(at)
		}
	}
	if !r.it.Valid() {
		return nil, ended, r.it.Error()
	}
	return r.place(), there, nil
}

func (r *rowStream) seekGE(at []byte) {
	r.s.work++
	r.key = append(append(r.key[:0], r.prefix...), at...)
	r.it.SeekGE(r.key)
}

func (r *rowStream) place() []byte { return r.it.Key()[len(r.prefix):] }

// placeList is places in memory.
type placeList struct {
	bytes  []byte
	places [][2]int // ranges in bytes
}

func (l *placeList) add(place []byte) {
	from := len(l.bytes)
	l.bytes = append(l.bytes, place...)
	l.places = append(l.places, [2]int{from, len(l.bytes)})
}

func (l *placeList) at(i int) []byte { return l.bytes[l.places[i][0]:l.places[i][1]] }

func (l *placeList) sort() {
	slices.SortFunc(l.places, func(a, b [2]int) int {
		return bytes.Compare(l.bytes[a[0]:a[1]], l.bytes[b[0]:b[1]])
	})
}

func (l *placeList) seek(at []byte) ([]byte, streamState, error) {
	i := 0
	if len(l.places) > 0 && bytes.Compare(l.at(0), at) < 0 {
		i = sort.Search(len(l.places), func(i int) bool { return bytes.Compare(l.at(i), at) >= 0 })
	}
	if l.places = l.places[i:]; len(l.places) == 0 {
		return nil, ended, nil
	}
	return l.at(0), there, nil
}

// oneOf gives what any of its streams gives, once.
type oneOf struct{ kids []stream }

func (o *oneOf) seek(at []byte) (first []byte, state streamState, err error) {
	state = ended
	for _, k := range o.kids {
		place, st, err := k.seek(at)
		if err != nil {
			return nil, ended, err
		}
		if st != ended && (state == ended || bytes.Compare(place, first) < 0) {
			first, state = place, st
		}
	}
	return first, state, nil
}

// allOf gives what all of its streams give, by leaps: a place that one of them
// skips is skipped in the others.
type allOf struct {
	s    *searcher
	kids []stream
	at   []byte
}

func (a *allOf) seek(at []byte) ([]byte, streamState, error) {
	a.at = append(a.at[:0], at...)
	for agreed := 0; ; {
		for _, k := range a.kids {
			place, st, err := k.seek(a.at)
			if err != nil || st != there {
				return place, st, err
			}
			if bytes.Equal(place, a.at) {
				agreed++
			} else {
				a.at = append(a.at[:0], place...)
				agreed = 1
			}
			if agreed == len(a.kids) {
				return a.at, there, nil
			}
		}
		if a.s.work >= searchWork {
			return a.at, paused, nil
		}
	}
}

// windowed gives what lies between two instants of creation.
type windowed struct {
	in    stream
	first []byte // created: the newest
	last  []byte // created: the oldest
}

func window(p *query.Plan, in stream) stream {
	return &windowed{in: in, first: appendCreated(nil, p.To), last: appendCreated(nil, p.From)}
}

func (w *windowed) seek(at []byte) ([]byte, streamState, error) {
	if bytes.Compare(at, w.first) < 0 {
		at = w.first
	}
	place, st, err := w.in.seek(at)
	if err == nil && st != ended && bytes.Compare(place[:min(placeBytes, len(place))], w.last) > 0 {
		return nil, ended, nil
	}
	return place, st, err
}
