package partition

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// stepper answers each attempt with the next step until the flow has had its
// steps; the last one completes it.
type stepper struct {
	Slotless
	r     atomic.Pointer[Runner]
	steps uint64
	async bool
	work  chan *Work
	done  chan struct{}
}

func (s *stepper) Dispatch(w *Work)                                  { s.work <- w }
func (s *stepper) Commit(*Work)                                      {}
func (s *stepper) Cancel(string, uint64, core.Attempt, string, bool) {}
func (s *stepper) Abort()                                            {}
func (s *stepper) Publish(string, []*wire.Event)                     {}

func (s *stepper) answer() {
	for w := range s.work {
		res := &wire.StepResult{Exec: w.Exec, Attempt: w.Attempt.Wire()}
		if w.Exec < s.steps {
			res.Next = []*wire.StepSpec{{Name: "step", Input: []byte(`{"n":1}`), Async: s.async}}
		} else {
			res.Close = &wire.Close{How: wire.Close_GRACEFUL, Output: []byte("1")}
		}
		last := w.Exec >= s.steps
		_ = s.r.Load().SubmitWait(context.Background(), Proposal{Entry: &wire.Entry{FlowId: w.FlowID, Command: &wire.Entry_StepResult{StepResult: res}},
			Reply: func(core.Reply, error) {
				if last {
					s.done <- struct{}{}
				}
			}})
	}
}

// BenchmarkSteps is a flow of ten steps on one partition on local disk, without
// workers and network: what the engine itself costs a step.
func BenchmarkSteps(b *testing.B) {
	for _, async := range []bool{false, true} {
		for _, clients := range []int{1, 64, 256} {
			b.Run(fmt.Sprintf("async=%v/flows=%d", async, clients), func(b *testing.B) { benchSteps(b, clients, async) })
		}
	}
}

func benchSteps(b *testing.B, clients int, async bool) {
	dir := b.TempDir()
	db, err := state.Open(dir+"/tables", state.Options{FS: vfs.Default, MemTableBytes: 8 << 20})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	log, err := journal.Open(vfs.Default, dir+"/journal", journal.Options{Go: func(f func()) { go f() }})
	if err != nil {
		b.Fatal(err)
	}
	defer log.Close()
	s := &stepper{steps: 10, async: async, work: make(chan *Work, 4096), done: make(chan struct{}, 4096)}
	m, _, err := Open(Config{Epoch: 1, Tables: db, Log: log, Executor: s, Observer: s, Env: env.Real()})
	if err != nil {
		b.Fatal(err)
	}
	r := Start(m, func(err error) { b.Error(err) })
	s.r.Store(r)
	go s.answer()
	b.ReportAllocs()
	b.ResetTimer()
	started, ended := 0, 0
	start := func() {
		started++
		e := &wire.Entry{FlowId: fmt.Sprintf("t/f/%d", started), Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{
			Type: "bench", Closes: true, RetentionUs: 1e9, Steps: []*wire.StepSpec{{Name: "step", Async: async}}}}}
		if err := r.SubmitWait(context.Background(), Proposal{Entry: e}); err != nil {
			b.Fatal(err)
		}
	}
	flows := (b.N + 9) / 10
	for range min(clients, flows) {
		start()
	}
	for ended < flows {
		<-s.done
		if ended++; started < flows {
			start()
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(m.Stats().Batches)/float64(flows*10)*1000, "batches/kstep")
	b.ReportMetric(float64(m.Stats().Bytes)/float64(flows*10), "journalB/step")
	r.Stop()
	close(s.work)
}

// BenchmarkLongFlow runs one flow of many steps: what a step costs at its
// beginning and at its end, on files in memory, so that no disk hides it.
func BenchmarkLongFlow(b *testing.B) {
	const steps, part = 20_000, 2_000
	for range b.N {
		fs := vfs.NewMem()
		db, err := state.Open("tables", state.Options{FS: fs})
		if err != nil {
			b.Fatal(err)
		}
		log, err := journal.Open(fs, "journal", journal.Options{})
		if err != nil {
			b.Fatal(err)
		}
		s := &stepper{steps: steps, work: make(chan *Work, 1), done: make(chan struct{}, 1)}
		m, _, err := Open(Config{Epoch: 1, Tables: db, Log: log, Executor: s, Observer: s, Env: env.Real()})
		if err != nil {
			b.Fatal(err)
		}
		m.Propose(Proposal{Entry: &wire.Entry{FlowId: "t/f/long", Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{
			Type: "bench", Closes: true, Steps: []*wire.StepSpec{{Name: "step"}}}}}})
		var early, late time.Duration
		var earlyBytes, lateBytes uint64
		for n := uint64(1); n < steps; n++ {
			began, before := time.Now(), m.Stats().Bytes
			f, _ := m.Seal()
			if err := log.Append(f); err != nil {
				b.Fatal(err)
			}
			m.Committed()
			w := <-s.work
			m.Propose(Proposal{Entry: &wire.Entry{FlowId: w.FlowID, Command: &wire.Entry_StepResult{StepResult: &wire.StepResult{
				Exec: w.Exec, Attempt: w.Attempt.Wire(), Next: []*wire.StepSpec{{Name: "step", Input: []byte(`{"n":1}`)}}}}}})
			switch took, bytes := time.Since(began), m.Stats().Bytes-before; {
			case n > 10 && n <= 10+part:
				early, earlyBytes = early+took, earlyBytes+bytes
			case n > steps-part:
				late, lateBytes = late+took, lateBytes+bytes
			}
		}
		b.ReportMetric(float64(early.Nanoseconds())/part, "early-ns/step")
		b.ReportMetric(float64(late.Nanoseconds())/part, "late-ns/step")
		b.ReportMetric(float64(earlyBytes)/part, "early-journalB/step")
		b.ReportMetric(float64(lateBytes)/part, "late-journalB/step")
		if err := errors.Join(db.Close(), log.Close()); err != nil {
			b.Fatal(err)
		}
	}
}
