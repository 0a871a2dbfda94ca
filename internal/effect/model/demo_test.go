package model

import (
	"context"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

const demoTools = `[
	{"type":"function","function":{"name":"weather","parameters":{"type":"object","required":["city","days"],
		"properties":{"city":{"type":"string"},"days":{"type":"integer"},"unit":{"type":"string"}}}}},
	{"type":"function","function":{"name":"tool","parameters":{"required":["mode"],"properties":{"mode":{"enum":["fast"]}}}}}]`

func demoRequest(tools string, messages ...string) Request {
	r := Request{Model: "demo", Tools: json.RawMessage(tools)}
	for _, m := range messages {
		r.Messages = append(r.Messages, json.RawMessage(m))
	}
	return r
}

func userMessage(text string) string {
	b, _ := json.Marshal(map[string]string{"role": "user", "content": text})
	return string(b)
}

func TestDemoAnswers(t *testing.T) {
	d := NewDemo(env.SystemClock{}, 0)
	for _, c := range []struct {
		name  string
		req   Request
		text  string // contained
		calls []ToolCall
	}{
		{"echo", demoRequest("", userMessage("before"), userMessage("hello my world")), `This is turn 2. You wrote 3 words: "hello my world".`, nil},
		{"echo names tools", demoRequest(demoTools, userMessage("hi")), "I can call tools (weather, tool)", nil},
		{"words", demoRequest("", userMessage("/words 3")), "1 2 3", nil},
		{"command", demoRequest(demoTools, userMessage("/tool weather {\"city\":\"Bern\"}\nand\n/tool tool\n/tool tool {x")), "",
			[]ToolCall{{"call_1_0", "weather", `{"city":"Bern"}`}, {"call_1_1", "tool", "{}"}, {"call_1_2", "tool", "{x"}}},
		{"unknown tool", demoRequest(demoTools, userMessage("/tool rain {}")), `no tool named "rain". I have: weather, tool.`, nil},
		{"use", demoRequest(demoTools, userMessage("Please use the weather, for 3 days.")), "",
			[]ToolCall{{"call_1_0", "weather", `{"city":"Please use the weather, for 3 days.","days":3}`}}},
		{"use with arguments", demoRequest(demoTools, userMessage(`use tool {"mode": "slow"} now`)), "",
			[]ToolCall{{"call_1_0", "tool", `{"mode": "slow"}`}}},
		{"enum", demoRequest(demoTools, userMessage("use tool")), "", []ToolCall{{"call_1_0", "tool", `{"mode":"fast"}`}}},
		{"results", demoRequest(demoTools, userMessage("use both"),
			`{"role":"assistant","content":null,"tool_calls":[{"id":"a","function":{"name":"weather","arguments":"{}"}},{"id":"b","function":{"name":"tool","arguments":"{}"}}]}`,
			`{"role":"tool","tool_call_id":"a","content":"sunny"}`, `{"role":"tool","tool_call_id":"b","content":[{"type":"text","text":"done"}]}`),
			"The tool weather answered: sunny\nThe tool tool answered: done", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var rec recorder
			res, err := d.Generate(context.Background(), c.req, &rec)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(res.Text, c.text) || c.text == "" && res.Text != "" || rec.all() != res.Text || res.Shown != (res.Text != "") {
				t.Errorf("text %q, sink %q", res.Text, rec.all())
			}
			if !reflect.DeepEqual(res.ToolCalls, c.calls) || (res.FinishReason == "tool_calls") != (len(c.calls) > 0) {
				t.Errorf("calls %+v, finish %q", res.ToolCalls, res.FinishReason)
			}
			if res.Usage.Prompt == 0 || res.Usage.Completion == 0 {
				t.Errorf("usage %+v", res.Usage)
			}
			again, _ := d.Generate(context.Background(), c.req, nil)
			again.Shown = res.Shown
			if !reflect.DeepEqual(again, res) {
				t.Errorf("not deterministic: %+v, %+v", res, again)
			}
		})
	}
	for _, bad := range []Request{{}, demoRequest("", `{`), demoRequest("{", userMessage("x"))} {
		_, err := d.Generate(context.Background(), bad, nil)
		wantError(t, err, KindPermanent, CodeInvalidRequest)
	}
}

func TestDemoPaceAndCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := NewDemo(env.SystemClock{}, DemoDelay)
		start := time.Now()
		res, err := d.Generate(context.Background(), demoRequest("", userMessage("/words 10")), nil)
		if took := time.Since(start); err != nil || took != 10*DemoDelay || res.Usage.Completion != 10 {
			t.Errorf("%v, %v after %v", res, err, took)
		}

		ctx, cancel := context.WithTimeout(context.Background(), 3*DemoDelay+DemoDelay/2)
		defer cancel()
		start = time.Now()
		res, err = d.Generate(ctx, demoRequest("", userMessage("/words 10")), &recorder{})
		wantError(t, err, KindCancelled, CodeCancelled)
		if took := time.Since(start); res.Text != "1 2 3" || !res.Shown || took != 3*DemoDelay+DemoDelay/2 {
			t.Errorf("%+v after %v", res, took)
		}
	})
}

func FuzzDemo(f *testing.F) {
	f.Add(userMessage("use weather"), demoTools)
	f.Add(userMessage("/tool weather {}\n/words 3"), demoTools)
	f.Add(`{"role":"tool","tool_call_id":"x","content":"y"}`, "[]")
	d := NewDemo(env.SystemClock{}, 0)
	f.Fuzz(func(t *testing.T, message, tools string) {
		var rec recorder
		res, err := d.Generate(context.Background(), demoRequest(tools, message), &rec)
		if rec.all() != res.Text || err == nil && res.Text == "" && len(res.ToolCalls) == 0 && message != "" {
			t.Fatalf("%+v, %v, sink %q", res, err, rec.all())
		}
	})
}
