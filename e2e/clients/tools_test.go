//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// toolHost is a tool server of someone's own: it answers /weather and never
// answers /slow.
type toolHost struct {
	url string

	mu    sync.Mutex
	calls []toolCall // guarded by mu
}

type toolCall struct {
	path, body, key, secret string
}

func newToolHost(t *testing.T) *toolHost {
	t.Helper()
	h := &toolHost{}
	release := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) // a broken request is seen by what is missing
		first := len(h.seen(r.URL.Path)) == 0
		h.mu.Lock()
		h.calls = append(h.calls, toolCall{r.URL.Path, string(b), r.Header.Get("Idempotency-Key"), r.Header.Get("X-Tool-Secret")})
		h.mu.Unlock()
		switch path := r.URL.Path; {
		case path == "/slow" || path == "/hold" && first:
			select {
			case <-release:
			case <-r.Context().Done():
			}
		case path == "/echo-secret":
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, "no access with %s", r.Header.Get("X-Tool-Secret"))
		default:
			var in struct{ City string }
			_ = json.Unmarshal(b, &in) // an empty city is an answer too
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"city":%q,"sky":"clear"}`, in.City)
		}
	}))
	t.Cleanup(func() { close(release); srv.Close() })
	h.url = srv.URL
	return h
}

// seen gives the calls of a path.
func (h *toolHost) seen(path string) []toolCall {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []toolCall
	for _, c := range h.calls {
		if c.path == path {
			out = append(out, c)
		}
	}
	return out
}

// toolConfig is agents that may use the tools of a host, on a mock model.
func toolConfig(model string, h *toolHost) string {
	return `
providers:
  mock: {type: openai, base_url: "` + model + `/v1", model: mock-model}
  demo: {type: demo}
tools:
  weather:
    description: "The weather of a city"
    parameters: {type: object, properties: {city: {type: string}}, required: [city], additionalProperties: false}
    http: {url: "` + h.url + `/weather", allow_private: true, timeout: 5s}
  slow:
    description: "Takes for ever"
    parameters: {type: object}
    http: {url: "` + h.url + `/slow", allow_private: true, timeout: 150ms}
  hold:
    description: "Hangs at first"
    parameters: {type: object}
    http: {url: "` + h.url + `/hold", allow_private: true, timeout: 30s}
agents:
  holder: {provider: mock, tools: [hold]}
  forecaster: {provider: mock, tools: [weather]}
  waiter: {provider: mock, tools: [slow]}
`
}

// toolResults gives the results of tools in a transcript.
func toolResults(ms []message) []message {
	var out []message
	for _, m := range ms {
		if m.Message.Role == "tool" {
			out = append(out, m)
		}
	}
	return out
}

// answered fails unless each call of a transcript has one result, right behind
// it: providers refuse a conversation in which one is missing.
func answered(t *testing.T, ms []message) {
	t.Helper()
	open := map[string]bool{}
	for _, m := range ms {
		switch m.Message.Role {
		case "tool":
			if !open[m.Message.CallID] {
				t.Errorf("a result without a call, or a second one: %+v", m.Message)
			}
			delete(open, m.Message.CallID)
		default:
			if len(open) > 0 {
				t.Errorf("calls %v have no result before the next message", open)
			}
			for _, c := range m.Message.ToolCalls {
				open[c.ID] = true
			}
		}
	}
	if len(open) > 0 {
		t.Errorf("calls %v have no result", open)
	}
}
