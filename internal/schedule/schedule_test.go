package schedule

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

func TestFlowsStartAtTheirInstants(t *testing.T) {
	w := newWorld(t)
	s := w.ok(put(job("nightly", wire.Schedule_ALLOW), true)).GetSchedule()
	if s.NextUs != at(60) || s.Started != 0 || s.Start.FlowType != "job" {
		t.Errorf("put: %v", s)
	}
	for sec := int64(60); sec <= 180; sec += 60 {
		w.advance(time.Minute)
		w.await("acme/f/"+flow("nightly", sec), core.EventStarted, 1)
	}
	w.until("the book", func() bool { return w.ok(get("nightly")).GetSchedule().Started == 3 })
	s = w.ok(get("nightly")).GetSchedule()
	if s.NextUs != at(240) || s.LastUs != at(180) || s.LastFlowId != flow("nightly", 180) || s.Skipped != 0 {
		t.Errorf("get: %v", s)
	}
	f, err := w.set.For("acme/f/"+s.LastFlowId).Read(w.ctx, "acme/f/"+s.LastFlowId)
	w.must(err)
	if f == nil || string(f.Steps[0].Spec.Input) != `{"n":1}` || f.Type != "job" {
		t.Errorf("flow: %v", f)
	}
}

func TestTheNextOneWaitsForTheLastToEnd(t *testing.T) {
	w := newWorld(t)
	w.ok(put(job("b", wire.Schedule_BUFFER_ONE), true))
	w.advance(time.Minute)
	w.await("acme/f/"+flow("b", 60), core.EventStarted, 1)
	w.advance(time.Minute)
	w.until("one waits", func() bool { return w.ok(get("b")).GetSchedule().Buffered == 1 })
	w.advance(time.Minute)
	w.until("one is skipped", func() bool { return w.ok(get("b")).GetSchedule().Skipped == 1 })
	if n := w.count("acme/f/"+flow("b", 120), core.EventStarted); n != 0 {
		t.Fatal("started beside the one before")
	}
	w.end(flow("b", 60))
	w.await("acme/f/"+flow("b", 120), core.EventStarted, 1)
	w.end(flow("b", 120))
	w.advance(time.Minute)
	w.await("acme/f/"+flow("b", 240), core.EventStarted, 1)
}

func TestOtherIsStopped(t *testing.T) {
	w := newWorld(t)
	w.ok(put(job("term", wire.Schedule_TERMINATE_OTHER), true))
	w.ok(put(job("canc", wire.Schedule_CANCEL_OTHER), true))
	w.advance(time.Minute)
	w.await("acme/f/"+flow("term", 60), core.EventStarted, 1)
	w.await("acme/f/"+flow("canc", 60), core.EventStarted, 1)
	w.advance(time.Minute)
	w.await("acme/f/"+flow("term", 60), core.EventTerminated, 1)
	w.await("acme/f/"+flow("term", 120), core.EventStarted, 1)
	w.await("acme/f/"+flow("canc", 60), core.EventCancelled, 1)
	w.await("acme/f/"+flow("canc", 120), core.EventStarted, 1)
}

func TestPauseTriggerBackfillDelete(t *testing.T) {
	w := newWorld(t)
	w.ok(put(job("p", wire.Schedule_SKIP), true))
	w.ok(pause("p", false))
	if s := w.ok(get("p")).GetSchedule(); !s.Paused || s.Note != "note" || s.NextUs != 0 {
		t.Errorf("paused: %v", s)
	}
	w.advance(10 * time.Minute)
	w.ok(trigger("p"))
	var started string
	w.until("the trigger's flow", func() bool { started = w.ok(get("p")).GetSchedule().LastFlowId; return started != "" })
	w.await("acme/f/"+started, core.EventStarted, 1)
	if !strings.HasPrefix(started, "p-20261201T121000.") {
		t.Errorf("triggered %s", started)
	}
	w.end(started)
	w.ok(pause("p", true))
	if s := w.ok(get("p")).GetSchedule(); s.Paused || s.NextUs != at(660) || s.Skipped != 0 {
		t.Errorf("resumed: %v", s)
	}
	// One after the other, as the policy is not to allow several.
	w.ok(backfill("p", at(120), at(299)))
	for sec := int64(120); sec < 299; sec += 60 {
		w.await("acme/f/"+flow("p", sec), core.EventStarted, 1)
		if n := w.count("acme/f/"+flow("p", sec+60), core.EventStarted); n != 0 {
			t.Errorf("the next one did not wait")
		}
		w.end(flow("p", sec))
	}
	w.until("the backfill ends", func() bool { return w.ok(get("p")).GetSchedule().Started == 4 })
	// Again: those that are there already are left out.
	w.ok(backfill("p", at(120), at(299)))
	w.until("all are refused", func() bool { s := w.ok(get("p")).GetSchedule(); return s.Skipped == 3 && s.Started == 4 })
	w.ok(remove("p"))
	w.advance(10 * time.Minute)
	for _, c := range []*wire.Call{get("p"), pause("p", false), trigger("p"), backfill("p", 1, 2), remove("p")} {
		_, err := w.do(c)
		var ce *core.Error
		if !errors.As(err, &ce) || ce.Code != core.NotFound || ce.Message != `schedule "p" does not exist` {
			t.Errorf("%v: %v", c, err)
		}
	}
	if n := w.count("acme/f/"+flow("p", 660), core.EventStarted); n != 0 {
		t.Error("a deleted schedule started a flow")
	}
}

func TestPutReplacesAndCreateDoesNot(t *testing.T) {
	w := newWorld(t)
	w.ok(put(job("r", wire.Schedule_ALLOW), true))
	_, err := w.do(put(job("r", wire.Schedule_ALLOW), true))
	var ce *core.Error
	if !errors.As(err, &ce) || ce.Code != core.Exists || ce.Message != `schedule "r" exists already` {
		t.Errorf("created twice: %v", err)
	}
	w.advance(time.Minute)
	w.await("acme/f/"+flow("r", 60), core.EventStarted, 1)
	other := job("r", wire.Schedule_ALLOW)
	other.Cron, other.TimeZone, other.Start.FlowId = "30 14 * * *", "Europe/Berlin", "daily/"
	if s := w.ok(put(other, false)).GetSchedule(); s.NextUs != at(5400) || s.Cron != other.Cron || s.Started != 1 {
		t.Errorf("replaced: %v", s)
	}
	w.advance(89 * time.Minute)
	w.await("acme/f/daily/20261201T133000Z", core.EventStarted, 1)
	if s := w.ok(put(other, false)).GetSchedule(); s.NextUs != at(5400+86400) || s.Started != 2 {
		t.Errorf("put again: %v", s)
	}
}

// What a server that was down has missed is made up for when it is back.
func TestMissedWhileDown(t *testing.T) {
	w := newWorld(t)
	s := job("d", wire.Schedule_ALLOW)
	s.CatchUpUs = (150 * time.Second).Microseconds()
	w.ok(put(s, true))
	w.ok(put(job("q", wire.Schedule_SKIP), true))
	w.advance(time.Minute)
	w.await("acme/f/"+flow("d", 60), core.EventStarted, 1)
	w.await("acme/f/"+flow("q", 60), core.EventStarted, 1)
	w.stop()
	w.clock.mu.Lock()
	w.clock.now = w.clock.now.Add(10*time.Minute + time.Second)
	w.clock.mu.Unlock()
	w.open()
	w.advance(0)
	for _, sec := range []int64{540, 600, 660} {
		w.await("acme/f/"+flow("d", sec), core.EventStarted, 1)
	}
	if n := w.count("acme/f/"+flow("d", 480), core.EventStarted); n != 0 {
		t.Error("made up for more than the window")
	}
	w.until("the book", func() bool { return w.ok(get("d")).GetSchedule().Started == 4 })
	if s := w.ok(get("d")).GetSchedule(); s.Skipped != 7 || s.NextUs != at(720) {
		t.Errorf("after: %v", s)
	}
	// The flow of before is watched still.
	w.until("the book of q", func() bool { return w.ok(get("q")).GetSchedule().Skipped == 10 })
	w.end(flow("q", 60))
	w.until("q is free", func() bool {
		f, err := w.set.For("acme/x/q").Read(w.ctx, "acme/x/q")
		w.must(err)
		sched, err := load(f.Attributes)
		w.must(err)
		return sched.book.Running == "" && len(waiting(f)) == 0
	})
	w.advance(time.Minute)
	w.await("acme/f/"+flow("q", 720), core.EventStarted, 1)
}

func TestAStartThatWasAcceptedIsNotLost(t *testing.T) {
	w := newWorld(t)
	w.ok(put(job("a", wire.Schedule_SKIP), true))
	w.mu.Lock()
	w.refuse = errors.New("no worker has registered")
	w.mu.Unlock()
	w.advance(time.Minute)
	w.await("acme/f/"+flow("a", 60), core.EventStarted, 1)
}

func TestSchedulesAreListed(t *testing.T) {
	w := newWorld(t)
	var want []string
	for i := range 23 {
		id := fmt.Sprintf("s/%02d", i)
		s := job(id, wire.Schedule_SKIP)
		if i == 5 {
			s.Start.Input = []byte(`"` + strings.Repeat("x", 5000) + `"`)
		}
		w.ok(put(s, true))
		want = append(want, id)
	}
	_, err := w.s.Do(w.ctx, "other", put(job("s/00", wire.Schedule_SKIP), true))
	w.must(err)
	var got []string
	pages := 0
	for page := ""; ; pages++ {
		r := w.ok(&wire.Call{Verb: &wire.Call_ListSchedules{ListSchedules: &wire.ListSchedulesRequest{Limit: 10, Page: page}}}).GetSchedules()
		for _, s := range r.Schedules {
			if got = append(got, s.Id); s.NextUs != at(60) || s.Start.GetFlowType() != "job" {
				t.Errorf("listed %v", s)
			}
		}
		if page = r.Next; page == "" {
			break
		}
	}
	if !slices.Equal(got, want) || pages != 2 {
		t.Errorf("%q in %d pages", got, pages+1)
	}
	if r := w.ok(&wire.Call{Verb: &wire.Call_ListSchedules{}}).GetSchedules(); len(r.Schedules) != 23 {
		t.Errorf("%d without a limit", len(r.Schedules))
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	w.ok(put(job("there", wire.Schedule_SKIP), true))
	change := func(f func(*wire.Schedule)) *wire.Call {
		s := job("bad", wire.Schedule_SKIP)
		f(s)
		return put(s, false)
	}
	for _, c := range []struct {
		call *wire.Call
		want string
	}{
		{put(nil, false), "a schedule, or what it starts, is missing"},
		{change(func(s *wire.Schedule) { s.Start = nil }), "a schedule, or what it starts, is missing"},
		{change(func(s *wire.Schedule) { s.Id = "" }), "a schedule's ID has 0 bytes, must have 1 to 128"},
		{change(func(s *wire.Schedule) { s.Id = "a\x00b" }), `the schedule's ID "a\x00b" has control characters or is not UTF-8`},
		{change(func(s *wire.Schedule) { s.Cron = "* * * *" }), `the cron expression "* * * *" has 4 fields, must have five`},
		{change(func(s *wire.Schedule) { s.TimeZone = "Moon/Base" }), `time zone "Moon/Base" is not known`},
		{change(func(s *wire.Schedule) { s.Overlap = 9 }), "the overlap policy 9 is not known"},
		{change(func(s *wire.Schedule) { s.JitterUs = -1 }), "the jitter is -1µs, must be 0 to 24h0m0s"},
		{change(func(s *wire.Schedule) { s.CatchUpUs = 1 << 60 }), "catch-up is 2501999h47m34.740992s, must be 0 (one minute) to 8784h0m0s"},
		{change(func(s *wire.Schedule) { s.Note = strings.Repeat("x", 2000) }), "the note has 2000 bytes, at most 1024"},
		{change(func(s *wire.Schedule) { s.Start.FlowId = strings.Repeat("x", 201) }), "what flow IDs begin with has 201 bytes, at most 200"},
		{change(func(s *wire.Schedule) { s.Start.RequestId = "r" }), "the start has a request ID"},
		{change(func(s *wire.Schedule) { s.Start.InputBlob = "b" }), "the start has a large input, which belongs to one flow"},
		{change(func(s *wire.Schedule) { s.Start.Publish = []*wire.PublishRequest{{Channel: "c", Blobs: []string{"b"}}} }), "a message of the start for channel \"c\" is large, and belongs to one flow"},
		{change(func(s *wire.Schedule) { s.Start.Attributes = []*wire.Attribute{{Name: "a", Blob: "b"}} }), `attribute "a" of the start has a large value, which belongs to one flow`},
		{backfill("there", at(60), at(0)), "a backfill from 1796126460000000 to 1796126400000000 microseconds is empty"},
		{backfill("there", at(1), at(2)), `schedule "there" has no instant from 2026-12-01T12:00:01Z to 2026-12-01T12:00:02Z`},
		{backfill("there", at(0), at(1001*60)), "the interval has more than 1000 instants"},
		{get(""), "a schedule's ID has 0 bytes, must have 1 to 128"},
		{&wire.Call{Verb: &wire.Call_ListSchedules{ListSchedules: &wire.ListSchedulesRequest{Limit: 2000}}}, "limit is 2000, at most 1000"},
		{&wire.Call{}, "the call has no verb of schedules"},
	} {
		a, err := w.do(c.call)
		if err != nil || a.Error == nil || a.Error.Code != "invalid" || a.Error.Message != c.want || a.Error.Position != -1 {
			t.Errorf("want %q: %v, %v", c.want, a, err)
		}
	}
	// What the starter or the engine refuses is refused when the schedule is put.
	for _, c := range []*wire.Call{
		change(func(s *wire.Schedule) { s.Start.FlowType = "unknown" }),
		change(func(s *wire.Schedule) { s.Start.Step = strings.Repeat("x", 1000) }),
	} {
		a, err := w.do(c)
		var ce *core.Error
		if !errors.As(err, &ce) {
			t.Errorf("%v: %v, %v", c, a, err)
		}
	}
	if _, err := w.do(get("bad")); err == nil {
		t.Error("a refused schedule is there")
	}
}
