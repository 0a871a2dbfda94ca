package objectlog

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/journal"
)

// reading drives a Reader by hand.
type reading struct {
	t   *testing.T
	r   *Reader
	now time.Time
}

func newReading(t *testing.T, change func(*ReaderOptions)) *reading {
	o := ReaderOptions{Prefix: testPrefix, HeadSeq: 1, HeadLSN: 1, Owner: &Owner{Epoch: 5, Nonce: 55, Window: 4}}
	if change != nil {
		change(&o)
	}
	return &reading{t: t, r: NewReader(o), now: time.Unix(1e9, 0)}
}

// asks checks the requests that are due: "get 1", "put 1".
func (s *reading) asks(want ...string) {
	s.t.Helper()
	var got []string
	for _, a := range s.r.Actions() {
		got = append(got, map[bool]string{false: "get", true: "put"}[a.Put]+fmt.Sprint(" ", a.Seq))
	}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		s.t.Fatalf("asks for %q, want %q", got, want)
	}
}

func (s *reading) get(seq uint64, data []byte, err error) {
	var obj Object
	if err == nil {
		obj, err = ParseObject(data)
	}
	s.r.GetDone(s.now, seq, obj, err, true)
}

func (s *reading) put(seq uint64, err error) { s.r.PutDone(s.now, seq, err, true) }

func (s *reading) wake(leased bool) {
	s.t.Helper()
	if !s.r.Wake().After(s.now) {
		s.t.Fatal("it does not wait")
	}
	s.now = s.r.Wake()
	s.r.Tick(s.now, leased)
}

// done checks that the log is taken over, and goes on at seq.
func (s *reading) done(seq uint64) {
	s.t.Helper()
	if at, _ := s.r.Place(); !s.r.Done() || s.r.Err() != nil || at != seq {
		s.t.Fatalf("done %v at %d, %v; want %d", s.r.Done(), at, s.r.Err(), seq)
	}
}

func (s *reading) failed(want error) {
	s.t.Helper()
	if !errors.Is(s.r.Err(), want) || s.r.Done() || !s.r.Wake().IsZero() {
		s.t.Fatalf("%v, want %v", s.r.Err(), want)
	}
	s.asks()
}

func frameAt(epoch, seq, lsn uint64) []byte {
	return journal.AppendFrame(nil, journal.Frame{Epoch: epoch, Nonce: 11 * epoch, Seq: seq, FirstLSN: lsn, Count: 1, Body: entries("x")})
}

func sealAt(epoch, seq uint64) []byte {
	return AppendSeal(nil, Seal{Epoch: epoch, Nonce: 11 * epoch, Seq: seq, Resume: seq + 4})
}

func TestReaderAsksForMoreWhileItFinds(t *testing.T) {
	s := newReading(t, nil)
	s.asks("get 1")
	s.get(1, frameAt(4, 1, 1), nil)
	s.asks("get 2")
	if _, ok := s.r.Next(); !ok {
		t.Fatal("no frame")
	}
	s.asks("get 3") // two at once now
	s.get(3, frameAt(4, 3, 3), nil)
	if _, ok := s.r.Next(); ok {
		t.Fatal("out of order")
	}
	s.get(2, frameAt(4, 2, 2), nil)
	for range 2 {
		if _, ok := s.r.Next(); !ok {
			t.Fatal("no frame")
		}
	}
	s.asks("get 4", "get 5", "get 6", "get 7")
	s.get(5, frameAt(4, 5, 5), nil) // behind a gap: what a zombie had in flight
	s.get(4, nil, errNotFound)
	s.asks("put 4")
	s.get(6, nil, errNotFound)
	s.put(4, nil)
	s.done(8)
	if x := s.r.Index(); x.Frames() != 3 || x.Bytes() != int64(3*len(frameAt(4, 1, 1))) {
		t.Fatalf("%+v", x)
	}
}

func TestReaderLosesTheRaceForTheSeal(t *testing.T) {
	lost := func() *reading {
		s := newReading(t, nil)
		s.asks("get 1")
		s.get(1, nil, errNotFound)
		s.asks("put 1")
		s.put(1, errPrecondition)
		s.asks("get 1")
		return s
	}
	s := lost()
	s.get(1, frameAt(4, 1, 1), nil) // a frame of the former owner: read on
	s.asks("get 2")
	s.get(2, sealAt(3, 2), nil)
	s.failed(ErrCorrupt) // of an epoch before the frame's

	s = lost()
	s.get(1, sealAt(4, 1), nil) // another taker, older
	s.asks("get 5", "get 6")
	s.get(5, nil, errNotFound)
	s.asks("put 5")
	s.put(5, nil)
	s.done(9)

	s = lost()
	s.get(1, sealAt(6, 1), nil)
	s.failed(ErrFenced)

	s = lost()
	s.get(1, frameAt(5, 1, 1), nil) // its epoch, but it has written nothing
	s.failed(ErrFenced)

	s = lost()
	s.get(1, sealAt(5, 1), nil) // its own, by an attempt whose answer was lost
	s.done(5)

	s = lost()
	for range maxSealRounds {
		s.get(1, nil, errNotFound)
		s.asks("put 1")
		s.put(1, errPrecondition)
		s.r.Actions()
	}
	s.failed(ErrFenced)
}

func TestReaderTriesAgain(t *testing.T) {
	s := newReading(t, nil)
	s.asks("get 1")
	s.get(1, nil, errUnavailable)
	s.asks()
	s.wake(true)
	s.asks("get 1")
	s.get(1, nil, errNotFound)
	s.asks("put 1")
	for range 5 {
		s.put(1, errAmbiguous)
		s.asks()
		s.wake(true)
		s.asks("put 1")
	}
	s.r.PutDone(s.now, 1, nil, false)
	s.failed(ErrLeaseOver)

	s = newReading(t, nil)
	s.asks("get 1")
	s.get(1, nil, errUnavailable)
	s.wake(false)
	s.failed(ErrLeaseOver)

	s = newReading(t, func(o *ReaderOptions) { o.GiveUp = time.Second })
	for s.r.Err() == nil {
		s.asks("get 1")
		s.get(1, nil, errUnavailable)
		if s.r.Err() == nil {
			s.wake(true)
		}
	}
	s.failed(errUnavailable)

	s = newReading(t, nil)
	s.asks("get 1")
	s.get(1, nil, errNotFound)
	s.asks("put 1")
	s.put(1, errAmbiguous)
	s.wake(false)
	s.failed(ErrLeaseOver)
}

func TestReaderTriesTheTailFirst(t *testing.T) {
	s := newReading(t, func(o *ReaderOptions) { o.Tail = 1 })
	s.asks("put 1")
	s.put(1, nil)
	s.done(5)

	s = newReading(t, func(o *ReaderOptions) { o.Tail = 1 })
	s.asks("put 1")
	s.put(1, errPrecondition)
	s.asks("get 1")
}

func TestReaderWithoutAnOwner(t *testing.T) {
	s := newReading(t, func(o *ReaderOptions) { o.Owner = nil })
	s.asks("get 1")
	s.get(1, sealAt(9, 1), nil)
	s.asks("get 5", "get 6")
	s.get(5, nil, errNotFound)
	s.done(5)

	s = newReading(t, func(o *ReaderOptions) { o.Owner, o.Stop = nil, 2 })
	s.asks("get 1")
	s.get(1, frameAt(9, 1, 1), nil)
	s.asks()
	s.done(2)
}
