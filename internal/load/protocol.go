package load

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// Progress is what one event of a reply means.
type Progress int

// The meanings of an event.
const (
	Other  Progress = iota // nothing that is measured
	Token                  // visible output
	Done                   // the turn has ended well
	Failed                 // the turn has ended otherwise
)

// Request is one HTTP request with a JSON body (none when Body is nil).
type Request struct {
	Method, Path string
	Body         []byte
}

// Protocol says how a server is asked for turns. Implementations are safe for
// concurrent use and keep no state of a worker.
type Protocol interface {
	// Name goes into the settings of the results.
	Name() string
	// Open asks for a session; a zero Request means that there are none.
	Open() Request
	// Session reads the session's ID from the answer to Open.
	Session(body []byte) (string, error)
	// Turn asks for one turn; the body is shared by all workers.
	Turn(session string) Request
	// Shut deletes a session; a zero Request leaves it.
	Shut(session string) Request
	// Event classifies one server-sent event. data is its beginning, at
	// least 2 KiB of it, and valid during the call only.
	Event(name, data []byte) Progress
	// Whole classifies a reply that is not a stream, by its first 64 KiB.
	Whole(body []byte) Progress
}

// pad makes an input of n bytes that starts with "hello".
func pad(n int) string {
	const line = "hello, this is padding of a long prompt. "
	if n <= len("hello") {
		return "hello"
	}
	return strings.Repeat(line, n/len(line)+1)[:n]
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // only maps of strings and booleans come here
	}
	return b
}

// Perdure is the native API. inputBytes is the size of a turn's input, 0 for
// "hello".
func Perdure(agent string, inputBytes int) Protocol {
	return perdure{
		open: mustJSON(map[string]any{"agent": agent}),
		turn: mustJSON(map[string]any{"input": pad(inputBytes), "stream": true}),
	}
}

type perdure struct{ open, turn []byte }

func (perdure) Name() string { return "perdure" }

func (p perdure) Open() Request { return Request{"POST", "/v1/sessions", p.open} }

func (perdure) Session(body []byte) (string, error) { return idOf(body) }

func idOf(body []byte) (string, error) {
	var s struct{ ID string }
	if err := json.Unmarshal(body, &s); err != nil || s.ID == "" {
		return "", fmt.Errorf("no session id in %q", clip(body))
	}
	return s.ID, nil
}

func (p perdure) Turn(session string) Request {
	return Request{"POST", "/v1/sessions/" + session + "/turns", p.turn}
}

func (perdure) Shut(session string) Request {
	return Request{"DELETE", "/v1/sessions/" + session, nil}
}

func (perdure) Event(name, _ []byte) Progress {
	switch string(name) {
	case "message.delta", "message.completed":
		// A reply that is durable before its first delta is due comes whole.
		return Token
	case "turn.completed":
		return Done
	case "turn.failed", "turn.cancelled":
		return Failed
	}
	return Other
}

func (perdure) Whole([]byte) Progress { return Failed } // a stream was asked for

// ChatCompletions is the OpenAI protocol, streaming and without sessions.
func ChatCompletions(model string, inputBytes int) Protocol {
	return chat{mustJSON(map[string]any{
		"model": model, "stream": true,
		"messages": []map[string]any{{"role": "user", "content": pad(inputBytes)}},
	})}
}

type chat struct{ turn []byte }

func (chat) Name() string                   { return "chat-completions" }
func (chat) Open() Request                  { return Request{} }
func (chat) Session([]byte) (string, error) { return "", nil }
func (c chat) Turn(string) Request          { return Request{"POST", "/chat/completions", c.turn} }
func (chat) Shut(string) Request            { return Request{} }
func (chat) Whole([]byte) Progress          { return Failed }

func (chat) Event(_, data []byte) Progress {
	switch {
	case bytes.Equal(data, []byte("[DONE]")):
		return Done
	case bytes.HasPrefix(data, []byte(`{"error"`)):
		return Failed
	case bytes.Contains(data, []byte(`"tool_calls":[{`)),
		bytes.Contains(data, []byte(`"content":"`)) && !bytes.Contains(data, []byte(`"content":""`)):
		return Token
	}
	return Other
}

// clip shortens a body for an error message.
func clip(b []byte) string {
	const most = 300
	if len(b) > most {
		return string(b[:most]) + "…"
	}
	return string(b)
}
