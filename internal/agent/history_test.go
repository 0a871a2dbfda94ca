package agent

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// conversationOf makes the items of turns, each given by its rounds of calls;
// -1 is a turn without an answer (cancelled before it spoke).
func conversationOf(turns ...[]int) (items []json.RawMessage) {
	n := 0
	for _, rounds := range turns {
		items = append(items, json.RawMessage(userMessage(fmt.Sprint("turn ", len(items)))))
		answered := true
		for _, calls := range rounds {
			if calls < 0 {
				answered = false
				break
			}
			m := assistantMessage{Role: "assistant"}
			for range calls {
				n++
				m.ToolCalls = append(m.ToolCalls, toolCall{ID: fmt.Sprint("c", n), Type: "function"})
			}
			items = append(items, encode(m))
			for _, c := range m.ToolCalls {
				items = append(items, encode(toolMessage{"tool", c.ID, "result"}))
			}
		}
		if text := "answer"; answered {
			items = append(items, encode(assistantMessage{Role: "assistant", Content: &text}))
		}
	}
	return items
}

// checkPaired says what is wrong with the calls and results of messages.
func checkPaired(items []json.RawMessage) error {
	open := map[string]bool{}
	for i, it := range items {
		var m struct {
			Role      string
			ToolCalls []toolCall `json:"tool_calls"`
			CallID    string     `json:"tool_call_id"`
		}
		if err := json.Unmarshal(it, &m); err != nil {
			return err
		}
		switch {
		case m.Role == "tool" && !open[m.CallID]:
			return fmt.Errorf("message %d is the result of %s, whose call is not there", i, m.CallID)
		case m.Role == "tool":
			delete(open, m.CallID)
		case len(open) > 0:
			return fmt.Errorf("message %d comes before the results of %v", i, open)
		}
		for _, c := range m.ToolCalls {
			open[c.ID] = true
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("no results of %v", open)
	}
	return nil
}

func TestNewest(t *testing.T) {
	items := conversationOf([]int{2}, nil, []int{1, 1}) // 5 + 2 + 6 messages
	for _, c := range []struct{ bound, want int }{
		{100, 13}, {13, 13}, {12, 8}, {8, 8}, {7, 6}, {6, 6}, {5, 6}, {1, 6},
	} {
		got := newest(items, c.bound)
		if len(got) != c.want {
			t.Errorf("bound %d: %d messages, want %d", c.bound, len(got), c.want)
		}
	}
	for _, none := range [][]json.RawMessage{nil, {json.RawMessage(`{"role":"assistant","content":"x"}`), json.RawMessage(`{"role":"assistant","content":"y"}`)}} {
		if got := newest(none, 1); len(got) != len(none) {
			t.Errorf("without a user's message: %d of %d", len(got), len(none))
		}
	}
}

// Whatever the conversation and the bound, no result is cut from its call, the
// newest message is there, and the bound holds unless one turn is longer.
func TestNewestNeverSplitsACallFromItsResult(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var turns [][]int
		for range 1 + rnd.IntN(6) {
			var rounds []int
			for range rnd.IntN(4) {
				rounds = append(rounds, rnd.IntN(5)-1)
			}
			turns = append(turns, rounds)
		}
		items := conversationOf(turns...)
		if err := checkPaired(items); err != nil {
			t.Fatalf("the test's own conversation: %v", err)
		}
		bound := 1 + rnd.IntN(len(items)+2)
		got := newest(items, bound)
		if err := checkPaired(got); err != nil {
			t.Fatalf("turns %v, bound %d: %v", turns, bound, err)
		}
		if string(got[len(got)-1]) != string(items[len(items)-1]) || !isUser(got[0]) {
			t.Fatalf("turns %v, bound %d: from %s", turns, bound, got[0])
		}
		users := 0
		for _, it := range got {
			if isUser(it) {
				users++
			}
		}
		if len(got) > bound && users > 1 {
			t.Fatalf("turns %v, bound %d: %d messages of %d turns", turns, bound, len(got), users)
		}
	}
}

func TestCompiledAgent(t *testing.T) {
	w := newWorld(t, nil, nil)
	a, err := w.registry.Compile(Definition{Name: "b", Provider: "p", Model: "own", Instructions: "say \"hi\"\n", MaxContextMessages: 2,
		Parameters: json.RawMessage(`{"temperature":0}`)}, true)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(a.system); got != `{"content":"say \"hi\"\n","role":"system"}` {
		t.Errorf("system message %s", got)
	}
	if a.model != "own" || !strings.Contains(string(a.Def.Parameters), "temperature") {
		t.Errorf("%+v", a)
	}
}
