package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/stream"
	"github.com/perdure-dev/perdure/internal/wire"
)

// turnRequest is the body of a turn.
type turnRequest struct {
	content json.RawMessage
	onBusy  wire.Publish_OnBusy
	stream  *bool
}

func decodeTurn(v value) (turnRequest, error) {
	req := turnRequest{onBusy: wire.Publish_INTERRUPT}
	err := v.object(func(name string, m value) error {
		switch name {
		case "input":
			return m.input(&req.content)
		case "stream":
			req.stream = new(bool)
			return m.boolean(req.stream)
		case "on_busy":
			return m.onBusy(&req.onBusy)
		}
		return m.unknown("input, stream, on_busy")
	})
	if err == nil && req.content == nil {
		err = invalidField("input", "is missing; it must be a string, an array of content parts, or an object with content")
	}
	return req, err
}

// input reads what the user says.
func (v value) input(into *json.RawMessage) error {
	if v.raw[0] == '{' {
		err := v.object(func(name string, m value) error {
			switch name {
			case "content":
				return m.input(into)
			case "role":
				var role string
				return m.word(&role, "user")
			}
			return m.unknown("content, role")
		})
		if err == nil && *into == nil {
			err = invalidField(v.at("content"), "is missing")
		}
		return err
	}
	if string(v.raw) == `""` {
		return v.bad("must not be empty")
	}
	if err := v.checkContent(); err != nil {
		return err
	}
	*into = v.raw
	return nil
}

// onBusy reads what happens when the session runs a turn.
func (v value) onBusy(into *wire.Publish_OnBusy) error {
	var word string
	if err := v.word(&word, "interrupt", "reject", "enqueue", "steer", "rollback"); err != nil {
		return err
	}
	switch word {
	case "interrupt":
		*into = wire.Publish_INTERRUPT
	case "reject":
		*into = wire.Publish_REJECT
	case "enqueue":
		*into = wire.Publish_ENQUEUE
	default:
		return &refusal{status: http.StatusBadRequest, code: "not_built_yet", message: v.path + ": " + word + " is not built yet",
			hint: "use interrupt, reject or enqueue", param: v.path}
	}
	return nil
}

// startTurn gives input to a session and answers with the turn's events, or
// with its result. A client that leaves does not cancel the turn.
func (a *API) startTurn(c *call) error {
	c.session = c.params[0]
	b, err := c.body(false)
	if err != nil {
		return err
	}
	v, err := parse(b)
	if err != nil {
		return err
	}
	req, err := decodeTurn(v)
	if err != nil {
		return err
	}
	if err := a.checkPrompt(req.content); err != nil {
		return err
	}
	turn := session.TurnRequest{Content: req.content, OnBusy: req.onBusy}
	if turn.RequestID, err = c.idempotencyKey(); err != nil {
		return err
	}
	w, err := a.svc.StartTurn(c.r.Context(), c.tenant, c.session, turn)
	if err != nil {
		return err
	}
	a.watches(c, w)
	if c.wantsStream(req.stream) {
		return c.relay(w, c.stream()).serve()
	}
	return c.await(w, newOutcome(c.session, w.Turn()), c.result)
}

func (a *API) checkPrompt(content []byte) error {
	if bound := int64(a.cfg.Limits.MaxPromptBytes); int64(len(content)) > bound {
		return tooLarge("the input", bound, "limits.max_prompt_bytes")
	}
	return nil
}

// watches notes what the answer will be about.
func (a *API) watches(c *call, w *session.Watcher) {
	c.turn = w.Turn()
	h := c.w.Header()
	h["X-Perdure-Session"] = []string{c.session}
	h["X-Perdure-Turn"] = []string{c.turn}
}

func (c *call) wantsStream(asked *bool) bool {
	if asked != nil {
		return *asked
	}
	return strings.Contains(c.r.Header.Get("Accept"), "text/event-stream")
}

// getTurn tells how a turn stands, or waits for its end.
func (a *API) getTurn(c *call) error {
	c.session, c.turn = c.params[0], c.params[1]
	wait := c.query["wait"]
	if wait != "" && wait != "true" && wait != "false" {
		return invalidField("wait", fmt.Sprintf("%.40q is not allowed; allowed: true, false", wait))
	}
	o, err := a.lookUp(c, c.turn)
	if err != nil {
		return err
	}
	if wait == "true" && !o.ended() {
		w, err := a.svc.WatchTurn(c.r.Context(), c.tenant, c.session, c.turn, o.last)
		if err != nil {
			return err
		}
		return c.await(w, o, c.result)
	}
	return c.result(o)
}

// lookUp reads what the log has of a turn, without waiting for more.
func (a *API) lookUp(c *call, turn string) (*outcome, error) {
	w, err := a.svc.WatchTurn(c.r.Context(), c.tenant, c.session, turn, "")
	if err != nil {
		return nil, err
	}
	defer w.Close()
	o := newOutcome(c.session, turn)
	for {
		events, err := w.Poll(c.r.Context())
		o.take(events)
		switch {
		case err == nil && len(events) > 0:
			continue
		case err == nil, errors.Is(err, session.ErrEnded), errors.Is(err, stream.ErrSlowReader): // the log was read by then
		default:
			return nil, err
		}
		if o.status == "" {
			return nil, noTurn(turn)
		}
		return o, nil
	}
}

// await answers with a turn when it has ended. Falling behind is no error
// here: the log is read again from the last event on, a bounded number of
// times.
func (c *call) await(w *session.Watcher, o *outcome, reply func(*outcome) error) error {
	return c.relay(w, &awaited{c: c, o: o, reply: reply}).serve()
}

// awaited answers with a turn when it has ended.
type awaited struct {
	c     *call
	o     *outcome
	reply func(*outcome) error
	again int
}

// take implements consumer.
func (a *awaited) take(events []session.Event) (over bool, err error) {
	a.o.take(events)
	return false, nil
}

// beat implements consumer.
func (a *awaited) beat() (time.Duration, error) { return 0, nil }

// fail implements consumer.
func (a *awaited) fail(err error) (*session.Watcher, error) {
	switch {
	case errors.Is(err, session.ErrEnded):
		return nil, a.reply(a.o)
	case errors.Is(err, stream.ErrSlowReader) && a.again < maxCatchUps:
		a.again++
		return a.c.api.svc.WatchTurn(context.Background(), a.c.tenant, a.o.session, a.o.turn, a.o.last)
	}
	return nil, err
}

const maxCatchUps = 100

// outcome is what the events of a turn amount to.
type outcome struct {
	session, turn string
	status        string          // "", queued, running, completed, failed or cancelled
	last          string          // ID of the last durable event
	message       json.RawMessage // the assistant's last one
	text          string          // of message
	said          []byte          // the texts of all messages of the turn, a blank line between them
	finish        string          // of message
	partial       bool
	tools         []json.RawMessage
	end           terminal
}

// terminal is the data of a terminal event.
type terminal struct {
	Usage      *agent.Usage   `json:"usage"`
	ModelCalls int            `json:"model_calls"`
	Error      *agent.Failure `json:"error"`
	Reason     string         `json:"reason"`
}

func newOutcome(sessionID, turn string) *outcome { return &outcome{session: sessionID, turn: turn} }

func (o *outcome) ended() bool {
	return o.status == "completed" || o.status == "failed" || o.status == "cancelled"
}

func (o *outcome) take(events []session.Event) {
	for i := range events {
		if ev := &events[i]; ev.Durable != nil {
			o.add(ev)
		}
	}
}

func (o *outcome) add(ev *session.Event) {
	if ev.ID != "" {
		o.last = ev.ID
	}
	switch ev.Name {
	case session.EventTurnQueued:
		o.status = "queued"
	case agent.EventMessage:
		o.status = "running"
		o.say(ev)
	case agent.EventTool:
		o.tools = append(o.tools, ev.Durable.Data)
	case agent.EventCompleted:
		o.finished("completed", ev)
	case agent.EventFailed:
		o.finished("failed", ev)
	case agent.EventCancelled, session.EventDeleted:
		o.finished("cancelled", ev)
	default:
		o.status = "running"
	}
}

// said is what a message event says of its message.
type said struct {
	Finish  string `json:"finish_reason"`
	Partial bool   `json:"partial"`
}

func (o *outcome) say(ev *session.Event) {
	if len(ev.Durable.Items) == 0 {
		return
	}
	o.message, o.text = ev.Durable.Items[0], messageText(ev.Durable.Items[0])
	var s said
	_ = json.Unmarshal(ev.Durable.Data, &s) // the agent wrote it
	o.finish, o.partial = s.Finish, s.Partial
	if o.text != "" {
		if len(o.said) > 0 {
			o.said = append(o.said, messageGap...)
		}
		o.said = append(o.said, o.text...)
	}
}

// messageGap stands between the messages of one turn where they are one text.
const messageGap = "\n\n"

func messageText(m []byte) string {
	var msg struct {
		Content string `json:"content"`
	}
	_ = json.Unmarshal(m, &msg) // the agent wrote it; null is no text
	return msg.Content
}

func (o *outcome) finished(status string, ev *session.Event) {
	o.status = status
	_ = json.Unmarshal(session.Data(ev.Durable), &o.end) // valid: the same text goes to streams
}

// turnView is a turn as one JSON object.
type turnView struct {
	TurnID       string            `json:"turn_id"`
	SessionID    string            `json:"session_id"`
	Status       string            `json:"status"`
	Text         string            `json:"text"`
	Message      json.RawMessage   `json:"message"`
	FinishReason string            `json:"finish_reason,omitempty"`
	Partial      bool              `json:"partial,omitempty"`
	ToolCalls    []json.RawMessage `json:"tool_calls"`
	Usage        *agent.Usage      `json:"usage"`
	ModelCalls   int               `json:"model_calls,omitempty"`
	Error        *agent.Failure    `json:"error,omitempty"`
	Reason       string            `json:"reason,omitempty"`
	LastEventID  string            `json:"last_event_id"`
}

// result answers with a turn. That it ran and failed is a result, not an error
// of the request: the status is 200 and the body says so.
func (c *call) result(o *outcome) error {
	tools := o.tools
	if tools == nil {
		tools = []json.RawMessage{}
	}
	return c.reply(http.StatusOK, turnView{
		TurnID: o.turn, SessionID: o.session, Status: o.status, Text: o.text, Message: o.message, FinishReason: o.finish,
		Partial: o.partial, ToolCalls: tools, Usage: o.end.Usage, ModelCalls: o.end.ModelCalls, Error: o.end.Error,
		Reason: o.end.Reason, LastEventID: o.last,
	})
}
