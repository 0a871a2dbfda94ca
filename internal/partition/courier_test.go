package partition

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// family answers the steps of parents and children on several partitions.
type family struct {
	Slotless
	set    Set
	wg     sync.WaitGroup
	closed chan string // parents
	mu     sync.Mutex
	worked map[string]int // children started, by flow; guarded by mu
}

func (x *family) Commit(*Work)                                      {}
func (x *family) Cancel(string, uint64, core.Attempt, string, bool) {}
func (x *family) Abort()                                            {}

func (x *family) Dispatch(w *Work) {
	x.wg.Add(1)
	go func() {
		defer x.wg.Done()
		if w.Name == "work" {
			x.mu.Lock()
			x.worked[w.FlowID]++
			x.mu.Unlock()
		}
		r := &wire.StepResult{Exec: w.Exec, Attempt: w.Attempt.Wire(), Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte(w.Name)}}
		for _, c := range w.Conditions {
			r.Close.Output = append(r.Close.Output, c.Output...)
		}
		_ = x.set.For(w.FlowID).SubmitWait(context.Background(), Proposal{Entry: &wire.Entry{FlowId: w.FlowID, Command: &wire.Entry_StepResult{StepResult: r}}})
	}()
}

func (x *family) Publish(flow string, events []*wire.Event) {
	for _, ev := range events {
		if ev.Type == core.EventCompleted && flow[:5] == "t/f/p" {
			x.closed <- flow + " " + string(ev.Items[0])
		}
	}
}

// TestCourierAcrossPartitions: children on other partitions are started once and
// tell their parents; what was sent before the courier knew the partitions goes
// too, and every outbox is empty in the end.
func TestCourierAcrossPartitions(t *testing.T) {
	const parents, partitions = 20, 3
	x := &family{closed: make(chan string, parents), worked: map[string]int{}}
	courier := NewCourier(env.Real().Clock)
	for range partitions {
		fs := vfs.NewMem()
		db, err := state.Open("tables", state.Options{FS: fs})
		if err != nil {
			t.Fatal(err)
		}
		log, err := journal.Open(fs, "journal", journal.Options{Go: func(f func()) { go f() }})
		if err != nil {
			t.Fatal(err)
		}
		m, _, err := Open(Config{Epoch: 1, Tables: db, Log: log, Executor: x, Observer: x, Outbox: courier, Env: env.Real()})
		if err != nil {
			t.Fatal(err)
		}
		x.set = append(x.set, Start(m, func(err error) { t.Error(err) }))
	}
	ctx := context.Background()
	for i := range parents {
		id := fmt.Sprintf("t/f/p%d", i)
		gather := onChild("gather", fmt.Sprintf("t/f/c%d", i))
		if _, err := x.set.For(id).Call(ctx, startFlow(id, &wire.StartFlow{Steps: []*wire.StepSpec{gather}})); err != nil {
			t.Fatal(err)
		}
		if i == parents/2 {
			courier.Bind(x.set)
		}
	}
	for range parents {
		if got := <-x.closed; got[len(got)-10:] != "gatherwork" {
			t.Errorf("parent ended with %q", got)
		}
	}
	for i := range parents {
		for _, id := range []string{fmt.Sprintf("t/f/p%d", i), fmt.Sprintf("t/f/c%d", i)} {
			for {
				f, err := x.set.For(id).Read(ctx, id)
				if err != nil {
					t.Fatal(err)
				}
				if len(f.Outbox) == 0 {
					break
				}
			}
		}
		if n := x.worked[fmt.Sprintf("t/f/c%d", i)]; n != 1 {
			t.Errorf("child %d was started %d times", i, n)
		}
	}
	x.wg.Wait()
	for _, r := range x.set {
		r.Stop()
	}
}
