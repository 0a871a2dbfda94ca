package oracle

import (
	"encoding/json"
	"fmt"
	"slices"
)

// conversation follows the items of a session, in the form of OpenAI's chat
// messages: after an assistant's message with tool calls come exactly the
// results of these calls, in any order, before anything else. Providers refuse
// a conversation that breaks this, for ever.
type conversation struct {
	open []string // calls without a result
}

type item struct {
	Role      string `json:"role"`
	CallID    string `json:"tool_call_id"`
	ToolCalls []struct {
		ID string `json:"id"`
	} `json:"tool_calls"`
}

// add says what is wrong with the next item, or "".
func (c *conversation) add(raw []byte) string {
	var it item
	if err := json.Unmarshal(raw, &it); err != nil || it.Role == "" {
		return fmt.Sprintf("item %.80q is no chat message", raw)
	}
	if it.Role == "tool" {
		i := slices.Index(c.open, it.CallID)
		if i < 0 {
			return fmt.Sprintf("result of call %q, which is not open", it.CallID)
		}
		c.open = slices.Delete(c.open, i, i+1)
		return ""
	}
	wrong := c.rest()
	c.open = nil
	for _, call := range it.ToolCalls {
		switch {
		case it.Role != "assistant" || call.ID == "":
			return fmt.Sprintf("a %s's tool call has the ID %q", it.Role, call.ID)
		case slices.Contains(c.open, call.ID):
			return fmt.Sprintf("call %q is there twice", call.ID)
		}
		c.open = append(c.open, call.ID)
	}
	return wrong
}

// rest says what is missing before anything else may come, or "".
func (c *conversation) rest() string {
	if len(c.open) > 0 {
		return fmt.Sprintf("calls %q have no result", c.open)
	}
	return ""
}
