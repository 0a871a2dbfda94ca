package httpapi

import (
	"encoding/json"
	"github.com/perdure-dev/perdure/internal/jsontext"

	"github.com/perdure-dev/perdure/internal/session"
)

// message is one message of a conversation, in the normal form in which they
// are kept: the role first, the rest as given.
type message struct {
	role    string
	content value // raw is nil when there is none
	raw     json.RawMessage
}

var roles = []string{"system", "developer", "user", "assistant", "tool"}

const (
	maxParts = 256 // content parts of a message
	maxCalls = 256 // tool calls of a message
)

// message reads a chat message in OpenAI's form.
func (v value) message() (message, error) {
	var m message
	var calls, callID value
	rest := make([]byte, 0, len(v.raw))
	err := v.object(func(name string, f value) error {
		switch name {
		case "role":
			return f.word(&m.role, roles...)
		case "content":
			m.content = f
		case "tool_calls":
			calls = f
		case "tool_call_id":
			callID = f
		}
		rest = append(jsontext.AppendString(append(rest, ','), name), ':')
		rest = append(rest, f.raw...)
		return nil
	})
	switch {
	case err != nil:
		return m, err
	case m.role == "":
		return m, invalidField(v.at("role"), "is missing; allowed: "+list(roles))
	}
	if err := v.checkMessage(m, calls, callID); err != nil {
		return m, err
	}
	if m.role == "user" && len(rest) == len(m.content.raw)+len(`,"content":`) {
		m.raw = session.UserMessage(m.content.raw)
		return m, nil
	}
	raw := make([]byte, 0, len(v.raw)+8)
	raw = jsontext.AppendString(append(raw, `{"role":`...), m.role)
	m.raw = append(append(raw, rest...), '}')
	return m, nil
}

func (v value) checkMessage(m message, calls, callID value) error {
	if calls.raw != nil && !calls.isNull() {
		if m.role != "assistant" {
			return calls.bad("is only for messages of the assistant")
		}
		if err := calls.array(maxCalls, func(_ int, e value) error { return e.toolCall() }); err != nil {
			return err
		}
	}
	if m.role == "tool" {
		var id string
		if callID.raw == nil {
			return invalidField(v.at("tool_call_id"), "is missing")
		}
		if err := callID.str(&id); err != nil {
			return err
		}
	}
	if m.content.raw == nil || m.content.isNull() {
		if m.role == "assistant" && calls.raw != nil && !calls.empty() {
			return nil
		}
		return invalidField(v.at("content"), "is missing; it must be a string or an array of content parts")
	}
	return m.content.checkContent()
}

func (v value) toolCall() error {
	var id, name, arguments string
	err := v.object(func(n string, m value) error {
		switch n {
		case "id":
			return m.str(&id)
		case "function":
			return m.object(func(n string, f value) error {
				switch n {
				case "name":
					return f.str(&name)
				case "arguments":
					return f.str(&arguments)
				}
				return nil
			})
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case id == "":
		return invalidField(v.at("id"), "is missing")
	case name == "":
		return invalidField(v.at("function.name"), "is missing")
	}
	return nil
}

// checkContent accepts a string or an array of content parts.
func (v value) checkContent() error {
	switch v.raw[0] {
	case '"':
		return nil
	case '[':
	default:
		return v.want("a string or an array of content parts")
	}
	if v.empty() {
		return v.bad("must have a content part")
	}
	return v.array(maxParts, func(_ int, part value) error {
		var kind string
		hasText := false
		err := part.object(func(name string, m value) error {
			switch name {
			case "type":
				return m.str(&kind)
			case "text":
				var s string
				hasText = true
				return m.str(&s)
			}
			return nil
		})
		switch {
		case err != nil:
			return err
		case kind == "":
			return invalidField(part.at("type"), "is missing, such as text or image_url")
		case kind == "text" && !hasText:
			return invalidField(part.at("text"), "is missing")
		}
		return nil
	})
}
