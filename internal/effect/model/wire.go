package model

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
)

// wireChunk is one event of a stream, as far as it is used.
type wireChunk struct {
	Choices []struct {
		Delta        wireMessage `json:"delta"`
		FinishReason *string     `json:"finish_reason"`
	} `json:"choices"`
	Usage *wireUsage      `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// wireAnswer is a whole answer, for servers that do not stream.
type wireAnswer struct {
	Choices []struct {
		Message      wireMessage `json:"message"`
		FinishReason *string     `json:"finish_reason"`
	} `json:"choices"`
	Usage *wireUsage      `json:"usage"`
	Error json.RawMessage `json:"error"`
}

type wireMessage struct {
	Content   json.RawMessage `json:"content"` // string, null, or parts
	Refusal   *string         `json:"refusal"`
	ToolCalls []wireToolCall  `json:"tool_calls"`
}

type wireToolCall struct {
	Index    *int   `json:"index"`
	ID       string `json:"id"`
	Function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"` // string; an object from some servers
	} `json:"function"`
}

type wireUsage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
}

// part is what one event adds to an answer.
type part struct {
	text   string
	tools  []wireToolCall
	finish string
	usage  *wireUsage
	fault  json.RawMessage // the error object, nil for none
}

// decodeChunk decodes one event in full. Only the first choice counts: a
// request never asks for more.
func decodeChunk(data []byte) (part, error) {
	var c wireChunk
	if err := json.Unmarshal(data, &c); err != nil {
		return part{}, err
	}
	p := part{usage: c.Usage, fault: present(c.Error)}
	if len(c.Choices) == 0 {
		return p, nil
	}
	return p, p.fill(&c.Choices[0].Delta, c.Choices[0].FinishReason)
}

// decodeAnswer decodes a whole answer.
func decodeAnswer(data []byte) (part, error) {
	var a wireAnswer
	if err := json.Unmarshal(data, &a); err != nil {
		return part{}, err
	}
	p := part{usage: a.Usage, fault: present(a.Error)}
	if len(a.Choices) == 0 {
		return p, nil
	}
	return p, p.fill(&a.Choices[0].Message, a.Choices[0].FinishReason)
}

func (p *part) fill(m *wireMessage, finish *string) error {
	text, err := contentText(m.Content)
	if err != nil {
		return err
	}
	p.text = text
	if m.Refusal != nil {
		p.text += *m.Refusal
	}
	p.tools = m.ToolCalls
	if finish != nil {
		p.finish = *finish
	}
	return nil
}

// contentText gives the text of a content: a string, or a list of parts, of
// which only the ones of type text are meant for the reader.
func contentText(raw json.RawMessage) (string, error) {
	if present(raw) == nil {
		return "", nil
	}
	if raw[0] != '[' {
		var s string
		err := json.Unmarshal(raw, &s)
		return s, err
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", err
	}
	var b strings.Builder
	for _, p := range parts {
		if p.Type == "text" {
			b.WriteString(p.Text)
		}
	}
	return b.String(), nil
}

// argumentsText gives the arguments of a call as the string they should be.
func argumentsText(raw json.RawMessage) (string, error) {
	if present(raw) == nil {
		return "", nil
	}
	if raw[0] != '"' {
		return string(raw), nil
	}
	var s string
	err := json.Unmarshal(raw, &s)
	return s, err
}

// present gives nil for an absent or null value.
func present(raw json.RawMessage) json.RawMessage {
	if raw = bytes.TrimSpace(raw); len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	return raw
}

// fault is what an error body or event says.
type fault struct {
	message string
	code    string // the code, or the type when there is none
	status  int    // code as an HTTP status, 0 if it is not one
}

// parseFault reads the error object of OpenAI and the looser forms of others:
// a string, {"message":…}, {"detail":…}.
func parseFault(raw []byte) (fault, bool) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return fault{message: text}, text != ""
	}
	var o struct {
		Message string          `json:"message"`
		Detail  json.RawMessage `json:"detail"`
		Type    string          `json:"type"`
		Code    json.RawMessage `json:"code"`
	}
	if json.Unmarshal(raw, &o) != nil {
		return fault{}, false
	}
	f := fault{message: o.Message, code: strings.Trim(string(present(o.Code)), `"`)}
	if f.code == "" {
		f.code = o.Type
	}
	if n, err := strconv.Atoi(f.code); err == nil && n >= 400 && n <= 599 {
		f.status = n
	}
	if f.message == "" {
		if json.Unmarshal(o.Detail, &f.message) != nil {
			f.message = string(o.Detail)
		}
	}
	return f, f.message != "" || f.code != ""
}

// parseErrorBody reads the body of an error response, whatever it is.
func parseErrorBody(body []byte) fault {
	var o struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(body, &o) == nil {
		if raw := present(o.Error); raw != nil {
			if f, ok := parseFault(raw); ok {
				return f
			}
		}
	}
	if f, ok := parseFault(body); ok {
		return f
	}
	return fault{message: string(body)}
}
