package perduretest

import (
	"context"
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// maxHistory bounds the events that History gives.
const maxHistory = 100_000

// maxFound bounds the flows that Search gives.
const maxFound = 1000

// RefusedError is what the engine says to something that cannot be.
type RefusedError struct {
	Code    string // stable: not_found, already_exists, flow_closed, …
	Message string
	Kind    string // of an error that an RPC's handler gave
}

func (e *RefusedError) Error() string { return e.Code + ": " + e.Message }

// ask makes a call and waits for its answer, in real time.
func (e *Env) ask(ctx context.Context, c *wire.Call) *wire.Answer {
	ch := make(chan *wire.Answer, 1)
	e.svc.Do(ctx, tenant, c, func(a *wire.Answer) { ch <- a })
	return <-ch
}

// try makes a call.
func (e *Env) try(c *wire.Call) (*wire.Answer, error) {
	e.moves.Add(1)
	a := e.ask(e.ctx, c)
	if a.Error != nil {
		return nil, &RefusedError{Code: a.Error.Code, Message: a.Error.Message, Kind: a.Error.Kind}
	}
	return a, nil
}

// must makes a call that the test relies on.
func (e *Env) must(what string, c *wire.Call) *wire.Answer {
	e.helper()
	a, err := e.try(c)
	if err != nil {
		e.fatal("%s: %v", what, err)
	}
	return a
}

// Start starts a flow and gives its run ID. first is flow.NoStep for a flow that
// lives by its RPCs and attributes.
func (e *Env) Start(f *flow.Flow, id string, first flow.Next, opts ...flow.StartOption) string {
	e.helper()
	run, err := e.TryStart(f, id, first, opts...)
	if err != nil {
		e.fatal("start of flow %q: %v", id, err)
	}
	return run
}

// TryStart is Start for what may be refused; see RefusedError.
func (e *Env) TryStart(f *flow.Flow, id string, first flow.Next, opts ...flow.StartOption) (string, error) {
	rec, err := f.StartRecord(first, opts...)
	if err != nil {
		return "", err
	}
	w := &wire.StartRequest{FlowId: id, FlowType: rec.Type, Attributes: rec.Attributes, Reuse: rec.Reuse, RequestId: rec.RequestId,
		DelayUs: rec.DelayUs, TimeoutUs: rec.TimeoutUs, RetentionUs: rec.RetentionUs, Priority: rec.Priority}
	for _, s := range rec.Steps {
		w.Step, w.Input, w.Spec = s.Name, s.Input, s
		s.Name, s.Input = "", nil // they travel beside their options
		if w.Input, w.InputBlob, err = e.stored(id, w.Input); err != nil {
			return "", err
		}
	}
	for _, a := range w.Attributes {
		if err := e.store(id, a); err != nil {
			return "", err
		}
	}
	for _, p := range rec.Publish {
		req := &wire.PublishRequest{Channel: p.Channel}
		if err := e.addMessage(id, req, p.Payload); err != nil {
			return "", err
		}
		w.Publish = append(w.Publish, req)
	}
	a, err := e.try(&wire.Call{Verb: &wire.Call_Start{Start: w}})
	if err != nil {
		return "", err
	}
	return a.GetStart().GetRunId(), nil
}

// store puts a large value where it belongs.
func (e *Env) store(id string, a *wire.Attribute) (err error) {
	size := uint64(len(a.Value))
	if a.Value, a.Blob, err = e.stored(id, a.Value); a.Blob != "" {
		a.Size = size
	}
	return err
}

// stored gives a value as it is, or the blob that it was put into.
func (e *Env) stored(id string, v []byte) (inline []byte, blob string, err error) {
	if len(v) <= maxPayload {
		return v, "", nil
	}
	blob, err = e.w.PutBlob(e.ctx, id, "", v)
	return nil, blob, err
}

// addMessage adds a payload to a publish.
func (e *Env) addMessage(id string, req *wire.PublishRequest, v []byte) error {
	inline, blob, err := e.stored(id, v)
	req.Payloads, req.Blobs = append(req.Payloads, inline), append(req.Blobs, blob)
	return err
}

// Outcome is how a run ended.
type Outcome struct {
	Status flow.Status
	Error  string // why, if it is not completed
	output []byte
}

// Wait moves the clock on, from timer to timer, until the flow has ended. The
// test fails when it cannot end any more by itself.
func (e *Env) Wait(id string) Outcome {
	e.helper()
	for {
		e.Settle()
		i := e.describe(id)
		if i.Status != wire.Status_RUNNING {
			return Outcome{Status: flow.Status(i.Status), Error: i.Error, output: i.Output}
		}
		if !e.skip() {
			e.fatal("flow %q does not end: %s", id, stuck(i))
		}
	}
}

// Result is Wait for a flow that completes, and gives its output.
func Result[T any](e *Env, id string) T {
	e.helper()
	o := e.Wait(id)
	if o.Status != flow.Completed {
		e.fatal("flow %q is %v, not completed: %s", id, o.Status, o.Error)
	}
	v, err := flow.Decode[T](o.output)
	if err != nil {
		e.fatal("the output of flow %q: %v", id, err)
	}
	return v
}

func (e *Env) describe(id string) *wire.FlowInfo {
	e.helper()
	return e.must(fmt.Sprintf("flow %q", id), &wire.Call{Verb: &wire.Call_Describe{Describe: &wire.DescribeRequest{FlowId: id}}}).GetFlow()
}

// stuck says in words what a flow waits for.
func stuck(i *wire.FlowInfo) string {
	if len(i.Steps) == 0 {
		return "it has no step left"
	}
	return strings.Join(stepLines(i), "; ")
}

func stepLines(i *wire.FlowInfo) []string {
	lines := make([]string, len(i.Steps))
	for n, s := range i.Steps {
		lines[n] = s.Step + " " + s.State
		if s.WaitsFor != "" {
			lines[n] += " for " + s.WaitsFor
		}
	}
	return lines
}

// Status is what the newest run of a flow is now.
func (e *Env) Status(id string) flow.Status {
	e.helper()
	e.Settle()
	return flow.Status(e.describe(id).Status)
}

// Steps says what the live steps of a flow do: each with its state, and what it
// waits for.
func (e *Env) Steps(id string) []string {
	e.helper()
	e.Settle()
	return stepLines(e.describe(id))
}

// Shown gives all that the flow's steps have put out.
func (e *Env) Shown(id string) string {
	e.helper()
	e.settle(busyPatience)
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.shown[id]
}

// History gives the flow's log: the type of each event, and the step it is of.
func (e *Env) History(id string) []string {
	e.helper()
	e.Settle()
	var lines []string
	req := &wire.HistoryRequest{FlowId: id}
	for len(lines) < maxHistory {
		h := e.must(fmt.Sprintf("history of flow %q", id), &wire.Call{Verb: &wire.Call_History{History: req}}).GetHistory()
		for _, ev := range h.GetEvents() {
			lines = append(lines, strings.TrimSpace(ev.Type+" "+ev.Step))
		}
		if h.GetNext() == nil || len(h.GetEvents()) == 0 {
			break
		}
		req = &wire.HistoryRequest{FlowId: id, After: h.Next}
	}
	return lines
}

// Search gives the IDs of the flows that a query finds, the newest first.
func (e *Env) Search(query string) []string {
	e.helper()
	e.Settle()
	var ids []string
	for _, f := range e.must("search "+query, &wire.Call{Verb: &wire.Call_Search{Search: &wire.SearchRequest{Query: query, Limit: maxFound}}}).GetSearch().GetFlows() {
		ids = append(ids, f.FlowId)
	}
	return ids
}

// Stop stops a flow. A cancelled one ends when its handlers have cleaned up.
func (e *Env) Stop(id string, how flow.Stopping, reason string) {
	e.helper()
	e.must(fmt.Sprintf("stop of flow %q", id), &wire.Call{Verb: &wire.Call_Stop{Stop: &wire.StopRequest{FlowId: id, How: wire.StopFlow_How(how), Reason: reason}}})
}

// SkipTimer makes a timer due that the flow waits for.
func (e *Env) SkipTimer(id, timer string) {
	e.helper()
	e.Settle()
	e.must(fmt.Sprintf("skip of timer %q of flow %q", timer, id), &wire.Call{Verb: &wire.Call_SkipTimer{SkipTimer: &wire.SkipTimerRequest{FlowId: id, Condition: timer}}})
}

// Reset begins a new run of a flow at the last start of a step, with the state
// as it was then, and gives the run's ID.
func (e *Env) Reset(id, step string) string {
	e.helper()
	e.Settle()
	return e.must(fmt.Sprintf("reset of flow %q to step %q", id, step), &wire.Call{Verb: &wire.Call_Reset_{Reset_: &wire.ResetRequest{FlowId: id, Step: step, Reason: "test"}}}).GetReset_().GetRunId()
}

// LoseWorker is a crash of the worker: handlers that run now are told to stop
// (flow.ErrLost), nothing that they write takes effect, and their steps are
// handed out again, as further attempts, to a new worker.
func (e *Env) LoseWorker() {
	e.helper()
	e.w.out.flush()
	e.w.stop()
	e.connect()
}

// Publish appends messages to a channel of a flow.
func Publish[T any](e *Env, id string, c flow.Channel[T], messages ...T) {
	e.helper()
	req := &wire.PublishRequest{FlowId: id, Channel: c.Name()}
	for _, m := range messages {
		b, err := flow.Encode(m)
		if err == nil {
			err = e.addMessage(id, req, b)
		}
		if err != nil {
			e.fatal("a message of channel %q: %v", c.Name(), err)
		}
	}
	e.must(fmt.Sprintf("publish to channel %q of flow %q", c.Name(), id), &wire.Call{Verb: &wire.Call_Publish{Publish: req}})
}

// Call calls an RPC of a flow. An error of its handler, and any other, is a
// *RefusedError.
func Call[In, Out any](e *Env, id string, r flow.RPC[In, Out], in In) (Out, error) {
	var zero Out
	b, err := flow.Encode(in)
	if err != nil {
		return zero, err
	}
	req := &wire.RpcRequest{FlowId: id, Name: r.Name()}
	if req.Input, req.InputBlob, err = e.stored(id, b); err != nil {
		return zero, err
	}
	a, err := e.try(&wire.Call{Verb: &wire.Call_Rpc{Rpc: req}})
	if err != nil {
		return zero, err
	}
	out := a.GetRpc().GetOutput()
	if blob := a.GetRpc().GetOutputBlob(); blob != "" {
		if out, err = e.w.GetBlob(e.ctx, id, blob); err != nil {
			return zero, err
		}
	}
	return flow.Decode[Out](out)
}

// Get reads an attribute of a flow; the zero value if it has none.
func Get[T any](e *Env, id string, a flow.Attribute[T]) T {
	e.helper()
	e.Settle()
	var v T
	ans := e.must(fmt.Sprintf("attribute %q of flow %q", a.Name(), id), &wire.Call{Verb: &wire.Call_GetAttributes{
		GetAttributes: &wire.GetAttributesRequest{FlowId: id, Names: []string{a.Name()}}}})
	all := ans.GetAttributes().GetAttributes()
	if len(all) == 0 {
		return v
	}
	b := all[0].Value
	var err error
	if all[0].Blob != "" {
		b, err = e.w.GetBlob(e.ctx, id, all[0].Blob)
	}
	if err == nil {
		v, err = flow.Decode[T](b)
	}
	if err != nil {
		e.fatal("attribute %q of flow %q: %v", a.Name(), id, err)
	}
	return v
}

// Set writes an attribute of a flow, as a client would.
func Set[T any](e *Env, id string, a flow.Attribute[T], v T) {
	e.helper()
	rec, err := a.Value(v)
	if err == nil {
		err = e.store(id, rec)
	}
	if err != nil {
		e.fatal("attribute %q of flow %q: %v", a.Name(), id, err)
	}
	e.must(fmt.Sprintf("attribute %q of flow %q", a.Name(), id), &wire.Call{Verb: &wire.Call_SetAttributes{
		SetAttributes: &wire.SetAttributesRequest{FlowId: id, Attributes: []*wire.Attribute{rec}}}})
}
