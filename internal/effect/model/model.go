// Package model holds the clients of language models: any server that speaks
// the OpenAI chat-completions form, a built-in demo model, and the limiter
// that bounds calls to one of them.
//
// A provider makes one attempt and says what kind of failure it met; trying
// again is the business of the durable layer above, which must not do so once
// text was shown (Result.Shown). A call runs on its caller's goroutine and
// starts no other.
package model

import (
	"context"
	"encoding/json"
)

// Request is one model call. The provider only reads it, and keeps nothing of
// it after Generate has returned.
type Request struct {
	// Model is the upstream's name of the model.
	Model string
	// Messages are in the OpenAI chat form, each one valid JSON object; they
	// are put into the request body as they are.
	Messages []json.RawMessage
	// Tools is an OpenAI tools array, or nil.
	Tools json.RawMessage
	// Params holds further top-level parameters (temperature, max_tokens, …)
	// as a JSON object that passes ValidateParams, or nil.
	Params json.RawMessage
	// IdempotencyKey is sent as the header of that name when not empty. At
	// most 255 visible ASCII characters.
	IdempotencyKey string
}

// Sink takes the text of an answer while it comes.
type Sink interface {
	// Delta gets the next piece of text, in order, on the goroutine that called
	// Generate. Pieces are whole UTF-8 when the upstream's are; what one read
	// of the connection brought is one piece. text is valid only during the
	// call and must not be changed. An error ends the call.
	Delta(text []byte) error
}

// SinkFunc is a function as a Sink.
type SinkFunc func(text []byte) error

// Delta implements Sink.
func (f SinkFunc) Delta(text []byte) error { return f(text) }

// Result is an answer, whole or, beside an error, as far as it came.
type Result struct {
	// Text is the answer's text; beside an error exactly what the sink got (all
	// that came, if there is no sink).
	Text string
	// ToolCalls are the calls the model asks for, in its order. Empty beside an
	// error: half a call is no call.
	ToolCalls []ToolCall
	// FinishReason is the upstream's word: stop, length, tool_calls,
	// content_filter, …
	FinishReason string
	// Usage is zero when the upstream does not tell.
	Usage Usage
	// Shown tells that the sink got text, so that the call must not be repeated.
	Shown bool
}

// ToolCall is one call of a tool. Arguments is what the model wrote: it should
// be a JSON object, and need not be valid JSON.
type ToolCall struct {
	ID        string
	Name      string
	Arguments string
}

// Usage counts tokens.
type Usage struct {
	Prompt     int
	Completion int
}

// Provider is one source of answers. Implementations are safe for concurrent
// use.
type Provider interface {
	// Generate makes one attempt. sink may be nil. When it returns, the
	// upstream's stream has ended or its connection is closed, so a permit of a
	// Limiter may be released. Every error is an *Error; a cancelled ctx gives
	// KindCancelled, with the text so far in the Result.
	Generate(ctx context.Context, req Request, sink Sink) (Result, error)
	// Check tells whether the provider can be reached and takes the key, without
	// using a model. Every error is an *Error; one with a Status means that a
	// server did answer.
	Check(ctx context.Context) error
	// Close releases idle connections. Calls in flight go on.
	Close()
}
