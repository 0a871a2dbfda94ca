package schedule

import (
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/wire"
)

// deed is a flow to be started, or one to be stopped.
type deed struct {
	id    string // as users see it
	at    int64  // the instant that it is started for
	watch bool   // its end must be known
	stop  wire.StopFlow_How
	stops bool
}

// decided is what one turn of a schedule comes to.
type decided struct {
	deeds  []deed
	starts int
	wakeUs int64 // when to look again; 0 = only for an order
}

// decide is one turn: orders are taken, what is due is started or not, by the
// overlap policy. It changes the schedule and nothing else, and depends on
// nothing but its arguments.
func (s *schedule) decide(nowUs int64, orders []order) (decided, error) {
	var d decided
	for i := range orders {
		if err := s.obey(&orders[i]); err != nil {
			return d, err
		}
	}
	s.passMissed(nowUs)
	for s.book.Next != 0 && s.due(s.book.Next) <= nowUs && d.starts < startsATurn {
		s.fire(&d, s.book.Next)
		s.book.Next = s.after(s.book.Next)
	}
	s.drain(&d)
	switch {
	case s.canDrain(), s.book.Next != 0 && s.due(s.book.Next) <= nowUs:
		d.wakeUs = nowUs // more than one turn may do
	case s.book.Next != 0:
		d.wakeUs = s.due(s.book.Next)
	}
	return d, nil
}

// obey takes one order, as of when it was given: instants that passed while it
// waited are not lost.
func (s *schedule) obey(o *order) error {
	switch o.Op {
	case opPut:
		if err := s.take(o.Spec, o.Start); err != nil {
			return err
		}
		s.specChanged = true
		s.rewind(o.At)
	case opPause, opResume:
		paused := o.Op == opPause
		was := s.spec.Paused
		s.spec.Paused, s.spec.Note, s.specChanged = paused, o.Note, true
		if paused != was {
			s.rewind(o.At)
		}
	case opTrigger, opBackfill:
		for _, at := range o.Instants {
			s.queue(wait{at, o.Op})
		}
	case opClosed:
		if o.Refused != "" {
			s.book.Error = o.Refused
			s.book.Started--
			s.book.Skipped++
		}
		if o.Flow == s.book.Running {
			s.book.Running = ""
		}
	}
	return nil
}

// rewind looks ahead from now: what a pause or an older schedule left out is
// not made up.
func (s *schedule) rewind(nowUs int64) {
	s.book.Next = 0
	if !s.spec.Paused {
		s.book.Next = s.after(nowUs)
	}
}

// queue keeps an instant for later.
func (s *schedule) queue(w wait) {
	if len(s.book.Queue) >= MaxBackfill {
		s.book.Skipped++
		return
	}
	s.book.Queue = append(s.book.Queue, w)
}

// after is the instant that follows one, or 0.
func (s *schedule) after(us int64) int64 {
	at := s.times.Next(time.UnixMicro(us))
	if at.IsZero() {
		return 0
	}
	return at.UnixMicro()
}

// due is when the flow of an instant starts: late by its part of the jitter,
// the same for ever, and never later than the instant that follows.
func (s *schedule) due(us int64) int64 {
	jitter := s.spec.JitterUs
	if jitter <= 0 {
		return us
	}
	if next := s.after(us); next != 0 {
		jitter = min(jitter, next-us)
	}
	var b [8]byte
	for i := range b {
		b[i] = byte(us >> (8 * i))
	}
	h := xxhash.New()
	_, _ = h.WriteString(s.spec.Id) // a hash never fails
	_, _ = h.Write(b[:])
	return us + int64(h.Sum64()%uint64(jitter))
}

// passMissed leaves out instants that are longer past than may be made up.
func (s *schedule) passMissed(nowUs int64) {
	catchUp := s.spec.CatchUpUs
	if catchUp == 0 {
		catchUp = defaultCatchUp.Microseconds()
	}
	oldest := nowUs - catchUp
	for n := 0; s.book.Next != 0 && s.due(s.book.Next) < oldest; n++ {
		if n == missedCount { // they are many: the others are not counted
			s.book.Next = max(s.after(oldest-s.spec.JitterUs-1), s.book.Next)
			for s.book.Next != 0 && s.due(s.book.Next) < oldest {
				s.book.Next = s.after(s.book.Next)
			}
			return
		}
		s.book.Skipped++
		s.book.Next = s.after(s.book.Next)
	}
}

// fire does what the overlap policy says for an instant of the schedule.
func (s *schedule) fire(d *decided, at int64) {
	busy := s.book.Running != "" || len(s.book.Queue) > 0
	switch s.spec.Overlap {
	case wire.Schedule_ALLOW:
		s.begin(d, at, false)
	case wire.Schedule_TERMINATE_OTHER:
		if s.book.Running != "" && !s.withdraw(d) {
			d.stop(s.book.Running, wire.StopFlow_TERMINATE)
		}
		s.begin(d, at, true)
	case wire.Schedule_CANCEL_OTHER:
		if !busy || s.withdraw(d) {
			s.begin(d, at, true)
			return
		}
		if s.book.Running != "" {
			d.stop(s.book.Running, wire.StopFlow_CANCEL)
		}
		s.replaceBuffered(at)
	case wire.Schedule_BUFFER_ONE:
		switch {
		case !busy:
			s.begin(d, at, true)
		case s.buffered() >= 0:
			s.book.Skipped++
		default:
			s.queue(wait{At: at})
		}
	default:
		if busy {
			s.book.Skipped++
			return
		}
		s.begin(d, at, true)
	}
}

// withdraw takes back the start of the flow that runs, if it is of this turn:
// only the newest of several instants is meant to run on.
func (s *schedule) withdraw(d *decided) bool {
	for i, deed := range d.deeds {
		if deed.id == s.book.Running && !deed.stops {
			d.deeds = slices.Delete(d.deeds, i, i+1)
			d.starts--
			s.book.Started--
			s.book.Skipped++
			s.book.Running = ""
			return true
		}
	}
	return false
}

// buffered finds the instant of the schedule itself that waits, or -1.
func (s *schedule) buffered() int {
	for i, w := range s.book.Queue {
		if w.By == "" {
			return i
		}
	}
	return -1
}

func (s *schedule) replaceBuffered(at int64) {
	if i := s.buffered(); i >= 0 {
		s.book.Skipped++
		s.book.Queue[i].At = at
		return
	}
	s.queue(wait{At: at})
}

// canDrain says whether a waiting instant may start now. A trigger always may.
func (s *schedule) canDrain() bool {
	if len(s.book.Queue) == 0 {
		return false
	}
	free := s.book.Running == "" || s.spec.Overlap == wire.Schedule_ALLOW
	for _, w := range s.book.Queue {
		if free || w.By == opTrigger {
			return true
		}
	}
	return false
}

// drain starts what waits and may.
func (s *schedule) drain(d *decided) {
	var left []wait
	for i, w := range s.book.Queue {
		if d.starts >= startsATurn {
			left = append(left, s.book.Queue[i:]...)
			break
		}
		free := s.book.Running == "" || s.spec.Overlap == wire.Schedule_ALLOW
		if !free && w.By != opTrigger {
			left = append(left, w)
			continue
		}
		s.begin(d, w.At, s.spec.Overlap != wire.Schedule_ALLOW && s.book.Running == "")
	}
	s.book.Queue = left
}

// begin starts the flow of an instant.
func (s *schedule) begin(d *decided, at int64, watched bool) {
	id := s.flowOf(at)
	d.deeds = append(d.deeds, deed{id: id, at: at, watch: watched})
	d.starts++
	s.book.Started++
	s.book.Last, s.book.LastFlow = at, id
	if watched {
		s.book.Running = id
	}
}

func (d *decided) stop(id string, how wire.StopFlow_How) {
	d.deeds = append(d.deeds, deed{id: id, stop: how, stops: true})
}

// flowOf is the ID of the flow of an instant, as users see it: the instant in
// UTC behind the prefix of the schedule.
func (s *schedule) flowOf(us int64) string {
	layout := "20060102T150405Z"
	if us%1e6 != 0 { // a trigger's
		layout = "20060102T150405.000000Z"
	}
	return prefixOf(s.spec) + time.UnixMicro(us).UTC().Format(layout)
}

// prefixOf is what IDs of a schedule's flows begin with. A letter or digit at
// its end is kept apart from the instant.
func prefixOf(spec *wire.Schedule) string {
	p := spec.GetStart().GetFlowId()
	if p == "" {
		p = spec.GetId()
	}
	switch c := p[len(p)-1]; {
	case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= 0x80:
		return p + "-"
	}
	return p
}
