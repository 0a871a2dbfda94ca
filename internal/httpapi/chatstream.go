package httpapi

import (
	"errors"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/session"
)

func completionID(turn string) string { return "chatcmpl-" + strings.TrimPrefix(turn, "turn_") }

// finishReason keeps to the words that OpenAI's clients know. Tool calls are
// the server's business: the client never has to act on them.
func finishReason(word string) string {
	switch word {
	case "length", "content_filter":
		return word
	}
	return "stop"
}

func usageOf(o *outcome) agent.Usage {
	if o.end.Usage == nil {
		return agent.Usage{}
	}
	return *o.end.Usage
}

// completion answers with a chat.completion.
func (c *call) completion(o *outcome, model string) error {
	if o.status != "completed" {
		return turnRefusal(o)
	}
	p := getBuffer()
	b := jsontext.AppendString(append(*p, `{"id":`...), completionID(o.turn))
	b = strconv.AppendInt(append(b, `,"object":"chat.completion","created":`...), c.start.Unix(), 10)
	b = jsontext.AppendString(append(b, `,"model":`...), model)
	b = jsontext.AppendString(append(b, `,"choices":[{"index":0,"message":{"role":"assistant","content":`...), o.said)
	b = append(b, `,"refusal":null},"logprobs":null,"finish_reason":"`...)
	b = append(append(b, finishReason(o.finish)...), `"}],"usage":`...)
	b = append(appendUsage(b, usageOf(o)), `,"system_fingerprint":null}`...)
	err := c.send(http.StatusOK, b)
	putBuffer(p, b)
	return err
}

func appendUsage(b []byte, u agent.Usage) []byte {
	b = strconv.AppendInt(append(b, `{"prompt_tokens":`...), int64(u.Prompt), 10)
	b = strconv.AppendInt(append(b, `,"completion_tokens":`...), int64(u.Completion), 10)
	return append(strconv.AppendInt(append(b, `,"total_tokens":`...), int64(u.Total), 10), '}')
}

// chatStream turns the events of a turn into chunks of a chat.completion.
type chatStream struct {
	*sse
	o       *outcome
	usage   bool   // the client wants it
	head    []byte // what every chunk begins with
	opened  bool   // the first chunk, with the role, is out
	exec    uint64 // the message being written, by its step
	sent    int    // bytes of it that are out
	gap     bool   // text of a former message is out: a gap comes before more
	pending bool   // text of this message is out
}

// streamChat gives a turn as OpenAI's stream. Nothing is sent before the first
// text, so that a turn that fails before it is an HTTP error like any other.
func (c *call) streamChat(w *session.Watcher, req chatRequest) *chatStream {
	s := &chatStream{sse: c.stream(), o: newOutcome(c.session, w.Turn()), usage: req.includeUsage}
	s.head = jsontext.AppendString([]byte(`data: {"id":`), completionID(c.turn))
	s.head = strconv.AppendInt(append(s.head, `,"object":"chat.completion.chunk","created":`...), c.start.Unix(), 10)
	s.head = append(jsontext.AppendString(append(s.head, `,"model":`...), req.agent), `,"system_fingerprint":null,"choices":[`...)
	return s
}

// beat implements consumer. From the first heartbeat on errors come inside the
// stream.
func (s *chatStream) beat() (time.Duration, error) {
	return s.beatWith(func() error { return s.write(append(s.open(nil), ping...)) })
}

// take implements consumer: it writes what some events bring in one piece.
func (s *chatStream) take(events []session.Event) (over bool, err error) {
	p := getBuffer()
	b := *p
	defer func() { putBuffer(p, b) }()
	for i := range events {
		ev := &events[i]
		switch {
		case ev.Delta != nil:
			b = s.delta(b, ev)
			continue
		case ev.Durable == nil:
			continue
		}
		s.o.add(ev)
		if ev.Name == agent.EventMessage {
			b = s.message(b, ev)
		}
	}
	if over = s.o.ended(); over {
		if s.o.status != "completed" && !s.opened {
			return true, turnRefusal(s.o)
		}
		b = s.close(b)
	}
	if len(b) == 0 {
		return over, nil
	}
	return over, s.write(b)
}

// delta adds the part of a delta that is not out yet. A message that is begun
// anew says the same again up to there, or the stream could not be taken back.
func (s *chatStream) delta(b []byte, ev *session.Event) []byte {
	d := ev.Delta
	if d.Exec != s.exec {
		s.exec, s.sent = d.Exec, 0
	}
	end := d.Offset + len(d.Text)
	if end <= s.sent || d.Offset > s.sent {
		return b // the rest comes with the message itself
	}
	b = s.say(b, d.Text[s.sent-d.Offset:])
	s.sent = end
	return b
}

// message ends a message: what deltas did not bring is added.
func (s *chatStream) message(b []byte, ev *session.Event) []byte {
	if ev.Durable.Exec != s.exec {
		s.exec, s.sent = ev.Durable.Exec, 0
	}
	if s.sent < len(s.o.text) {
		b = s.say(b, s.o.text[s.sent:])
	}
	s.exec, s.sent = 0, 0
	s.gap, s.pending = s.gap || s.pending, false
	return b
}

func (s *chatStream) say(b []byte, text string) []byte {
	b = s.open(b)
	if s.gap {
		b = s.content(b, messageGap)
		s.gap = false
	}
	s.pending = true
	return s.content(b, text)
}

func (s *chatStream) content(b []byte, text string) []byte {
	b = jsontext.AppendString(append(append(b, s.head...), `{"index":0,"delta":{"content":`...), text)
	return s.tail(append(b, `},"logprobs":null,"finish_reason":null}`...), "null")
}

func (s *chatStream) open(b []byte) []byte {
	if s.opened {
		return b
	}
	s.opened = true
	b = append(append(b, s.head...), `{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}`...)
	return s.tail(b, "null")
}

func (s *chatStream) tail(b []byte, usage string) []byte {
	b = append(b, ']')
	if s.usage {
		b = append(append(b, `,"usage":`...), usage...)
	}
	return append(b, "}\n\n"...)
}

// close ends the stream.
func (s *chatStream) close(b []byte) []byte {
	if s.o.status != "completed" {
		return append(turnRefusal(s.o).appendOpenAI(append(b, "data: "...)), "\n\n"...)
	}
	b = s.open(b)
	b = append(append(b, s.head...), `{"index":0,"delta":{},"logprobs":null,"finish_reason":"`...)
	b = s.tail(append(append(b, finishReason(s.o.finish)...), `"}`...), "null")
	if s.usage {
		b = s.tail(append(b, s.head...), string(appendUsage(nil, usageOf(s.o))))
	}
	return append(b, "data: [DONE]\n\n"...)
}

// fail implements consumer: a stream that lost its turn ends as an HTTP error
// while nothing is out, else inside the stream.
func (s *chatStream) fail(err error) (*session.Watcher, error) {
	if !s.begun {
		return nil, err
	}
	s.c.closed = s.reason(err)
	if s.c.closed == "client_gone" {
		return nil, errClientGone
	}
	ref := &refusal{status: http.StatusServiceUnavailable, code: s.c.closed, message: "the stream ended early; the turn goes on: see GET /v1/sessions/" + s.c.session + "/turns/" + s.c.turn}
	b := append(ref.appendOpenAI([]byte("data: ")), "\n\n"...)
	return nil, errors.Join(s.write(b), errClientGone)
}
