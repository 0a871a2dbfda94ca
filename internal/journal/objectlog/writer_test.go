package objectlog

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/journal"
)

// script drives a Writer by hand.
type script struct {
	t   *testing.T
	w   *Writer
	now time.Time
	log []string // fates of frames: "1" or "1: error"
}

func newScript(t *testing.T, window int) *script {
	return &script{t: t, now: time.Unix(1e9, 0), w: NewWriter(WriterOptions{
		Prefix: testPrefix, Owner: Owner{Epoch: 2, Nonce: 7, Window: window}, Seq: 1, LSN: 1, InitialLatency: time.Second})}
}

func (s *script) frame() journal.Frame {
	return journal.Frame{Epoch: 2, Nonce: 7, Seq: s.w.NextSeq(), FirstLSN: s.w.NextLSN(), Count: 1, Body: entries("x")}
}

// add adds n frames and gives the requests that follow.
func (s *script) add(n int) []Action {
	s.t.Helper()
	for range n {
		f := s.frame()
		if err := s.w.Add(s.now, f, journal.AppendFrame(nil, f)); err != nil {
			s.t.Fatal(err)
		}
	}
	return s.did()
}

// did takes what the Writer has decided.
func (s *script) did() []Action {
	for _, f := range s.w.Finished() {
		fate := fmt.Sprint(f.Seq)
		if f.Err != nil {
			fate += ": " + f.Err.Error()
		}
		s.log = append(s.log, fate)
	}
	return slices.Clone(s.w.Actions())
}

func (s *script) put(seq uint64, err error) []Action {
	s.w.PutDone(s.now, seq, err, true)
	return s.did()
}

func (s *script) get(seq uint64, data []byte, err error) []Action {
	s.w.GetDone(s.now, seq, data, err, true)
	return s.did()
}

// wake moves the time to the Writer's next instant.
func (s *script) wake(leased bool) []Action {
	s.t.Helper()
	at := s.w.Wake()
	if !at.After(s.now) {
		s.t.Fatal("it does not wait")
	}
	s.now = at
	s.w.Tick(s.now, leased)
	return s.did()
}

func (s *script) want(fates ...string) {
	s.t.Helper()
	if len(s.log) != len(fates) {
		s.t.Fatalf("fates %q, want %q", s.log, fates)
	}
	for i := range fates {
		if !strings.HasPrefix(s.log[i]+":", fates[i]+":") && !strings.Contains(s.log[i], fates[i]) {
			s.t.Fatalf("fates %q, want %q", s.log, fates)
		}
	}
}

func one(t *testing.T, acts []Action, put bool, seq uint64) Action {
	t.Helper()
	if len(acts) != 1 || acts[0].Put != put || acts[0].Seq != seq || acts[0].Key != Key(testPrefix, seq) {
		t.Fatalf("actions %+v, want one for %d", acts, seq)
	}
	return acts[0]
}

var (
	errAmbiguous    = fmt.Errorf("%w: test", blob.ErrAmbiguous)
	errUnavailable  = fmt.Errorf("%w: test", blob.ErrUnavailable)
	errPrecondition = fmt.Errorf("%w: test", blob.ErrPrecondition)
	errNotFound     = fmt.Errorf("%w: test", blob.ErrNotFound)
)

func TestWriterAcknowledgesInOrder(t *testing.T) {
	s := newScript(t, 4)
	if acts := s.add(4); len(acts) != 4 {
		t.Fatalf("%+v", acts)
	}
	f := s.frame()
	if err := s.w.Add(s.now, f, nil); !errors.Is(err, ErrWindowFull) {
		t.Fatal(err)
	}
	s.put(3, nil)
	s.put(2, nil)
	s.want()
	s.put(1, nil)
	s.want("1", "2", "3")
	if seq, lsn := s.w.Settled(); seq != 4 || lsn != 4 || s.w.InFlight() != 1 {
		t.Fatal(seq, lsn)
	}
	s.put(1, errPrecondition) // answers that nobody waits for
	s.get(4, nil, errNotFound)
	s.put(4, nil)
	s.want("1", "2", "3", "4")
}

func TestWriterRefusesWhatDoesNotFollow(t *testing.T) {
	s := newScript(t, 4)
	for name, c := range map[string]struct {
		change func(*journal.Frame)
		want   error
	}{
		"epoch":    {func(f *journal.Frame) { f.Epoch = 1 }, journal.ErrStale},
		"nonce":    {func(f *journal.Frame) { f.Nonce = 1 }, journal.ErrStale},
		"sequence": {func(f *journal.Frame) { f.Seq++ }, journal.ErrOutOfOrder},
		"LSN":      {func(f *journal.Frame) { f.FirstLSN++ }, journal.ErrOutOfOrder},
	} {
		f := s.frame()
		c.change(&f)
		if err := s.w.Add(s.now, f, nil); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if acts := s.add(1); len(acts) != 1 {
		t.Fatal("it does not go on")
	}
}

func TestWriterPutsAgain(t *testing.T) {
	for _, err := range []error{errAmbiguous, errUnavailable, errors.New("no idea")} {
		s := newScript(t, 4)
		first := one(t, s.add(1), true, 1)
		began := s.now
		for n := 2; n < 12; n++ {
			if acts := s.put(1, err); len(acts) != 0 {
				t.Fatal("it does not wait")
			}
			if again := one(t, s.wake(true), true, 1); again.Attempt != n || string(again.Data) != string(first.Data) {
				t.Fatalf("attempt %d: %+v", n, again)
			}
		}
		if took := s.now.Sub(began); took > 10*maxBackoff || took < 4*maxBackoff {
			t.Fatalf("ten attempts in %v", took)
		}
		s.put(1, nil)
		s.want("1")
		if st := s.w.Stats(); st.Puts != 11 || st.Retries != 10 {
			t.Fatalf("%+v", st)
		}
	}
}

func TestWriterGivesUp(t *testing.T) {
	t.Run("lease over at an answer", func(t *testing.T) {
		s := newScript(t, 4)
		s.add(2)
		s.w.PutDone(s.now, 2, nil, true)
		s.w.PutDone(s.now, 1, nil, false)
		s.did()
		s.want("lease is over", "lease is over")
		if err := s.w.Add(s.now, s.frame(), nil); !errors.Is(err, ErrLeaseOver) || !errors.Is(err, journal.ErrStale) {
			t.Fatal(err)
		}
	})
	t.Run("lease over while it waits", func(t *testing.T) {
		s := newScript(t, 4)
		s.add(2)
		s.put(2, nil)
		s.put(1, errAmbiguous)
		s.wake(false)
		s.want("lease is over", "lease is over")
	})
	t.Run("without a lease", func(t *testing.T) {
		s := newScript(t, 4)
		s.add(1)
		for range 1000 {
			s.put(1, errUnavailable)
			if s.w.Err() != nil {
				break
			}
			s.wake(true)
		}
		s.want("in doubt")
		if took := s.now.Sub(time.Unix(1e9, 0)); took < DefaultGiveUp || took > DefaultGiveUp+2*maxBackoff {
			t.Fatalf("it gave up after %v", took)
		}
	})
	t.Run("invalid", func(t *testing.T) {
		s := newScript(t, 4)
		s.add(1)
		s.put(1, blob.ErrInvalid)
		s.want("invalid argument")
	})
}

func TestWriterReadsWhatIsThere(t *testing.T) {
	f := journal.Frame{Epoch: 2, Nonce: 7, Seq: 1, FirstLSN: 1, Count: 1, Body: entries("x")}
	other := f
	other.Nonce = 8
	for name, c := range map[string]struct {
		data []byte
		err  error
		want string
	}{
		"its own":           {journal.AppendFrame(nil, f), nil, "1"},
		"another writer's":  {journal.AppendFrame(nil, other), nil, "fenced"},
		"a seal":            {AppendSeal(nil, Seal{Epoch: 3, Nonce: 1, Seq: 1, Resume: 5}), nil, "seal of epoch 3"},
		"neither":           {[]byte("?"), nil, "neither frame nor seal"},
		"gone":              {nil, errNotFound, "gone"},
		"not to be reached": {nil, errUnavailable, ""},
	} {
		s := newScript(t, 4)
		s.add(2)
		one(t, s.put(1, errPrecondition), false, 1)
		s.get(1, c.data, c.err)
		switch {
		case c.want == "":
			s.want()
			one(t, s.wake(true), false, 1) // reads again
			s.get(1, journal.AppendFrame(nil, f), nil)
			s.want("1")
		case c.want == "1":
			s.want("1")
			s.put(2, nil)
			s.want("1", "2")
		default:
			s.want(c.want, c.want)
			if !errors.Is(s.w.Err(), ErrFenced) || !s.w.Stats().Fenced {
				t.Errorf("%s: %v", name, s.w.Err())
			}
			if acts := s.put(2, errAmbiguous); len(acts) != 0 || !s.w.Wake().IsZero() {
				t.Errorf("%s: it goes on: %+v", name, acts)
			}
		}
	}
}

func TestPace(t *testing.T) {
	for _, c := range []struct {
		latency time.Duration
		window  int
		gap     time.Duration
	}{
		{0, 1, 0}, {time.Millisecond, 1, 875 * time.Microsecond}, {8 * time.Millisecond, 1, 7 * time.Millisecond},
		{16 * time.Millisecond, 2, 7 * time.Millisecond}, {24 * time.Millisecond, 3, 7 * time.Millisecond},
		{64 * time.Millisecond, 4, 14 * time.Millisecond}, {time.Second, 4, 218750 * time.Microsecond},
	} {
		p := pace{c.latency}
		if n := p.window(4); n != c.window || p.gap(n) != c.gap {
			t.Errorf("at %v: window %d, gap %v", c.latency, n, p.gap(n))
		}
	}
	var p pace
	for range 100 {
		p.sample(50 * time.Millisecond)
	}
	if p.latency < 49*time.Millisecond || p.latency > 51*time.Millisecond {
		t.Fatal(p.latency)
	}
	p.sample(time.Hour)
	if p.latency > 75*time.Millisecond {
		t.Fatalf("one outlier makes it %v", p.latency)
	}
	for range 100 {
		p.sample(time.Hour)
	}
	if p.latency > maxLatency {
		t.Fatal(p.latency)
	}
	for range 100 {
		p.sample(time.Millisecond)
	}
	if p.window(4) != 1 {
		t.Fatal(p.latency)
	}
}

// TestWriterSpreadsItsPuts: 64 ms, four in flight, so one starts each 14 ms.
func TestWriterSpreadsItsPuts(t *testing.T) {
	s := newScript(t, 4)
	s.w.pace.latency = 64 * time.Millisecond
	var starts []time.Duration
	began := s.now
	for range 4 {
		n, at := s.w.Room(s.now)
		if n == 0 {
			s.now = at
			n, _ = s.w.Room(s.now)
		}
		if n != 4 {
			t.Fatalf("room for %d", n)
		}
		s.add(1)
		starts = append(starts, s.now.Sub(began).Truncate(time.Millisecond))
	}
	if n, at := s.w.Room(s.now.Add(time.Hour)); n != 0 || !at.IsZero() {
		t.Fatal("the window is full, and only an answer helps", n, at)
	}
	if fmt.Sprint(starts) != "[0s 14ms 28ms 42ms]" {
		t.Fatal(starts)
	}
	// With nothing in flight it starts at once.
	for seq := range uint64(4) {
		s.put(seq+1, nil)
	}
	if n, _ := s.w.Room(s.now); n == 0 {
		t.Fatal("it waits for nothing")
	}
}

// TestWriterLingers: two starts are no nearer than asked, with and without frames
// in flight.
func TestWriterLingers(t *testing.T) {
	s := newScript(t, 4)
	s.w.o.Linger, s.w.pace.latency = 100*time.Millisecond, 64*time.Millisecond
	s.add(1)
	for _, acknowledge := range []bool{false, true} {
		if acknowledge {
			s.put(1, nil)
			s.put(2, nil)
		}
		n, at := s.w.Room(s.now)
		if n != 0 || at.Sub(s.now) != 100*time.Millisecond {
			t.Fatalf("acknowledged %v: room for %d, look again in %v", acknowledge, n, at.Sub(s.now))
		}
		s.now = at
		if n, _ := s.w.Room(s.now); n == 0 {
			t.Fatal("it waits for longer than asked")
		}
		s.add(1)
	}
}
