package schedule

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC).UnixMicro()

// at gives an instant so many seconds after noon.
func at(sec int64) int64 { return noon + sec*1e6 }

// newSchedule makes one that fires each minute, as of noon.
func newSchedule(t *testing.T, change func(*wire.Schedule)) *schedule {
	t.Helper()
	spec := &wire.Schedule{Id: "s", Cron: "* * * * *", Start: &wire.StartRequest{FlowId: "f/", FlowType: "job", Step: "run"}}
	if change != nil {
		change(spec)
	}
	times, err := ParseTimes(spec.Cron, spec.TimeZone)
	if err != nil {
		t.Fatal(err)
	}
	s := &schedule{spec: spec, times: times, start: &wire.StartFlow{Type: "job"}}
	s.rewind(noon)
	return s
}

// turn does one turn and tells what came of it: seconds after noon of what is
// started (! = watched), stopped or waited for.
func turn(t *testing.T, s *schedule, sec int64, orders ...order) string {
	t.Helper()
	for i := range orders {
		orders[i].At = at(sec)
	}
	d, err := s.decide(at(sec), orders)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, deed := range d.deeds {
		name := strings.TrimPrefix(deed.id, "f/20261201T")
		switch {
		case deed.stops:
			out = append(out, strings.ToLower(deed.stop.String())+":"+name)
		case deed.watch:
			out = append(out, name+"!")
		default:
			out = append(out, name)
		}
	}
	if d.wakeUs != 0 {
		out = append(out, fmt.Sprintf("wake:%g", float64(d.wakeUs-noon)/1e6))
	}
	if n := len(s.book.Queue); n > 0 {
		out = append(out, fmt.Sprintf("queue:%d", n))
	}
	return strings.Join(out, " ")
}

func closedOrder(name string) order { return order{Op: opClosed, Flow: "f/20261201T" + name} }

func TestOverlapPolicies(t *testing.T) {
	type step struct {
		sec    int64
		orders []order
		want   string
	}
	first := closedOrder("120100Z")
	for policy, steps := range map[wire.Schedule_Overlap][]step{
		wire.Schedule_SKIP: {
			{60, nil, "120100Z! wake:120"},
			{120, nil, "wake:180"},
			{150, []order{first}, "wake:180"},
			{180, nil, "120300Z! wake:240"},
		},
		wire.Schedule_BUFFER_ONE: {
			{60, nil, "120100Z! wake:120"},
			{120, nil, "wake:180 queue:1"},
			{180, nil, "wake:240 queue:1"},
			{190, []order{first}, "120200Z! wake:240"},
			{240, nil, "wake:300 queue:1"},
		},
		wire.Schedule_ALLOW: {
			{60, nil, "120100Z wake:120"},
			{121, nil, "120200Z wake:180"},
		},
		wire.Schedule_CANCEL_OTHER: {
			{60, nil, "120100Z! wake:120"},
			{120, nil, "cancel:120100Z wake:180 queue:1"},
			{180, nil, "cancel:120100Z wake:240 queue:1"},
			{181, []order{first}, "120300Z! wake:240"},
		},
		wire.Schedule_TERMINATE_OTHER: {
			{60, nil, "120100Z! wake:120"},
			{120, nil, "terminate:120100Z 120200Z! wake:180"},
			{121, []order{first}, "wake:180"}, // the one before, not the one that runs
			{180, nil, "terminate:120200Z 120300Z! wake:240"},
		},
	} {
		s := newSchedule(t, func(spec *wire.Schedule) { spec.Overlap = policy })
		for i, st := range steps {
			if got := turn(t, s, st.sec, st.orders...); got != st.want {
				t.Errorf("%v, step %d: %s, want %s", policy, i, got, st.want)
			}
		}
	}
}

func TestMissedInstantsAreMadeUpWithinTheWindow(t *testing.T) {
	for _, c := range []struct {
		policy  wire.Schedule_Overlap
		want    string
		started uint64
		skipped uint64
	}{
		{wire.Schedule_ALLOW, "120700Z 120800Z 120900Z 121000Z wake:660", 4, 6},
		{wire.Schedule_SKIP, "120700Z! wake:660", 1, 9},
		{wire.Schedule_BUFFER_ONE, "120700Z! wake:660 queue:1", 1, 8},
		{wire.Schedule_TERMINATE_OTHER, "121000Z! wake:660", 1, 9},
		{wire.Schedule_CANCEL_OTHER, "121000Z! wake:660", 1, 9},
	} {
		s := newSchedule(t, func(spec *wire.Schedule) { spec.Overlap, spec.CatchUpUs = c.policy, 200e6 })
		if got := turn(t, s, 601); got != c.want || s.book.Started != c.started || s.book.Skipped != c.skipped {
			t.Errorf("%v: %s, %d started, %d skipped", c.policy, got, s.book.Started, s.book.Skipped)
		}
	}
	// A long time does not cost long work.
	s := newSchedule(t, func(spec *wire.Schedule) { spec.Cron = "@every 1s" })
	if got := turn(t, s, 10*365*86400); !strings.HasPrefix(got, "f/20361128T115900Z! wake:") || s.book.Skipped != missedCount+60 {
		t.Errorf("after ten years: %s, %d skipped", got, s.book.Skipped)
	}
}

func TestOneTurnStartsABoundedNumber(t *testing.T) {
	s := newSchedule(t, func(spec *wire.Schedule) {
		spec.Cron, spec.Overlap, spec.CatchUpUs = "@every 1s", wire.Schedule_ALLOW, 3600e6
	})
	starts := 0
	for sec := int64(250); ; {
		d, err := s.decide(at(sec), nil)
		if err != nil || d.starts > startsATurn {
			t.Fatal(d, err)
		}
		starts += d.starts
		if d.wakeUs != at(sec) {
			break
		}
	}
	if starts != 250 {
		t.Errorf("%d starts", starts)
	}
}

func TestPauseResumeAndPut(t *testing.T) {
	s := newSchedule(t, nil)
	if got := turn(t, s, 30, order{Op: opPause, Note: "broken"}); got != "" || !s.spec.Paused || s.spec.Note != "broken" || !s.specChanged {
		t.Errorf("paused: %s, %v", got, s.spec)
	}
	if got := turn(t, s, 300, order{Op: opTrigger, Instants: []int64{at(300) + 1}}); got != "120500.000001Z!" {
		t.Errorf("triggered while paused: %s", got)
	}
	if got := turn(t, s, 330, order{Op: opResume}); got != "wake:360" || s.book.Skipped != 0 {
		t.Errorf("resumed: %s, %d skipped", got, s.book.Skipped)
	}
	spec, err := (&wire.Schedule{Id: "s", Cron: "*/10 * * * *", Start: &wire.StartRequest{}}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	if got := turn(t, s, 400, order{Op: opPut, Spec: spec}, order{Op: opPause}, order{Op: opPut, Spec: spec}); got != "wake:600" || s.spec.Paused || s.book.Started != 1 {
		t.Errorf("replaced: %s", got)
	}
	if id := s.flowOf(at(0)); id != "s-20261201T120000Z" {
		t.Errorf("flow ID %s", id)
	}
}

func TestBackfillAndTrigger(t *testing.T) {
	fill := order{Op: opBackfill, Instants: []int64{at(-180), at(-120), at(-60)}}
	s := newSchedule(t, nil)
	if got := turn(t, s, 10, fill); got != "115700Z! wake:60 queue:2" {
		t.Errorf("backfill: %s", got)
	}
	if got := turn(t, s, 20, order{Op: opTrigger, Instants: []int64{at(20) + 5}}); got != "120020.000005Z wake:60 queue:2" {
		t.Errorf("trigger: %s", got)
	}
	if got := turn(t, s, 60); got != "wake:120 queue:2" || s.book.Skipped != 1 {
		t.Errorf("its own instant: %s", got)
	}
	if got := turn(t, s, 61, closedOrder("115700Z")); got != "115800Z! wake:120 queue:1" {
		t.Errorf("goes on: %s", got)
	}
	o := closedOrder("115800Z")
	o.Refused = "it exists already"
	if got := turn(t, s, 62, o); got != "115900Z! wake:120" || s.book.Skipped != 2 || s.book.Started != 3 || s.book.Error == "" {
		t.Errorf("one is there already: %s, %+v", got, s.book)
	}
	s = newSchedule(t, func(spec *wire.Schedule) { spec.Overlap = wire.Schedule_ALLOW })
	if got := turn(t, s, 10, fill); got != "115700Z 115800Z 115900Z wake:60" {
		t.Errorf("side by side: %s", got)
	}
	var many order
	many.Op = opBackfill
	for i := range MaxBackfill + 5 {
		many.Instants = append(many.Instants, at(int64(-i*60)))
	}
	s = newSchedule(t, nil)
	turn(t, s, 10, many)
	if n := len(s.book.Queue); n != MaxBackfill-1 || s.book.Skipped != 5 {
		t.Errorf("%d wait, %d skipped", n, s.book.Skipped)
	}
}

func TestJitterIsTheSameForEver(t *testing.T) {
	s := newSchedule(t, func(spec *wire.Schedule) { spec.JitterUs = 3600e6 })
	other := newSchedule(t, func(spec *wire.Schedule) { spec.JitterUs, spec.Id = 3600e6, "other" })
	last, same := int64(0), 0
	var late []int64
	for us := at(60); us < at(6000); us += 60e6 {
		due := s.due(us)
		if due < us || due >= us+60e6 || due <= last || due != s.due(us) {
			t.Fatalf("instant %d is due at %d, after %d", us, due, last)
		}
		if last = due; due == other.due(us) {
			same++
		}
		late = append(late, due-us)
	}
	slices.Sort(late)
	if median := late[len(late)/2]; same > 3 || median < 15e6 || median > 45e6 {
		t.Errorf("median jitter %d, %d the same as another's", median, same)
	}
	if got := turn(t, s, 60); got != fmt.Sprintf("wake:%g", float64(s.due(at(60))-noon)/1e6) && !strings.HasPrefix(got, "120100Z!") {
		t.Errorf("waits: %s", got)
	}
}

func TestRefusedTurnGivesUpItsStarts(t *testing.T) {
	s := newSchedule(t, nil)
	d, err := s.decide(at(60), nil)
	if err != nil || len(d.deeds) != 1 {
		t.Fatal(d, err)
	}
	s.giveUp(&d)
	if len(d.deeds) != 0 || s.book.Started != 0 || s.book.Skipped != 1 || s.book.Running != "" || s.book.Error == "" {
		t.Errorf("%+v", s.book)
	}
	if got := turn(t, s, 120); got != "120200Z! wake:180" {
		t.Errorf("goes on: %s", got)
	}
}

// Whatever comes, the books add up and a schedule looks again.
func FuzzDecide(f *testing.F) {
	f.Add([]byte{0, 60, 1, 200, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		next := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			v := int(b[0]) % n
			b = b[1:]
			return v
		}
		s := newSchedule(t, func(spec *wire.Schedule) {
			spec.Overlap, spec.JitterUs = wire.Schedule_Overlap(next(5)), int64(next(3))*40e6
		})
		running := map[string]bool{}
		sec, starts := int64(0), uint64(0)
		for len(b) > 0 {
			sec += int64(next(256))
			var orders []order
			switch next(6) {
			case 1:
				orders = append(orders, order{Op: opPause})
			case 2:
				orders = append(orders, order{Op: opResume})
			case 3:
				orders = append(orders, order{Op: opTrigger, Instants: []int64{at(sec) + 1}})
			case 4:
				orders = append(orders, order{Op: opBackfill, Instants: []int64{at(-60 * int64(1+next(9)))}})
			case 5:
				orders = append(orders, order{Op: opClosed, Flow: s.book.Running})
				delete(running, s.book.Running)
			}
			for i := range orders {
				orders[i].At = at(sec)
			}
			d, err := s.decide(at(sec), orders)
			if err != nil {
				t.Fatal(err)
			}
			watched := 0
			for _, deed := range d.deeds {
				switch {
				case deed.stops && deed.stop == wire.StopFlow_TERMINATE:
					delete(running, deed.id)
				case deed.stops:
				default:
					starts++
					if deed.watch {
						watched++
						running[deed.id] = true
					}
				}
			}
			if len(running) > 1 || s.book.Running != "" && !running[s.book.Running] || watched > 1 {
				t.Fatalf("%v run, the book says %q", running, s.book.Running)
			}
			if s.book.Started != starts {
				t.Fatalf("%d started, the book says %d", starts, s.book.Started)
			}
			if s.book.Next != 0 && (d.wakeUs < at(sec) || d.wakeUs > at(sec)+120e6) || s.spec.Paused != (s.book.Next == 0) {
				t.Fatalf("at %d looks again at %d, next %d", at(sec), d.wakeUs, s.book.Next)
			}
		}
	})
}
