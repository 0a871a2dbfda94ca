package oracle

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

// history tells an oracle a small history in few words; a test bends one word
// of a good history and expects the rule that notices.
type history struct {
	o     *Oracle
	lsn   uint64
	n     uint32
	items uint64
	count uint64
	now   int64
	state *wire.Flow
}

func newHistory() *history {
	h := &history{o: New()}
	h.acked(Op{Kind: Start, RunID: "run1"})
	h.commit("flow.started")
	h.state = rest("run1")
	return h
}

func rest(run string) *wire.Flow {
	turn := &wire.Step{Spec: &wire.StepSpec{Name: "turn", Wait: &wire.Wait{Channel: "input", Count: 1, Idle: true}}}
	return &wire.Flow{RunId: run, Steps: []*wire.Step{turn}}
}

func (h *history) acked(op Op) {
	h.now += 10
	op.FlowID, op.From, op.To = "s1", h.now, h.now+5
	h.o.Acked(op)
}

func (h *history) sent(op Op) {
	h.now += 10
	op.FlowID, op.From = "s1", h.now
	h.o.Sent(op)
}

func (h *history) publish(id string, policy OnBusy) {
	h.acked(Op{Kind: Publish, RunID: "run1", MessageID: id, Payload: user(id), OnBusy: policy})
}

func user(id string) []byte { return fmt.Appendf(nil, `{"role":"user","content":"%s"}`, id) }

// commit tells the events of one entry, each "type scope item | item".
func (h *history) commit(events ...string) {
	h.lsn, h.n = h.lsn+1, 0
	h.more(events...)
}

func (h *history) more(events ...string) {
	for _, text := range events {
		words := strings.SplitN(text, " ", 3)
		ev := &wire.Event{Lsn: h.lsn, N: h.n, Type: words[0]}
		if len(words) > 1 {
			ev.Scope = words[1]
		}
		if len(words) > 2 {
			for it := range strings.SplitSeq(words[2], " | ") {
				ev.Items = append(ev.Items, []byte(it))
			}
		}
		h.tell(ev)
		h.n++
	}
}

func (h *history) tell(ev *wire.Event) {
	h.o.Event("s1", ev)
	if h.state != nil {
		h.state.LastEvent = &wire.Cursor{Lsn: ev.Lsn, N: ev.N}
	}
	h.count, h.items = h.count+1, h.items+uint64(len(ev.Items))
}

// started is the event with which a message's turn starts.
func started(id string) string { return "step.started " + id + " " + string(user(id)) }

const (
	said  = `{"role":"assistant","content":"hi"}`
	calls = `{"role":"assistant","content":null,"tool_calls":[{"id":"a"},{"id":"b"}]}`
	toolA = `{"role":"tool","tool_call_id":"a","content":"1"}`
	toolB = `{"role":"tool","tool_call_id":"b","content":"2"}`
)

// turn is a whole turn without tools.
func (h *history) turn(id string) {
	h.publish(id, Enqueue)
	h.commit(started(id))
	h.commit("message.completed "+id+" "+said, "turn.completed "+id)
}

func (h *history) end(settled bool) error {
	flows := map[string]*wire.Flow{}
	if h.state != nil {
		h.state.EventCount += h.count
		h.state.ItemCount += h.items
		flows["s1"] = h.state
	}
	if settled {
		h.o.Settled(flows)
	} else {
		h.o.Final(flows)
	}
	return h.o.Err()
}

// working puts a step of the scope into the state.
func (h *history) working(scope string) {
	h.state.Steps = []*wire.Step{{State: wire.Step_STARTED, Scope: scope, Spec: &wire.StepSpec{Name: "turn"}}}
}

func (h *history) waiting(ids ...string) {
	c := &wire.Channel{Name: "input"}
	for _, id := range ids {
		c.Pending = append(c.Pending, &wire.Message{Id: id})
	}
	h.state.Channels = []*wire.Channel{c}
}

func TestOracle(t *testing.T) {
	for _, tc := range []struct {
		name    string
		rule    Rule // "" = a good history
		settled bool
		tell    func(h *history)
	}{
		{"a turn", "", true, func(h *history) { h.turn("m1"); h.turn("m2") }},
		{"tools in parallel", "", true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("message.completed m1 "+calls, "step.started m1", "step.started m1")
			h.commit("tool.completed m1")
			h.commit("tool.completed m1", "step.started m1 "+toolB+" | "+toolA)
			h.commit("message.completed m1 "+said, "turn.completed m1")
		}},
		{"interrupt and drop", "", true, func(h *history) {
			h.publish("m1", Interrupt)
			h.commit(started("m1"))
			h.publish("m2", Interrupt)
			h.commit("cancel.requested m1", "channel.published m2")
			h.publish("m3", Interrupt)
			h.commit("channel.dropped m2", "channel.published m3")
			h.commit("turn.cancelled m1", started("m3"))
			h.commit("turn.completed m3")
		}},
		{"one runs, one waits", "", false, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.publish("m2", Enqueue)
			h.commit("channel.published m2")
			h.working("m1")
			h.waiting("m2")
		}},
		{"deleted while it runs", "", true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.acked(Op{Kind: Delete})
			h.commit("flow.deleted")
			h.state = nil
		}},
		{"deleted by a call without an answer, and started again", "", true, func(h *history) {
			h.turn("m1")
			h.sent(Op{Kind: Delete})
			h.acked(Op{Kind: Start, RunID: "run2"})
			h.state, h.count, h.items = rest("run2"), 0, 0
			h.commit("flow.started")
		}},
		{"a retry finds the message of a lost answer", "", true, func(h *history) {
			h.sent(Op{Kind: Publish, RequestID: "r1", Payload: user("m1")})
			h.commit(started("m1"))
			h.commit("turn.completed m1")
			h.turn("m2")
			h.acked(Op{Kind: Publish, RunID: "run1", MessageID: "m1", RequestID: "r1", Payload: user("m1")})
		}},
		{"a history to begin with", "", true, func(h *history) {
			h.o, h.lsn, h.count, h.items = New(), 0, 0, 0
			h.acked(Op{Kind: Start, RunID: "run1"})
			h.commit("flow.started  " + string(user("x")) + " | " + calls + " | " + toolA + " | " + toolB + " | " + said)
		}},

		{"an event twice", Cursors, true, func(h *history) {
			h.turn("m1")
			h.o.Event("s1", &wire.Event{Lsn: h.lsn, N: 0, Type: "message.completed", Scope: "m1"})
		}},
		{"a hole in a commit", Cursors, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.lsn++
			h.tell(&wire.Event{Lsn: h.lsn, N: 1, Type: "turn.completed", Scope: "m1"})
		}},
		{"a hole inside a commit", Cursors, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.n++
			h.more("turn.completed m1")
		}},
		{"a log without its beginning", Cursors, false, func(h *history) {
			h.o = New()
			h.commit("cancel.requested")
		}},
		{"two turns at once", OneTurn, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.publish("m2", Enqueue)
			h.commit(started("m1"))
			h.commit(started("m2"))
			h.commit("turn.completed m1")
			h.commit("turn.completed m2")
		}},
		{"two turns at once in the state", OneTurn, false, func(h *history) {
			h.publish("m1", Enqueue)
			h.publish("m2", Enqueue)
			h.commit(started("m1"))
			h.working("m1")
			s := *h.state.Steps[0].CloneVT()
			s.Scope = "m2"
			h.state.Steps = append(h.state.Steps, &s)
			h.waiting("m2")
		}},
		{"an event of nobody's turn", OneTurn, true, func(h *history) {
			h.turn("m1")
			h.commit("message.completed m9 " + said)
		}},
		{"two ends", Ended, true, func(h *history) {
			h.turn("m1")
			h.commit("turn.failed m1")
		}},
		{"a token after the end", Ended, true, func(h *history) {
			h.turn("m1")
			h.commit("message.completed m1 " + said)
		}},
		{"a dropped message starts", Ended, true, func(h *history) {
			h.turn("m1")
			h.publish("m2", Enqueue)
			h.commit("channel.published m2")
			h.acked(Op{Kind: Cancel, Scope: "m2"})
			h.commit("channel.dropped m2")
			h.commit(started("m2"))
		}},
		{"a started message is dropped", Ended, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.acked(Op{Kind: Cancel})
			h.commit("channel.dropped m1")
		}},
		{"accepted twice", Ended, false, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit("channel.published m1")
			h.commit("channel.published m1")
			h.waiting("m1")
		}},
		{"an end nobody knows", Ended, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("turn.vanished m1", "turn.completed m1")
		}},
		{"an acknowledged message is lost", Outcome, true, func(h *history) {
			h.turn("m1")
			h.publish("m2", Enqueue)
		}},
		{"two fates", Outcome, false, func(h *history) {
			h.turn("m1")
			h.waiting("m1")
		}},
		{"overtaken in the queue", FIFO, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.publish("m2", Enqueue)
			h.commit("channel.published m1")
			h.commit(started("m2"))
			h.commit("turn.completed m2", started("m1"))
			h.commit("turn.completed m1")
		}},
		{"rejected, and waits", Policy, false, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.publish("m2", Reject)
			h.commit("channel.published m2")
			h.working("m1")
			h.waiting("m2")
		}},
		{"interrupted in the queue, and starts", Policy, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.publish("m2", Enqueue)
			h.commit("channel.published m2")
			h.publish("m3", Interrupt)
			h.commit("cancel.requested m1", "channel.published m3")
			h.commit("turn.cancelled m1", started("m2"))
			h.commit("turn.completed m2", started("m3"))
			h.commit("turn.completed m3")
		}},
		{"cancelled by nobody", Policy, true, func(h *history) {
			h.acked(Op{Kind: Cancel})
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("turn.cancelled m1")
		}},
		{"cancelled for another", Policy, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.acked(Op{Kind: Cancel, Scope: "m2"})
			h.commit("turn.cancelled m1")
		}},
		{"another payload", Payload, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit("step.started m1 " + string(user("m2")))
			h.commit("turn.completed m1")
		}},
		{"one request, two messages", Idempotency, true, func(h *history) {
			for _, id := range []string{"m1", "m2"} {
				h.acked(Op{Kind: Publish, RunID: "run1", MessageID: id, RequestID: "r1", Payload: user(id)})
				h.commit(started(id))
				h.commit("turn.completed " + id)
			}
		}},
		{"a call without a result", Conversation, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("message.completed m1 " + calls)
			h.commit("step.started m1 " + toolA)
			h.commit("message.completed m1 "+said, "turn.completed m1")
		}},
		{"a turn ends with an open call", Conversation, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("message.completed m1 "+calls, "turn.completed m1")
		}},
		{"a result twice", Conversation, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("message.completed m1 "+calls+" | "+toolA+" | "+toolB+" | "+toolB, "turn.failed m1")
		}},
		{"a result of no call", Conversation, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("step.started m1 "+toolA, "turn.completed m1")
		}},
		{"a call twice", Conversation, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit(`message.completed m1 {"role":"assistant","tool_calls":[{"id":"a"},{"id":"a"}]} | `+toolA, "turn.completed m1")
		}},
		{"a user's tool call", Conversation, false, func(h *history) {
			h.commit(`flow.started  {"role":"user","tool_calls":[{"id":"a"}]}`)
		}},
		{"an item that is none", Conversation, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.commit("message.completed m1 hello", "turn.completed m1")
		}},
		{"a crash takes shown events back", Durability, true, func(h *history) {
			h.turn("m1")
			h.state.EventCount--
		}},
		{"a crash takes the end of the log", Durability, true, func(h *history) {
			h.turn("m1")
			h.state.LastEvent.N--
		}},
		{"a started flow is gone", Durability, true, func(h *history) {
			h.state = nil
		}},
		{"a started flow is gone, deleted only before", Durability, true, func(h *history) {
			h.o = New()
			h.acked(Op{Kind: Delete})
			h.acked(Op{Kind: Start, RunID: "run1"})
			h.state = nil
		}},
		{"the state runs what nobody saw", Durability, false, func(h *history) {
			h.turn("m1")
			h.working("m1")
		}},
		{"deleted, and there", Deletion, true, func(h *history) {
			h.acked(Op{Kind: Delete})
		}},
		{"ended by nobody", Deletion, true, func(h *history) {
			h.commit("flow.deleted")
			h.state = nil
		}},
		{"replaced by nobody", Deletion, true, func(h *history) {
			h.count, h.items = 0, 0
			h.commit("flow.started")
		}},
		{"a turn that never ends", Liveness, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit(started("m1"))
			h.working("m1")
		}},
		{"a message that waits for ever", Liveness, true, func(h *history) {
			h.publish("m1", Enqueue)
			h.commit("channel.published m1")
			h.waiting("m1")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHistory()
			tc.tell(h)
			err := h.end(tc.settled)
			if tc.rule == "" && err != nil {
				t.Fatal(err)
			}
			if tc.rule != "" && !broke(err, tc.rule) {
				t.Fatalf("%s was not noticed; errors: %v", tc.rule, err)
			}
		})
	}
}

func broke(err error, rule Rule) bool {
	list, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return false
	}
	for _, e := range list.Unwrap() {
		var v *Violation
		if errors.As(e, &v) && v.Rule == rule {
			return true
		}
	}
	return false
}

// A flow that is there and that nobody started is as wrong as a lost one.
func TestUnknownFlow(t *testing.T) {
	o := New()
	o.Final(map[string]*wire.Flow{"x": rest("run1")})
	if !broke(o.Err(), Durability) {
		t.Fatal("not noticed")
	}
}

// The list of violations is bounded.
func TestBound(t *testing.T) {
	o := New()
	for range 1000 {
		o.Event("s1", &wire.Event{Lsn: 1, Type: "cancel.requested"})
	}
	if n := len(o.broken); n != maxViolations {
		t.Fatalf("%d violations kept", n)
	}
}
