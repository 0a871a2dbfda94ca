package agent

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/wire"
)

var testPolicy = policy{maxRounds: 2, maxCalls: 3, model: &wire.RetryPolicy{MaxAttempts: 2}, tool: toolRetry}

// outline gives a result in words: events, steps and messages, in order.
func outline(r *wire.StepResult) string {
	var w []string
	for _, e := range r.Events {
		w = append(w, fmt.Sprintf("%s(%d)", e.Type, len(e.Items)))
	}
	for _, p := range r.Publish {
		w = append(w, p.Channel+"<-")
	}
	for _, s := range r.Next {
		word := "+" + s.Name
		if s.Wait != nil {
			word += fmt.Sprintf("[%d %s]", s.Wait.Count, s.Wait.Channel)
		}
		w = append(w, word)
	}
	if r.Retry != nil {
		w = append(w, "retry")
	}
	return strings.Join(w, " ")
}

func calls(ids ...string) (out []model.ToolCall) {
	for _, id := range ids {
		out = append(out, model.ToolCall{ID: id, Name: "t", Arguments: "{}"})
	}
	return out
}

func TestAnswered(t *testing.T) {
	for _, c := range []struct {
		name  string
		round int
		res   model.Result
		want  string
	}{
		{"text", 0, model.Result{Text: "hi"}, "message.completed(1) turn.completed(0) +turn[1 input]"},
		{"nothing at all", 0, model.Result{}, "message.completed(1) turn.completed(0) +turn[1 input]"},
		{"a call", 0, model.Result{ToolCalls: calls("a")}, "message.completed(1) +tool +continue[1 results]"},
		{"as many calls as are taken", 0, model.Result{ToolCalls: calls("a", "b", "c")}, "message.completed(1) +tool +tool +tool +continue[3 results]"},
		{"more calls than are taken", 0, model.Result{ToolCalls: calls("a", "b", "c", "d", "e")}, "message.completed(1) results<- results<- +tool +tool +tool +continue[5 results]"},
		{"last round", 1, model.Result{ToolCalls: calls("a")}, "message.completed(1) +tool +continue[1 results]"},
		{"one round too many", 2, model.Result{ToolCalls: calls("a", "b")}, "message.completed(3) turn.failed(0) +turn[1 input]"},
		{"text after the last round", 2, model.Result{Text: "done"}, "message.completed(1) turn.completed(0) +turn[1 input]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			res := answered(testPolicy, progress{Round: c.round}, c.res, 7)
			if got := outline(res); got != c.want {
				t.Fatalf("%s\nwant %s", got, c.want)
			}
			for _, s := range res.Next {
				if want := map[string]*wire.RetryPolicy{StepTool: testPolicy.tool}[s.Name]; s.Name == StepTool && s.Retry != want || s.Name != StepTool && s.Retry != testPolicy.model {
					t.Errorf("step %s has policy %v", s.Name, s.Retry)
				}
			}
			everyCallHasAResult(t, res)
		})
	}
}

// everyCallHasAResult checks that each call of the message gets a result: from
// a step, a published message or an item beside it.
func everyCallHasAResult(t *testing.T, res *wire.StepResult) {
	t.Helper()
	var said assistantMessage
	if err := json.Unmarshal(res.Events[0].Items[0], &said); err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	var in toolInput
	var msg toolMessage
	for _, s := range res.Next {
		if s.Name == StepTool && json.Unmarshal(s.Input, &in) == nil {
			got[in.ID]++
		}
	}
	for _, p := range res.Publish {
		if json.Unmarshal(p.Payload, &msg) == nil {
			got[msg.CallID]++
		}
	}
	for _, it := range res.Events[0].Items[1:] {
		if json.Unmarshal(it, &msg) == nil {
			got[msg.CallID]++
		}
	}
	for _, c := range said.ToolCalls {
		if got[c.ID] != 1 {
			t.Errorf("call %q gets %d results", c.ID, got[c.ID])
		}
	}
	if len(got) != len(said.ToolCalls) {
		t.Errorf("results for %v, calls %v", got, said.ToolCalls)
	}
}

func TestCallIDsAreMadeUnique(t *testing.T) {
	for _, ids := range [][]string{{""}, {"", ""}, {"a", "a"}, {"a", "", "a"}, {"call_7_1", ""}, {"call_7_1", "call_7_1", "call_7_1"}, {"call_7_2", "x", "x"}} {
		seen := map[string]bool{}
		for i, c := range wireCalls(calls(ids...), 7) {
			if c.ID == "" || seen[c.ID] {
				t.Errorf("%q: call %d is called %q", ids, i, c.ID)
			}
			seen[c.ID] = true
			if c.Type != "function" || c.Function.Name != "t" || c.Function.Arguments != "{}" {
				t.Errorf("%+v", c)
			}
		}
	}
	if got := wireCalls(calls("b", "a"), 7); got[0].ID != "b" || got[1].ID != "a" {
		t.Errorf("good IDs were changed: %+v", got)
	}
}

func TestContentIsNullOnlyBesideCalls(t *testing.T) {
	for want, res := range map[string]model.Result{
		`{"role":"assistant","content":""}`:   {},
		`{"role":"assistant","content":"hi"}`: {Text: "hi"},
		`{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"t","arguments":"{}"}}]}`:     {ToolCalls: calls("a")},
		`{"role":"assistant","content":"let me","tool_calls":[{"id":"a","type":"function","function":{"name":"t","arguments":"{}"}}]}`: {Text: "let me", ToolCalls: calls("a")},
	} {
		if got := string(answered(testPolicy, progress{}, res, 7).Events[0].Items[0]); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}

func TestUsageIsSummedOverTheRounds(t *testing.T) {
	pr := progress{StartedUs: 5}
	res := answered(testPolicy, pr, model.Result{ToolCalls: calls("a"), Usage: model.Usage{Prompt: 10, Completion: 1}}, 7)
	if err := json.Unmarshal(res.Next[len(res.Next)-1].Input, &pr); err != nil {
		t.Fatal(err)
	}
	if pr.Round != 1 || pr.StartedUs != 5 {
		t.Fatalf("%+v", pr)
	}
	res = answered(testPolicy, pr, model.Result{Text: "x", Usage: model.Usage{Prompt: 20, Completion: 2}, FinishReason: "stop"}, 9)
	if got := string(res.Events[0].Data); got != `{"finish_reason":"stop","usage":{"prompt_tokens":20,"completion_tokens":2,"total_tokens":22}}` {
		t.Errorf("message: %s", got)
	}
	if got := string(res.Events[1].Data); got != `{"model_calls":2,"usage":{"prompt_tokens":30,"completion_tokens":3,"total_tokens":33}}` {
		t.Errorf("turn: %s", got)
	}
	for _, stop := range []*wire.StepResult{cancelled(testPolicy, pr, "", "r"), failed(testPolicy, pr, "", Failure{Code: "c"})} {
		if !strings.Contains(string(stop.Events[0].Data), `"total_tokens":11`) {
			t.Errorf("usage is lost: %s", stop.Events[0].Data)
		}
	}
}

func TestStopped(t *testing.T) {
	for _, c := range []struct {
		name string
		res  *wire.StepResult
		want string
		data string
	}{
		{"cancelled", cancelled(testPolicy, progress{}, "", "why"), "turn.cancelled(0) +turn[1 input]", `"reason":"why"`},
		{"cancelled with text", cancelled(testPolicy, progress{}, "so far", "why"), "message.completed(1) turn.cancelled(0) +turn[1 input]", `"reason":"why"`},
		{"failed", failed(testPolicy, progress{}, "", Failure{"c", "m", "h"}), "turn.failed(0) +turn[1 input]", `{"code":"c","message":"m","hint":"h"}`},
		{"failed with text", failed(testPolicy, progress{}, "so far", Failure{"c", "m", ""}), "message.completed(1) turn.failed(0) +turn[1 input]", `{"code":"c","message":"m"}`},
	} {
		if got := outline(c.res); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
		}
		last := c.res.Events[len(c.res.Events)-1]
		if !strings.Contains(string(last.Data), c.data) {
			t.Errorf("%s: %s", c.name, last.Data)
		}
		if len(c.res.Events) == 2 {
			said := c.res.Events[0]
			if !strings.Contains(string(said.Data), `"partial":true`) || string(said.Items[0]) != `{"role":"assistant","content":"so far"}` {
				t.Errorf("%s: %s %s", c.name, said.Data, said.Items)
			}
		}
	}
}

func TestModelFailed(t *testing.T) {
	err := func(k model.Kind) *model.Error {
		return &model.Error{Kind: k, Code: "timeout", Message: "m", Hint: "h", RetryAfter: 3 * time.Second}
	}
	for _, c := range []struct {
		name string
		kind model.Kind
		res  model.Result
		want string
	}{
		{"may help", model.KindRetryable, model.Result{}, "turn.failed(0) +turn[1 input] retry"},
		{"shown", model.KindRetryable, model.Result{Text: "a", Shown: true}, "message.completed(1) turn.failed(0) +turn[1 input]"},
		{"will not help", model.KindPermanent, model.Result{}, "turn.failed(0) +turn[1 input]"},
	} {
		res := modelFailed(testPolicy, progress{}, c.res, err(c.kind))
		if got := outline(res); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
		}
		if f := failure(t, res.Events[len(res.Events)-1].Data); f != (Failure{"model_timeout", "m", "h"}) {
			t.Errorf("%s: %+v", c.name, f)
		}
		if res.Retry != nil && res.Retry.AfterUs != 3_000_000 {
			t.Errorf("%s: after %d µs", c.name, res.Retry.AfterUs)
		}
	}
}

func TestToolDone(t *testing.T) {
	in := toolInput{ID: "c1", Name: "look"}
	res := toolDone(in, "seen", false)
	if got := outline(res); got != "tool.completed(0) results<-" {
		t.Fatal(got)
	}
	if got := string(res.Publish[0].Payload); got != `{"role":"tool","tool_call_id":"c1","content":"seen"}` {
		t.Errorf("result: %s", got)
	}
	if got := string(res.Events[0].Data); got != `{"call_id":"c1","content":"seen","is_error":false,"name":"look"}` {
		t.Errorf("event: %s", got)
	}
	long := strings.Repeat("€", toolPreview)
	res = toolDone(in, long, true)
	var ev struct {
		Content   string
		Truncated bool
	}
	if err := json.Unmarshal(res.Events[0].Data, &ev); err != nil {
		t.Fatal(err)
	}
	if !ev.Truncated || len(ev.Content) > toolPreview || len(ev.Content) < toolPreview-3 || !strings.HasPrefix(long, ev.Content) {
		t.Errorf("preview of %d bytes, truncated %t", len(ev.Content), ev.Truncated)
	}
	if !strings.Contains(string(res.Publish[0].Payload), long) {
		t.Error("the conversation does not have the whole result")
	}
}

func FuzzCutText(f *testing.F) {
	f.Add("", 0)
	f.Add("a€b", 2)
	f.Add("short", 512)
	f.Add("\x80\x80", 1)
	f.Fuzz(func(t *testing.T, s string, n int) {
		if n < 0 {
			return
		}
		got := cutText(s, n)
		if len(got) > n || !strings.HasPrefix(s, got) || len(s) <= n && got != s {
			t.Fatalf("cutText(%q, %d) = %q", s, n, got)
		}
		if utf8.ValidString(s) && (!utf8.ValidString(got) || n < len(s) && len(got) < n-3) {
			t.Fatalf("cutText(%q, %d) = %q", s, n, got)
		}
	})
}
