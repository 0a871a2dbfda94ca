package objectlog

import (
	"container/heap"
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// splitmix is a small seeded generator.
type splitmix uint64

func (s *splitmix) Uint64() uint64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// world is one partition's log on one store, with owners that come, are
// superseded without knowing it, pause, crash and lose answers. Everything
// happens in events on one goroutine.
type world struct {
	rand   splitmix
	now    time.Time
	events eventQueue
	order  uint64
	inner  *mem.Store
	store  *blob.Faulty
	faulty bool // faults are on, and owners come and go

	m      manifest
	nodes  []*simNode
	follow *Follower
	check  checker
}

type event struct {
	at    time.Time
	order uint64
	do    func()
}

type eventQueue []event

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].order < q[j].order
}
func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *eventQueue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *eventQueue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

func newWorld(seed uint64) *world {
	w := &world{rand: splitmix(seed), now: time.Unix(1e9, 0), inner: mem.New(mem.Options{}), faulty: true}
	w.m.seq, w.m.lsn = 1, 1
	w.check = checker{truth: map[uint64]string{}}
	decide := blob.Seeded(&w.rand, blob.Rates{Refused: 4, Lost: 4, AnswerLost: 6, Late: 5})
	w.store = blob.NewFaulty(w.inner, func(op blob.Op) blob.Fault {
		f := decide(op)
		if !w.faulty {
			f = blob.Fault{}
		}
		return f
	}, blob.FaultHooks{Later: func(write func()) { w.after(w.upTo(3*time.Second), write) }})
	return w
}

func (w *world) after(d time.Duration, do func()) {
	w.order++
	heap.Push(&w.events, event{at: w.now.Add(d), order: w.order, do: do})
}

// upTo draws a time; short ones are likelier.
func (w *world) upTo(d time.Duration) time.Duration {
	d = time.Duration(w.rand.Uint64()%uint64(d)) + 1
	if w.rand.Uint64()%2 == 0 {
		d = d/8 + 1
	}
	return d
}

func (w *world) percent(n uint64) bool { return w.rand.Uint64()%100 < n }

// step runs the next event; false when there is none before the end.
func (w *world) step(end time.Time) bool {
	if len(w.events) == 0 || w.events[0].at.After(end) || w.check.err != nil {
		return false
	}
	e := heap.Pop(&w.events).(event)
	w.now = e.at
	e.do()
	return true
}

// simNode is one owner from its take-over on.
type simNode struct {
	w      *world
	epoch  uint64
	nonce  uint64
	window int
	former int

	reader *Reader
	writer *Writer
	index  *Index
	view   map[uint64]string // what the take-over has read
	head   uint64            // LSN from which on it has read

	leaseEnd time.Time // zero: it believes in its lease for ever, which must do no harm
	paused   time.Time
	dead     bool
	fenced   bool
	acked    uint64 // sequence of the last acknowledged frame
	trimming bool
}

// takeOver is the compare-and-swap of the manifest and the start of the reading.
func (w *world) takeOver() *simNode {
	n := &simNode{w: w, window: 1 + int(w.rand.Uint64()%4), former: w.m.window, nonce: w.rand.Uint64(), view: map[uint64]string{}}
	w.m.epoch++
	if PlantReuseEpoch && w.m.epoch > 1 {
		w.m.epoch--
	}
	w.m.window = max(w.m.window, n.window)
	n.epoch = w.m.epoch
	w.m.owner = n.nonce
	if w.percent(30) {
		n.leaseEnd = w.now.Add(w.upTo(4 * time.Second))
	}
	o := ReaderOptions{Prefix: testPrefix, HeadSeq: w.m.seq, HeadLSN: w.m.lsn, Rand: &w.rand,
		Owner: &Owner{Epoch: n.epoch, Nonce: n.nonce, Window: w.m.window}}
	if w.follow != nil && w.percent(40) { // a warm standby
		_, lsn := w.follow.Place()
		o.Known, o.FromLSN = w.follow.Known(), lsn-min(w.rand.Uint64()%4, lsn-1)
		if w.percent(20) {
			o.Tail, _ = w.follow.Place()
		}
	}
	n.reader = NewReader(o)
	_, n.head = n.reader.Place()
	w.nodes = append(w.nodes, n)
	n.pump()
	return n
}

func (n *simNode) leased() bool { return n.leaseEnd.IsZero() || n.w.now.Before(n.leaseEnd) }

func (n *simNode) owns() bool { return n.w.m.owner == n.nonce }

// at runs do d from now, or when the node's pause is over, unless it is dead.
func (n *simNode) at(d time.Duration, do func()) {
	n.w.after(d, func() {
		switch {
		case n.dead:
		case n.w.now.Before(n.paused):
			n.at(n.paused.Sub(n.w.now), do)
		default:
			do()
		}
	})
}

// request does an action: it reaches the store after a while, and the answer
// the node after another.
func (n *simNode) request(a Action) {
	w, asker := n.w, n.writer
	w.after(w.upTo(40*time.Millisecond), func() {
		var obj blob.Object
		var err error
		if a.Put {
			_, err = w.store.Put(context.Background(), a.Key, a.Data, putNew)
		} else {
			obj, err = w.store.Get(context.Background(), a.Key)
		}
		n.at(w.upTo(40*time.Millisecond), func() {
			n.answer(asker, a, obj.Data, err)
			n.pump()
		})
	})
}

// answer tells an answer to whom asked: the writer, or the reader (nil).
func (n *simNode) answer(asker *Writer, a Action, data []byte, err error) {
	if asker != nil {
		if a.Put {
			n.writer.PutDone(n.w.now, a.Seq, err, n.leased())
		} else {
			n.writer.GetDone(n.w.now, a.Seq, data, err, n.leased())
		}
		return
	}
	if a.Put {
		n.reader.PutDone(n.w.now, a.Seq, err, n.leased())
		return
	}
	var obj Object
	if err == nil {
		obj, err = ParseObject(data)
	}
	n.reader.GetDone(n.w.now, a.Seq, obj, err, n.leased())
}

// pump does what the node's machine asks for.
func (n *simNode) pump() {
	if n.dead || n.fenced {
		return
	}
	var wake time.Time
	if n.writer == nil {
		n.pumpReader()
		wake = n.reader.Wake()
	}
	if n.writer != nil {
		n.pumpWriter()
		wake = n.writer.Wake()
	}
	if !wake.IsZero() {
		n.at(max(wake.Sub(n.w.now), 0), func() {
			if n.writer != nil {
				n.writer.Tick(n.w.now, n.leased())
			} else {
				n.reader.Tick(n.w.now, n.leased())
			}
			n.pump()
		})
	}
}

func (n *simNode) pumpReader() {
	r := n.reader
	for {
		d, ok := r.Next()
		if !ok {
			break
		}
		n.w.check.delivered(fmt.Sprintf("the take-over of epoch %d", n.epoch), d.Frame, n.view)
	}
	for _, a := range r.Actions() {
		n.request(a)
	}
	switch {
	case r.Err() != nil:
		n.stop(r.Err())
	case r.Done() && n.index == nil:
		n.index = r.Index()
		n.at(n.w.upTo(20*time.Millisecond), n.confirm)
	}
}

// confirm reads the manifest once more, and begins to write.
func (n *simNode) confirm() {
	if !n.owns() {
		n.stop(ErrFenced)
		return
	}
	seq, lsn := n.reader.Place()
	n.w.check.tookOver(n, lsn)
	n.acked = seq - 1
	n.writer = NewWriter(WriterOptions{Prefix: testPrefix, Owner: Owner{Epoch: n.epoch, Nonce: n.nonce, Window: n.w.m.window},
		Seq: seq, LSN: lsn, MaxInFlight: n.window, Rand: &n.w.rand})
	n.write()
}

// write adds a frame now and then.
func (n *simNode) write() {
	w := n.w
	if room, _ := n.writer.Room(w.now); n.writer.InFlight() < room && n.writer.Err() == nil {
		f := journal.Frame{Epoch: n.epoch, Nonce: n.nonce, Seq: n.writer.NextSeq(), FirstLSN: n.writer.NextLSN(), Count: uint32(w.rand.Uint64() % 4)}
		for i := range f.Count {
			f.Body = journal.AppendEntry(f.Body, fmt.Appendf(nil, "%d by %x", f.FirstLSN+uint64(i), n.nonce))
		}
		if err := n.writer.Add(w.now, f, journal.AppendFrame(nil, f)); err != nil {
			w.check.failf("epoch %d: add: %v", n.epoch, err)
		}
		n.pump()
	}
	if !n.fenced {
		n.at(w.upTo(60*time.Millisecond), n.write)
	}
}

func (n *simNode) pumpWriter() {
	for _, f := range n.writer.Finished() {
		if f.Err != nil {
			continue
		}
		if f.Seq != n.acked+1 {
			n.w.check.failf("epoch %d: frame %d is acknowledged after %d", n.epoch, f.Seq, n.acked)
		}
		n.acked = f.Seq
		fr, _, err := journal.DecodeFrame(f.Data)
		if err != nil {
			n.w.check.failf("%v", err)
		}
		n.w.check.acknowledged(n, fr)
		n.index.Add(f.Seq, f.FirstLSN, f.Count, len(f.Data))
	}
	for _, a := range n.writer.Actions() {
		n.request(a)
	}
	if err := n.writer.Err(); err != nil {
		n.stop(err)
	}
}

// stop ends a node that was fenced, and judges whether it may have been.
func (n *simNode) stop(err error) {
	n.fenced = true
	switch {
	case errors.Is(err, ErrLeaseOver) && !n.leaseEnd.IsZero():
	case !n.owns():
	default:
		n.w.check.failf("epoch %d, which nobody has superseded, ends: %v", n.epoch, err)
	}
}

// trim gives up a part of what is acknowledged, as if a snapshot held it.
func (n *simNode) trim() {
	w := n.w
	if n.writer == nil || n.fenced || n.trimming {
		return
	}
	next, lsn := n.writer.Settled()
	upTo := lsn - 1
	if w.percent(50) {
		upTo -= min(w.rand.Uint64()%8, upTo)
	}
	seq, first := n.index.Head(upTo, next)
	n.trimming = true
	n.at(w.upTo(100*time.Millisecond), func() { // the compare-and-swap
		n.trimming = false
		if !n.owns() || seq < w.m.seq {
			return
		}
		w.m.seq, w.m.lsn = seq, first
		doomed := n.index.Cut(seq)
		if w.percent(30) {
			infos, err := w.inner.List(context.Background(), KeyPrefix(testPrefix), "", blob.MaxList)
			if err != nil {
				panic(err)
			}
			doomed = append(doomed, Sweep(testPrefix, infos, seq)...)
		}
		for _, s := range doomed {
			w.after(w.upTo(500*time.Millisecond), func() {
				_ = w.store.Delete(context.Background(), Key(testPrefix, s), blob.DeleteOptions{})
			})
		}
	})
}

// tail lets the follower look for new frames.
func (w *world) tail() {
	pause := 200 * time.Millisecond
	if w.percent(10) {
		pause = 5 * time.Second // it may be trimmed
	}
	w.after(w.upTo(pause), w.tail)
	if w.follow == nil {
		w.follow = NewFollower(FollowerOptions{Store: w.store, Prefix: testPrefix, HeadSeq: w.m.seq, HeadLSN: w.m.lsn, Head: w.m.head,
			Clock: env.SystemClock{}, Go: func(f func()) { f() }})
	}
	_, err := w.follow.Next(context.Background(), func(f journal.Frame) error {
		w.check.delivered("the follower", f, nil)
		return nil
	})
	switch {
	case err == nil, errors.Is(err, blob.ErrUnavailable):
	case errors.Is(err, ErrTrimmed):
		w.follow = nil
	default:
		w.check.failf("the follower: %v", err)
	}
}

// stir makes something happen now and then: a new owner, a pause, a crash, a
// trim.
func (w *world) stir() {
	if !w.faulty {
		return
	}
	w.after(w.upTo(300*time.Millisecond), w.stir)
	var live []*simNode
	for _, n := range w.nodes {
		if !n.dead && !n.fenced {
			live = append(live, n)
		}
	}
	if len(live) == 0 || len(live) < 3 && w.percent(15) {
		w.takeOver()
		return
	}
	n := live[w.rand.Uint64()%uint64(len(live))]
	switch roll := w.rand.Uint64() % 100; {
	case roll < 10:
		n.dead = true
	case roll < 30:
		n.paused = w.now.Add(w.upTo(4 * time.Second))
	case roll < 75:
		n.trim()
	}
}

// run is a whole life of the log; the error is what the checker has found.
func run(seed uint64) error {
	w := newWorld(seed)
	w.takeOver()
	w.stir()
	w.tail()
	for end := w.now.Add(12 * time.Second); w.step(end); {
	}
	if w.check.err != nil {
		return w.check.err
	}
	// The faults end; whatever is under way arrives. The last owner must get
	// everything.
	w.faulty = false
	for _, n := range w.nodes {
		n.dead = true
	}
	last := w.takeOver()
	last.leaseEnd = time.Time{}
	for end := w.now.Add(10 * time.Second); last.writer == nil && w.step(end); {
	}
	if w.check.err == nil && last.writer == nil {
		w.check.failf("the last take-over does not end: %v", last.reader.Err())
	}
	return w.check.err
}

// checker holds what was acknowledged or delivered to be so for ever.
type checker struct {
	truth map[uint64]string // entry by LSN
	last  uint64            // highest of truth
	taken []taken
	err   error
	acks  int
}

type taken struct{ epoch, lsn uint64 }

func (c *checker) failf(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

func (c *checker) entries(who string, f journal.Frame, see func(lsn uint64, entry string)) {
	lsn := f.FirstLSN
	for raw, err := range journal.Entries(f.Body) {
		if err != nil {
			c.failf("%s: frame %d: %v", who, f.Seq, err)
			return
		}
		entry := strings.Clone(string(raw))
		if old, ok := c.truth[lsn]; ok && old != entry {
			c.failf("%s has %q at LSN %d, which was %q before", who, entry, lsn, old)
		}
		c.truth[lsn] = entry
		c.last = max(c.last, lsn)
		see(lsn, entry)
		lsn++
	}
}

func (c *checker) delivered(who string, f journal.Frame, view map[uint64]string) {
	c.entries(who, f, func(lsn uint64, entry string) {
		if view != nil {
			view[lsn] = entry
		}
	})
}

func (c *checker) acknowledged(n *simNode, f journal.Frame) {
	c.acks++
	who := fmt.Sprintf("an acknowledgement to epoch %d", n.epoch)
	c.entries(who, f, func(lsn uint64, _ string) {
		for _, t := range c.taken {
			if t.epoch > n.epoch && lsn >= t.lsn {
				c.failf("%s of LSN %d, after epoch %d has taken over at %d", who, lsn, t.epoch, t.lsn)
			}
		}
	})
}

// tookOver checks that a new owner has read all that there is, from its head to
// next.
func (c *checker) tookOver(n *simNode, next uint64) {
	c.taken = append(c.taken, taken{n.epoch, next})
	if c.last >= next {
		c.failf("epoch %d takes over at LSN %d, but %d was acknowledged or read before", n.epoch, next, c.last)
	}
	for lsn := n.head; lsn < next; lsn++ {
		if n.view[lsn] != c.truth[lsn] {
			c.failf("epoch %d has read %q at LSN %d, not %q", n.epoch, n.view[lsn], lsn, c.truth[lsn])
		}
	}
}

// planted names the mistake that this build has.
func planted() string {
	names := []string{"ack_early", "skip_seal", "trim_seal", "reuse_epoch"}
	i := slices.Index([]bool{plantAckEarly, plantSkipSeal, plantTrimSeal, PlantReuseEpoch}, true)
	if i < 0 {
		return ""
	}
	return "plant_" + names[i]
}

// seeds is how many runs there are, and within how many a planted mistake must
// be found.
var seeds = flag.Uint64("seeds", 120, "runs of TestRandomOwners")

// TestRandomOwners lets owners, zombies and their successors meet on one store.
// In a build with a planted mistake it must find it.
func TestRandomOwners(t *testing.T) {
	for seed := range *seeds {
		err := run(seed)
		switch {
		case err != nil && planted() != "":
			t.Logf("%s was found by seed %d: %v", planted(), seed, err)
			return
		case err != nil:
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	if planted() != "" {
		t.Fatalf("%s was not found within %d seeds", planted(), *seeds)
	}
}
