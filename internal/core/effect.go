package core

import "github.com/perdure-dev/perdure/internal/wire"

// Cursor is the place of an event in a partition's order; the zero one is
// before all.
type Cursor struct {
	LSN uint64
	N   uint32
}

// Before reports whether ev comes after c.
func (c Cursor) Before(ev *wire.Event) bool { return ev.Lsn > c.LSN || ev.Lsn == c.LSN && ev.N > c.N }

// CursorOf gives the place of ev.
func CursorOf(ev *wire.Event) Cursor { return Cursor{LSN: ev.Lsn, N: ev.N} }

// EffectKind says what the world is asked to do.
type EffectKind uint8

// The kinds of effects.
const (
	Dispatch      EffectKind = iota + 1 // hand Task to a worker
	CancelAttempt                       // tell the worker of this attempt to stop
	SetTimer                            // propose FireTimer{Exec} at AtUs
	Queue                               // propose StartQueued{Exec} when there is a slot
	ReleaseKey                          // the step holds its concurrency key, or its place in a queue, no more
	Send                                // give Out to its target, then propose OutboxDone
	ClearTimer                          // the timer of Exec at AtUs is not meant any more
)

// Attempt names one hand-out of a step; see wire.AttemptID.
type Attempt struct {
	Epoch, LSN uint64
	N          uint32
}

// Wire gives the attempt in its journaled form.
func (a Attempt) Wire() *wire.AttemptID { return &wire.AttemptID{Epoch: a.Epoch, Lsn: a.LSN, N: a.N} }

func attemptOf(a *wire.AttemptID) Attempt {
	return Attempt{Epoch: a.GetEpoch(), LSN: a.GetLsn(), N: a.GetN()}
}

// Effect is something the world is asked to do, at least once. The stable ID
// is (FlowID, Exec, Attempt) for attempts, (FlowID, Exec, AtUs) for timers and
// (FlowID, Out.Id) for sends. A CancelAttempt is a hint to make a running
// attempt end early; what is outstanding then is still its Dispatch, but for one
// with Forget: nobody wants its result.
type Effect struct {
	Kind    EffectKind
	FlowID  string
	Exec    uint64
	Attempt Attempt
	AtUs    int64  // SetTimer, ClearTimer: due; Queue: since when
	Reason  string // CancelAttempt
	Forget  bool   // CancelAttempt
	Task    *Task
	Out     *wire.Outgoing // not to be changed

	// Of Queue and ReleaseKey:
	FlowType string
	Step     string
	Priority uint32
	Key      string
	KeyLimit uint32
}

// Task is what a worker needs to run one attempt. It shares no memory that
// changes with the flow.
type Task struct {
	FlowID     string
	FlowType   string
	RunID      string
	Exec       uint64
	Attempt    Attempt
	Number     uint32 // 1 for the first hand-out
	Retries    uint32 // attempts that failed before, by the retry policy
	Name       string
	Input      []byte
	Scope      string
	Matched    []*wire.Message
	Conditions []*wire.ConditionState // of Spec.Wait.Conditions; not to be changed
	Attributes []*wire.Attribute
	Spec       *wire.StepSpec // not to be changed
	WaitPhase  bool           // call the step's WaitFor
	Checkpoint []byte
	Locals     []byte
	Priority   uint32
	Trace      []byte
	Cancel     bool // the work was cancelled before this attempt began
	Reason     string
	StartedUs  int64             // when the step was first handed out
	Retry      *wire.RetryPolicy // of the step; not to be changed
	Prefetch   bool              // may run before its start is committed
	Before     Cursor            // the flow's last event when the attempt was made, its own start included
}

// Key is the idempotency key handed outward: the same for each attempt of the
// step, different for every other step.
func (t *Task) Key() string { return stepKey(t.RunID, t.Exec) }

func stepKey(run string, exec uint64) string { return run + "-" + uitoa(exec) }

func uitoa(v uint64) string {
	var b [20]byte
	i := len(b)
	for {
		i--
		b[i] = byte('0' + v%10)
		if v /= 10; v == 0 {
			return string(b[i:])
		}
	}
}

// Attribute gives the value of an attribute of the flow, or nil.
func (t *Task) Attribute(name string) []byte { return attribute(t.Attributes, name) }

// AttributeOf gives the value of an attribute of f, or nil.
func AttributeOf(f *wire.Flow, name string) []byte { return attribute(f.Attributes, name) }

func attribute(as []*wire.Attribute, name string) []byte {
	for _, a := range as {
		if a.Name == name {
			return a.Value
		}
	}
	return nil
}

func dispatch(f *wire.Flow, s *wire.Step) Effect {
	t := &Task{
		FlowID: f.Id, FlowType: f.Type, RunID: f.RunId, Exec: s.Exec, Attempt: attemptOf(s.Attempt),
		Number: s.Attempts, Retries: s.Retries, Name: s.Spec.Name, Input: s.Spec.Input, Scope: s.Scope,
		Matched: s.Matched, Attributes: f.Attributes, Cancel: s.Cancel, Reason: s.CancelReason,
		StartedUs: s.FirstStartUs, Retry: s.Spec.Retry, Prefetch: s.Spec.Prefetch,
		Conditions: s.Conditions, Spec: s.Spec, WaitPhase: waitPhase(s), Checkpoint: s.Checkpoint,
		Locals: s.Spec.Locals, Priority: f.Priority, Trace: f.Trace,
	}
	if f.LastEvent != nil {
		t.Before = Cursor{LSN: f.LastEvent.Lsn, N: f.LastEvent.N}
	}
	return Effect{Kind: Dispatch, FlowID: f.Id, Exec: s.Exec, Attempt: t.Attempt, Task: t}
}

func queued(f *wire.Flow, s *wire.Step) Effect {
	return Effect{Kind: Queue, FlowID: f.Id, Exec: s.Exec, AtUs: s.QueuedUs, FlowType: f.Type, Step: s.Spec.Name,
		Priority: f.Priority, Key: s.Spec.ConcurrencyKey, KeyLimit: s.Spec.ConcurrencyLimit}
}

// Outstanding gives every effect of f that is not finished, from state alone:
// a new owner begins with these, and at any time the effects emitted and not
// answered are exactly these.
func Outstanding(f *wire.Flow) []Effect {
	var out []Effect
	for _, s := range f.Steps {
		switch s.State {
		case wire.Step_STARTED:
			out = append(out, dispatch(f, s))
		case wire.Step_BACKOFF, wire.Step_DELAYED:
			out = append(out, Effect{Kind: SetTimer, FlowID: f.Id, Exec: s.Exec, AtUs: s.RetryAtUs})
		case wire.Step_QUEUED:
			out = append(out, queued(f, s))
		case wire.Step_WAITING:
			for _, c := range s.Conditions {
				if c.DueUs != 0 && !c.Done {
					out = append(out, Effect{Kind: SetTimer, FlowID: f.Id, Exec: s.Exec, AtUs: c.DueUs})
				}
			}
		}
	}
	for _, at := range [...]int64{f.ExpireUs, f.TimeoutAtUs, f.GraceAtUs} {
		if at != 0 {
			out = append(out, Effect{Kind: SetTimer, FlowID: f.Id, AtUs: at})
		}
	}
	for _, o := range f.Outbox {
		out = append(out, Effect{Kind: Send, FlowID: f.Id, Out: o})
	}
	return out
}

// HasOutstanding reports whether Outstanding(f) is not empty.
func HasOutstanding(f *wire.Flow) bool {
	if f.ExpireUs != 0 || f.TimeoutAtUs != 0 || f.GraceAtUs != 0 || len(f.Outbox) > 0 {
		return true
	}
	for _, s := range f.Steps {
		if s.State != wire.Step_WAITING {
			return true
		}
		for _, c := range s.Conditions {
			if c.DueUs != 0 && !c.Done {
				return true
			}
		}
	}
	return false
}
