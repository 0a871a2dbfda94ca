package client

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Forever as a retention keeps a closed flow until it is deleted.
const Forever time.Duration = -1

// StartRequest says what to start. The zero value starts a flow that only holds
// attributes.
type StartRequest struct {
	ID    string // of the flow, 1 to 256 bytes; empty = one is made
	Type  string // as its worker declares it; empty = attributes only, no worker
	Step  string // the first step; empty = none, the flow lives by RPC and attributes
	Input any    // of the first step

	Attributes []Attribute  // set from the start
	Publish    []Publishing // waiting in channels from the start
	Reuse      Reuse

	RequestID string        // idempotency key; empty = one of this call's own
	Delay     time.Duration // until the first step
	Timeout   time.Duration // of the run; 0 = none
	Retention time.Duration // how long it is kept when closed; 0 = the server's default; or Forever
	Priority  int           // 0 to 9; higher is handed out first
}

// Publishing is messages for one channel.
type Publishing struct {
	Channel  string
	Payloads []any
}

// Started is what a start did.
type Started struct {
	FlowID  string `json:"flow_id"`
	RunID   string `json:"run_id"`
	Created bool   `json:"created"` // false: the request ID, or Attach, met a flow that was there
}

// Start starts a flow, and returns when that is durable.
func (c *Client) Start(ctx context.Context, r StartRequest) (Started, error) {
	own := r.RequestID == ""
	if own {
		r.RequestID = c.requestID()
	}
	if r.ID == "" {
		r.ID = newFlowID() // made here, so that sending again does not start two
	}
	w, err := c.startRequest(ctx, &r)
	if err != nil {
		return Started{}, err
	}
	st, err := c.start(ctx, w)
	// With a key of our own only our own first try can have been there before.
	st.Created = st.Created || err == nil && own && r.Reuse != Attach
	return st, err
}

func (c *Client) start(ctx context.Context, w *wire.StartRequest) (Started, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Start{Start: w}}, keyed)
	if err != nil {
		return Started{}, err
	}
	re, err := reply(a, a.GetStart())
	if err != nil {
		return Started{}, err
	}
	return Started{FlowID: re.FlowId, RunID: re.RunId, Created: re.Created}, nil
}

// startRequest encodes r; a large input goes ahead of it.
func (c *Client) startRequest(ctx context.Context, r *StartRequest) (*wire.StartRequest, error) {
	if r.Type == "" && r.Step != "" {
		return nil, invalid("Name the flow type as its worker declares it.", "a start with a step needs a flow type")
	}
	input, err := encode("the input", r.Input)
	if err != nil {
		return nil, err
	}
	if r.Step == "" && len(input) > 0 {
		return nil, invalid("Name the step that the input is for.", "a start without a step has an input")
	}
	w := &wire.StartRequest{
		FlowId: r.ID, FlowType: r.Type, Step: r.Step, Input: input, Reuse: wire.StartFlow_Reuse(r.Reuse), RequestId: r.RequestID,
		DelayUs: r.Delay.Microseconds(), TimeoutUs: r.Timeout.Microseconds(), RetentionUs: r.Retention.Microseconds(),
		Priority: uint32(r.Priority),
	}
	if r.Retention < 0 {
		w.RetentionUs = -1
	}
	if err := c.storeInput(ctx, w); err != nil {
		return nil, err
	}
	if w.Attributes, err = toAttributes(r.Attributes); err != nil {
		return nil, err
	}
	if err := c.storeLarge(ctx, r.ID, w.Attributes); err != nil {
		return nil, err
	}
	for _, p := range r.Publish {
		payloads, err := encodePayloads(p.Channel, p.Payloads)
		if err != nil {
			return nil, err
		}
		w.Publish = append(w.Publish, &wire.PublishRequest{Channel: p.Channel, Payloads: payloads})
	}
	return w, c.storePayloads(ctx, r.ID, w.Publish...)
}

// storeInput moves a large input into a blob.
func (c *Client) storeInput(ctx context.Context, w *wire.StartRequest) error {
	if len(w.Input) <= maxInline {
		return nil
	}
	ref, err := c.putBlob(ctx, w.FlowId, w.Input)
	if err != nil {
		return err
	}
	// A recovery step takes the same input.
	for r := w.Spec.GetRecover(); r != nil; r = r.Recover {
		if len(r.Input) > maxInline {
			r.Input, r.InputBlob = nil, ref.Blob
		}
	}
	w.Input, w.InputBlob = nil, ref.Blob
	return nil
}

// reply refuses an answer of another kind than its call asks for, which only a
// broken server gives.
func reply[T any](a *wire.Answer, r *T) (*T, error) {
	if r == nil {
		return nil, &Error{Code: codeInternal, Position: -1, Message: fmt.Sprintf("the server answered with %T instead of %T", a.Result, r)}
	}
	return r, nil
}

// Describe gives the newest run of a flow as it is now.
func (c *Client) Describe(ctx context.Context, id string) (*Info, error) {
	return c.info(ctx, &wire.Call{Verb: &wire.Call_Describe{Describe: &wire.DescribeRequest{FlowId: id}}}, read)
}

// Wait waits until a run is closed, however it ended; runID empty = the newest.
func (c *Client) Wait(ctx context.Context, id, runID string) (*Info, error) {
	return c.info(ctx, &wire.Call{Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: id, RunId: runID}}}, waiting)
}

func (c *Client) info(ctx context.Context, w *wire.Call, m manner) (*Info, error) {
	a, err := c.do(ctx, w, m)
	if err != nil {
		return nil, err
	}
	f, err := reply(a, a.GetFlow())
	if err != nil {
		return nil, err
	}
	return fromInfo(f), nil
}

// StopRequest says how to stop a run. The zero value cancels it.
type StopRequest struct {
	How    How
	Reason string
	RunID  string        // refuse when the newest run is another one; empty = any
	Grace  time.Duration // of CancelFlow: closed after this, answered or not; 0 = the server's default
}

// How to stop a run.
type How int

const (
	CancelFlow    How = iota // running handlers are told; what they answer is kept; no step follows
	TerminateFlow            // at once; what running handlers answer is dropped
	FailFlow                 // as TerminateFlow, with the status Failed
)

// Stop closes a run. The status is Running while handlers of a cancelled one
// are winding down.
func (c *Client) Stop(ctx context.Context, id string, r StopRequest) (Status, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Stop{Stop: &wire.StopRequest{
		FlowId: id, RunId: r.RunID, How: wire.StopFlow_How(r.How), Reason: r.Reason, GraceUs: r.Grace.Microseconds(),
	}}}, once)
	if err != nil {
		return Running, err
	}
	s, err := reply(a, a.GetStop())
	if err != nil {
		return Running, err
	}
	return Status(s.Status), nil
}

// Attributes gives attributes of a flow; a name that ends with "*" is a prefix,
// and no name means all. A name the flow does not have is left out.
func (c *Client) Attributes(ctx context.Context, id string, names ...string) ([]Attribute, error) {
	return c.attributes(ctx, id, &wire.Call{Verb: &wire.Call_GetAttributes{GetAttributes: &wire.GetAttributesRequest{FlowId: id, Names: names}}}, read)
}

// SetAttributes sets attributes, all of them or none; one without a value is
// removed. It needs no worker.
func (c *Client) SetAttributes(ctx context.Context, id string, attrs ...Attribute) error {
	w, err := toAttributes(attrs)
	if err != nil {
		return err
	}
	return c.setAttributes(ctx, id, w)
}

func (c *Client) setAttributes(ctx context.Context, id string, w []*wire.Attribute) error {
	if err := c.storeLarge(ctx, id, w); err != nil {
		return err
	}
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_SetAttributes{SetAttributes: &wire.SetAttributesRequest{FlowId: id, Attributes: w}}}, once)
	return err
}

// WaitAttribute waits until an attribute has a value, or with equals that value.
func (c *Client) WaitAttribute(ctx context.Context, id, name string, equals any) (Attribute, error) {
	want, err := encode("the value to wait for", equals)
	if err == nil {
		err = inline("the value to wait for", want)
	}
	if err != nil {
		return Attribute{}, err
	}
	got, err := c.attributes(ctx, id, &wire.Call{Verb: &wire.Call_WaitAttribute{WaitAttribute: &wire.WaitAttributeRequest{FlowId: id, Name: name, Equals: want}}}, waiting)
	if err != nil {
		return Attribute{}, err
	}
	if len(got) == 0 {
		return Attribute{Name: name}, nil
	}
	return got[0], nil
}

func (c *Client) attributes(ctx context.Context, id string, w *wire.Call, m manner) ([]Attribute, error) {
	a, err := c.do(ctx, w, m)
	if err != nil {
		return nil, err
	}
	re, err := reply(a, a.GetAttributes())
	if err != nil {
		return nil, err
	}
	if err := c.fetchLarge(ctx, id, re.Attributes); err != nil {
		return nil, err
	}
	return fromAttributes(re.Attributes), nil
}

// PublishOptions of a publish; the zero value is fine.
type PublishOptions struct {
	RequestID  string // idempotency key within the flow; empty = one of this call's own
	MaxPending int    // refuse with ErrQueueFull when this many wait already; 0 = the server's bound
}

// Publish appends messages to a channel of a flow, in order, and gives their
// IDs when they are durable.
func (c *Client) Publish(ctx context.Context, id, channel string, o PublishOptions, payloads ...any) ([]string, error) {
	w := &wire.PublishRequest{FlowId: id, Channel: channel, RequestId: o.RequestID, MaxPending: uint32(o.MaxPending)}
	if w.RequestId == "" {
		w.RequestId = c.requestID()
	}
	var err error
	if w.Payloads, err = encodePayloads(channel, payloads); err != nil {
		return nil, err
	}
	if err := c.storePayloads(ctx, id, w); err != nil {
		return nil, err
	}
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Publish{Publish: w}}, keyed)
	if err != nil {
		return nil, err
	}
	re, err := reply(a, a.GetPublish())
	if err != nil {
		return nil, err
	}
	return re.MessageIds, nil
}

func encodePayloads(channel string, payloads []any) ([][]byte, error) {
	if len(payloads) == 0 {
		return nil, invalid("", "nothing to publish to the channel %s", channel)
	}
	out := make([][]byte, len(payloads))
	for i, v := range payloads {
		b, err := encode("a message", v)
		if err != nil {
			return nil, err
		}
		if b == nil {
			b = []byte("null")
		}
		out[i] = b
	}
	return out, nil
}

// Messages lists what waits in a channel, oldest first.
func (c *Client) Messages(ctx context.Context, id, channel string) ([]Message, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_ListMessages{ListMessages: &wire.ListMessagesRequest{FlowId: id, Channel: channel}}}, read)
	if err != nil {
		return nil, err
	}
	re, err := reply(a, a.GetMessages())
	if err != nil {
		return nil, err
	}
	return fromMessages(re.Messages), nil
}

// DropMessages takes waiting messages out of a channel, and says how many; no
// message ID means all.
func (c *Client) DropMessages(ctx context.Context, id, channel string, messageIDs ...string) (int, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_DropMessages{DropMessages: &wire.DropMessagesRequest{FlowId: id, Channel: channel, Ids: messageIDs}}}, once)
	if err != nil {
		return 0, err
	}
	re, err := reply(a, a.GetMessages())
	if err != nil {
		return 0, err
	}
	return int(re.Dropped), nil
}

// RPCOptions of a call; the zero value is fine.
type RPCOptions struct {
	ReadOnly    bool          // the RPC is declared as one that writes nothing: no idempotency key is made
	RequestID   string        // idempotency key of a locked RPC; empty = one of this call's own
	FailFast    bool          // ErrLocked instead of waiting for the flow's lock
	LockTimeout time.Duration // how long to wait for the lock; 0 = as long as the call
}

// RPC calls a handler on the state of a flow, and gives its output. A handler
// that refuses gives ErrHandler. Large inputs and outputs go by blobs that are
// dropped behind the call.
func (c *Client) RPC(ctx context.Context, id, name string, input any, o RPCOptions) (json.RawMessage, error) {
	in, err := encode("the input", input)
	if err != nil {
		return nil, err
	}
	k := &rpcCall{}
	k.req = wire.RpcRequest{FlowId: id, Name: name, Input: in, RequestId: o.RequestID, FailFast: o.FailFast, LockTimeoutUs: o.LockTimeout.Microseconds()}
	k.verb.Rpc = &k.req
	k.call.Verb = &k.verb
	m := keyed
	if o.ReadOnly {
		m = read
	} else if o.RequestID == "" {
		k.req.RequestId = c.requestID()
	}
	if len(in) > maxInline {
		ref, err := c.putBlob(ctx, id, in)
		if err != nil {
			return nil, err
		}
		defer c.dropBlob(ctx, ref)
		k.req.Input, k.req.InputBlob = nil, ref.Blob
	}
	a, err := c.do(ctx, &k.call, m)
	if err != nil {
		return nil, err
	}
	re, err := reply(a, a.GetRpc())
	if err != nil {
		return nil, err
	}
	if re.OutputBlob != "" {
		return c.takeBlob(ctx, &wire.BlobRef{FlowId: id, Blob: re.OutputBlob})
	}
	return raw(re.Output), nil
}

// rpcCall is the parts of a call in one piece of memory.
type rpcCall struct {
	call wire.Call
	verb wire.Call_Rpc
	req  wire.RpcRequest
}

// Timer names a timer that a step waits for. The zero value is the oldest one.
type Timer struct {
	Step      string // the oldest waiting step of this name
	Exec      uint64 // this step execution
	Condition string // the condition's name; empty = the first timer of the step
}

// SkipTimer makes a timer due now.
func (c *Client) SkipTimer(ctx context.Context, id string, t Timer) error {
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_SkipTimer{SkipTimer: &wire.SkipTimerRequest{FlowId: id, Step: t.Step, Exec: t.Exec, Condition: t.Condition}}}, once)
	return err
}

// ResetRequest names the step at which a new run begins.
type ResetRequest struct {
	Exec   uint64 // that step execution, or
	Step   string // the last start of this step
	Reason string
}

// Reset begins a new run of a flow with the state it had before a step of its
// log was started, and gives the run's ID. A run that is going on is ended.
func (c *Client) Reset(ctx context.Context, id string, r ResetRequest) (runID string, err error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Reset_{Reset_: &wire.ResetRequest{FlowId: id, Exec: r.Exec, Step: r.Step, Reason: r.Reason}}}, once)
	if err != nil {
		return "", err
	}
	re, err := reply(a, a.GetReset_())
	if err != nil {
		return "", err
	}
	return re.RunId, nil
}

// Delete removes a flow with all that is kept of it.
func (c *Client) Delete(ctx context.Context, id, reason string) error {
	_, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: id, Reason: reason}}}, once)
	return err
}

// Queues gives what waits for workers on the server that answers.
func (c *Client) Queues(ctx context.Context) ([]Queue, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Queues{Queues: &wire.QueuesRequest{}}}, read)
	if err != nil {
		return nil, err
	}
	re, err := reply(a, a.GetQueues())
	if err != nil {
		return nil, err
	}
	out := make([]Queue, len(re.Queues))
	for i, q := range re.Queues {
		out[i] = fromQueue(q)
	}
	return out, nil
}

// Workers gives the workers that are connected to the server that answers.
func (c *Client) Workers(ctx context.Context) ([]Worker, error) {
	a, err := c.do(ctx, &wire.Call{Verb: &wire.Call_Workers{Workers: &wire.WorkersRequest{}}}, read)
	if err != nil {
		return nil, err
	}
	re, err := reply(a, a.GetWorkers())
	if err != nil {
		return nil, err
	}
	out := make([]Worker, len(re.Workers))
	for i, w := range re.Workers {
		out[i] = fromWorker(w)
	}
	return out, nil
}
