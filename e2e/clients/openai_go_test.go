//go:build e2e

package clients

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
)

// mockText is what a mock says with eight tokens.
const mockText = "Durable turns stream one token at a time "

func openAI(s *server, opts ...option.RequestOption) *openai.Client {
	opts = append([]option.RequestOption{option.WithBaseURL(s.url + "/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0)}, opts...)
	c := openai.NewClient(opts...)
	return &c
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func ask(model, input string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{Model: model, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(input)}}
}

func inSession(id string) option.RequestOption { return option.WithHeader("X-Perdure-Session", id) }

// apiError fails unless err is the client's own error with that status.
func apiError(t *testing.T, err error, status int) *openai.Error {
	t.Helper()
	var e *openai.Error
	if !errors.As(err, &e) {
		t.Fatalf("want an error of the API with status %d, got %v", status, err)
	}
	if e.StatusCode != status || e.Message == "" || e.Type == "" {
		t.Fatalf("want status %d with a message and a type, got %d: %s", status, e.StatusCode, e.RawJSON())
	}
	return e
}

func TestGoChat(t *testing.T) {
	c := openAI(serve(t, setup{config: onMock(mock(t))}))
	res, err := c.Chat.Completions.New(within(t), ask("helper", "Hello"))
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Choices) != 1 || res.Choices[0].Message.Content != mockText || res.Choices[0].FinishReason != "stop" {
		t.Errorf("answer: %s", res.RawJSON())
	}
	if u := res.Usage; u.PromptTokens <= 0 || u.CompletionTokens != 8 || u.TotalTokens != u.PromptTokens+u.CompletionTokens {
		t.Errorf("usage: %s", res.RawJSON())
	}
	if res.Model != "helper" || res.Object != "chat.completion" || !strings.HasPrefix(res.ID, "chatcmpl-") || res.Created < time.Now().Add(-time.Hour).Unix() {
		t.Errorf("envelope: %s", res.RawJSON())
	}
}

func TestGoStream(t *testing.T) {
	c := openAI(serve(t, setup{config: onMock(mock(t))}))
	params := ask("helper", "Hello")
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	st := c.Chat.Completions.NewStreaming(within(t), params)
	var acc openai.ChatCompletionAccumulator
	chunks := 0
	for st.Next() {
		if chunk := st.Current(); !acc.AddChunk(chunk) {
			t.Fatalf("the client cannot add %s", chunk.RawJSON())
		}
		chunks++
	}
	if err := st.Err(); err != nil {
		t.Fatal(err)
	}
	if len(acc.Choices) != 1 || acc.Choices[0].Message.Content != mockText || acc.Choices[0].FinishReason != "stop" || acc.Choices[0].Message.Role != "assistant" {
		t.Errorf("answer: %+v", acc.ChatCompletion)
	}
	if chunks < 4 {
		t.Errorf("role, text, end and usage came in %d chunks", chunks)
	}
	if acc.Usage.CompletionTokens != 8 || acc.Usage.TotalTokens == 0 {
		t.Errorf("usage: %+v", acc.Usage)
	}
}

func TestGoModels(t *testing.T) {
	c := openAI(serve(t, setup{config: onMock(mock(t))}))
	var ids []string
	pager := c.Models.ListAutoPaging(within(t))
	for pager.Next() {
		ids = append(ids, pager.Current().ID)
	}
	if pager.Err() != nil || len(ids) != 1 || ids[0] != "helper" {
		t.Errorf("models %v, %v", ids, pager.Err())
	}
	if m, err := c.Models.Get(within(t), "helper"); err != nil || m.ID != "helper" {
		t.Errorf("model: %+v, %v", m, err)
	}
	_, err := c.Models.Get(within(t), "gpt-9")
	apiError(t, err, http.StatusNotFound)
}

func TestGoErrors(t *testing.T) {
	c := openAI(serve(t, setup{config: onMock(mock(t))}))
	_, err := c.Chat.Completions.New(within(t), ask("gpt-9", "Hello"))
	if e := apiError(t, err, http.StatusNotFound); e.Code != "model_not_found" || !strings.Contains(e.Message, "gpt-9") {
		t.Errorf("unknown model: %s", e.RawJSON())
	}
	st := c.Chat.Completions.NewStreaming(within(t), ask("gpt-9", "Hello"))
	if st.Next() {
		t.Error("a stream of an unknown model gives chunks")
	}
	apiError(t, st.Err(), http.StatusNotFound)

	_, err = c.Chat.Completions.New(within(t), ask("helper", "Hello"), option.WithRequestBody("application/json", []byte(`{"model":"helper","messages":`)))
	apiError(t, err, http.StatusBadRequest)
	_, err = c.Chat.Completions.New(within(t), openai.ChatCompletionNewParams{Model: "helper", Messages: []openai.ChatCompletionMessageParamUnion{}})
	if e := apiError(t, err, http.StatusBadRequest); !strings.HasPrefix(e.Param, "messages") {
		t.Errorf("the error must name messages: %s", e.RawJSON())
	}
	several := ask("helper", "Hello")
	several.N = openai.Int(2)
	_, err = c.Chat.Completions.New(within(t), several)
	if e := apiError(t, err, http.StatusBadRequest); e.Param != "n" {
		t.Errorf("n=2: %s", e.RawJSON())
	}
	_, err = c.Chat.Completions.New(within(t), ask("helper", "Hello"), inSession("no spaces, please"))
	apiError(t, err, http.StatusBadRequest)
}

// TestGoUpstreamFails: what the provider refuses is an error of the client's
// own kind, before and after the first token.
func TestGoUpstreamFails(t *testing.T) {
	down := openAI(serve(t, setup{config: onMock("http://127.0.0.1:1") + "\n", args: []string{"--set", "providers.mock.retry.max_attempts=1"}}))
	_, err := down.Chat.Completions.New(within(t), ask("helper", "Hello"))
	apiError(t, err, http.StatusBadGateway)

	cut := openAI(serve(t, setup{config: onMock(mock(t, "MOCK_ERROR_RATE=1", "MOCK_ERROR_KINDS=reset"))}))
	st := cut.Chat.Completions.NewStreaming(within(t), ask("helper", "Hello"))
	n := 0
	for st.Next() {
		n++
	}
	var broken *ssestream.StreamError
	if err := st.Err(); n == 0 || !errors.As(err, &broken) {
		t.Errorf("an answer that broke in its middle: %d chunks, then %v", n, err)
	}
}

func TestGoOverload(t *testing.T) {
	s := serve(t, setup{args: []string{"--kernel.max_in_flight_turns", "1"}})
	c := openAI(s)
	first := c.Chat.Completions.NewStreaming(within(t), ask("demo", "/words 60"))
	if !first.Next() {
		t.Fatal(first.Err())
	}
	start := time.Now()
	_, err := c.Chat.Completions.New(within(t), ask("demo", "me too"))
	e := apiError(t, err, http.StatusTooManyRequests)
	if ra := e.Response.Header.Get("Retry-After"); ra == "" || ra == "0" {
		t.Errorf("429 with Retry-After %q", ra)
	}
	if d := time.Since(start); d > 500*time.Millisecond {
		t.Errorf("the refusal took %v", d)
	}
	// The client's own retries, which honour Retry-After, get through.
	patient, err := c.Chat.Completions.New(within(t), ask("demo", "I can wait"), option.WithMaxRetries(8))
	if err != nil || !strings.Contains(patient.Choices[0].Message.Content, "I can wait") {
		t.Errorf("with retries: %v", err)
	}
	for first.Next() {
	}
	if first.Err() != nil {
		t.Errorf("the accepted turn must finish: %v", first.Err())
	}
}

func TestGoAuth(t *testing.T) {
	s := serve(t, setup{config: "auth:\n  keys:\n    - {name: one, tenant: red, key_env: KEY_ONE}\n    - {name: two, tenant: blue, key_env: KEY_TWO}\n",
		env: []string{"KEY_ONE=correct-horse-battery-1", "KEY_TWO=battery-staple-horse-2"}})
	_, err := openAI(s).Chat.Completions.New(within(t), ask("demo", "Hello"))
	if e := apiError(t, err, http.StatusUnauthorized); e.Code != "invalid_api_key" {
		t.Errorf("wrong key: %s", e.RawJSON())
	}
	red, blue := openAI(s, option.WithAPIKey("correct-horse-battery-1")), openAI(s, option.WithAPIKey("battery-staple-horse-2"))
	for _, c := range []*openai.Client{red, blue} {
		if _, err := c.Chat.Completions.New(within(t), ask("demo", "Hello"), inSession("mine")); err != nil {
			t.Fatal(err)
		}
	}
	// One tenant's session is not there for another, even by the same name.
	p := plain{url: s.url, key: "battery-staple-horse-2"}
	if n := len(p.messages(t, "mine")); n != 2 {
		t.Errorf("two tenants, one session name: %d messages, want 2", n)
	}
	p.key = ""
	p.refused(t, 401, "unauthorized", "GET", "/v1/sessions/mine", "")
	p.refused(t, 401, "unauthorized", "GET", "/v1/agents", "")
}

// TestGoSession: with the session header the server has the conversation, and
// the client sends only what is new.
func TestGoSession(t *testing.T) {
	s := serve(t, setup{})
	c, p := openAI(s), plain{url: s.url}
	var texts []string
	for _, input := range []string{"My name is Ada.", "What did I say?"} {
		var raw *http.Response
		res, err := c.Chat.Completions.New(within(t), ask("demo", input), inSession("talk"), option.WithResponseInto(&raw))
		if err != nil {
			t.Fatal(err)
		}
		if raw.Header.Get("X-Perdure-Session") != "talk" || raw.Header.Get("X-Perdure-Turn") == "" {
			t.Errorf("headers: %v", raw.Header)
		}
		texts = append(texts, res.Choices[0].Message.Content)
	}
	if !strings.Contains(texts[1], "turn 2") {
		t.Errorf("the second answer does not know of the first turn: %q", texts[1])
	}
	if got, want := roles(p.messages(t, "talk")), "user:My name is Ada.|assistant:"+texts[0]+"|user:What did I say?|assistant:"+texts[1]; got != want {
		t.Errorf("transcript %s, want %s", got, want)
	}
	// Without the header the client brings the conversation itself.
	params := ask("demo", "third")
	params.Messages = append([]openai.ChatCompletionMessageParamUnion{openai.SystemMessage("Be brief."), openai.UserMessage("first"), openai.AssistantMessage("ok")}, params.Messages...)
	res, err := c.Chat.Completions.New(within(t), params)
	if err != nil || !strings.Contains(res.Choices[0].Message.Content, "turn 2") {
		t.Errorf("a conversation brought by the client: %v %v", res, err)
	}
	var list struct{ Sessions []struct{ ID string } }
	p.do(t, 200, "GET", "/v1/sessions", "", &list)
	if len(list.Sessions) != 1 || list.Sessions[0].ID != "talk" {
		t.Errorf("a completion without a session must not be listed: %+v", list)
	}
}

// TestGoIdempotent: a completion that is sent again is the same completion, also
// without a session.
func TestGoIdempotent(t *testing.T) {
	c := openAI(serve(t, setup{}))
	var ids []string
	for _, key := range []string{"k-1", "k-1", "k-2"} {
		res, err := c.Chat.Completions.New(within(t), ask("demo", "pay the bill"), option.WithHeader("Idempotency-Key", key))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, res.ID)
	}
	if ids[0] != ids[1] || ids[0] == ids[2] {
		t.Errorf("keys k-1, k-1, k-2 gave completions %v", ids)
	}
}

// TestGoAbort: a client that hangs up mid-stream leaves a turn that goes on.
func TestGoAbort(t *testing.T) {
	s := serve(t, setup{config: onMock(mock(t, "MOCK_TOKENS=40", "MOCK_TPS=100"))})
	c, p := openAI(s), plain{url: s.url}
	ctx, cancel := context.WithCancel(within(t))
	st := c.Chat.Completions.NewStreaming(ctx, ask("helper", "Hello"), inSession("left"))
	if !st.Next() {
		t.Fatal(st.Err())
	}
	var now struct{ Status string }
	p.do(t, 200, "GET", "/v1/sessions/left", "", &now)
	if now.Status != "running" {
		t.Errorf("the first token must come while the turn runs, it is %q", now.Status)
	}
	cancel()
	for st.Next() {
	}
	if !errors.Is(st.Err(), context.Canceled) {
		t.Errorf("the client's error: %v", st.Err())
	}
	want := strings.Repeat(mockText, 5)
	eventually(t, "the whole answer in the transcript", func() bool {
		ms := p.messages(t, "left")
		return len(ms) == 2 && ms[1].text() == want && !ms[1].Partial
	})
}

func TestGoTools(t *testing.T) {
	h := newToolHost(t)
	s := serve(t, setup{config: toolConfig(mock(t, "MOCK_TOOL=*", `MOCK_TOOL_ARGS={"city":"Oslo"}`), h)})
	c, p := openAI(s), plain{url: s.url}
	res, err := c.Chat.Completions.New(within(t), ask("forecaster", "How is the weather?"), inSession("w"))
	if err != nil {
		t.Fatal(err)
	}
	if m := res.Choices[0].Message; m.Content != mockText || len(m.ToolCalls) != 0 || res.Choices[0].FinishReason != "stop" {
		t.Errorf("the server runs the tools, the client gets the answer: %s", res.RawJSON())
	}
	if u := res.Usage.CompletionTokens; u != 9 {
		t.Errorf("usage must count both model calls (1 + 8 tokens), got %d", u)
	}
	calls := h.seen("/weather")
	if len(calls) != 1 || calls[0].body != `{"city":"Oslo"}` || calls[0].key == "" {
		t.Errorf("the tool server saw %+v", calls)
	}
	ms := p.messages(t, "w")
	answered(t, ms)
	if results := toolResults(ms); len(results) != 1 || results[0].text() != `{"city":"Oslo","sky":"clear"}` {
		t.Errorf("transcript: %s", roles(ms))
	}

	// A stream of the same has the text only, and the session's log the rest.
	st := c.Chat.Completions.NewStreaming(within(t), ask("forecaster", "And now?"), inSession("w"))
	var acc openai.ChatCompletionAccumulator
	for st.Next() {
		acc.AddChunk(st.Current())
	}
	if st.Err() != nil || acc.Choices[0].Message.Content != mockText || acc.Choices[0].FinishReason != "stop" {
		t.Errorf("stream: %+v, %v", acc.ChatCompletion, st.Err())
	}
	n := 0
	log := p.follow(t, "w", "").until(t, "both turns", func(f frame) bool {
		if f.name == "turn.completed" {
			n++
		}
		return n == 2
	})
	if got, one := names(log), "turn.started message.completed tool.started tool.completed message.completed turn.completed"; got != one+" "+one {
		t.Errorf("events: %s", got)
	}
}

// TestGoToolTrouble: bad arguments and a tool that does not answer go back to
// the model as errors; the turn goes on and ends well.
func TestGoToolTrouble(t *testing.T) {
	h := newToolHost(t)
	s := serve(t, setup{config: toolConfig(mock(t, "MOCK_TOOL=*", `MOCK_TOOL_ARGS={"town":7}`), h)})
	c, p := openAI(s), plain{url: s.url}
	for _, agent := range []string{"forecaster", "waiter"} {
		if _, err := c.Chat.Completions.New(within(t), ask(agent, "Go"), inSession(agent)); err != nil {
			t.Fatalf("%s: %v", agent, err)
		}
		ms := p.messages(t, agent)
		answered(t, ms)
		if len(toolResults(ms)) != 1 {
			t.Errorf("%s: transcript %s", agent, roles(ms))
		}
	}
	if n := len(h.seen("/weather")); n != 0 {
		t.Errorf("invalid arguments reached the tool %d times", n)
	}
	if n := len(h.seen("/slow")); n == 0 {
		t.Error("the slow tool was never called")
	}
	if text := toolResults(p.messages(t, "waiter"))[0].text(); !strings.Contains(text, "150ms") {
		t.Errorf("the model must be told that the tool did not answer in time, got %q", text)
	}
	if text := toolResults(p.messages(t, "forecaster"))[0].text(); !strings.Contains(text, "city") {
		t.Errorf("the model must be told what is wrong with its arguments, got %q", text)
	}
}
