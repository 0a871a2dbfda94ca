package agent

import (
	"bytes"
	"encoding/json"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// request makes the model call of a step: instructions and the newest part of
// the conversation. Messages are in their wire form already.
func request(w *partition.Work, a *Agent) (model.Request, error) {
	var items []json.RawMessage
	err := w.History(func(ev *wire.Event) error {
		for _, it := range ev.Items {
			items = append(items, it)
		}
		return nil
	})
	if err != nil {
		return model.Request{}, err
	}
	bound := a.Def.MaxContextMessages
	if bound == 0 {
		bound = DefaultContextMessages
	}
	items = newest(items, bound)
	msgs := items
	if a.system != nil {
		msgs = append([]json.RawMessage{a.system}, items...)
	}
	return model.Request{Model: a.model, Messages: msgs, Tools: a.schemas, Params: a.Def.Parameters, IdempotencyKey: w.Key()}, nil
}

// newest gives at most bound messages from the end. It begins at a user's
// message, so that no tool result is cut from its call; when the newest turn
// alone is longer, that turn is given whole.
func newest(items []json.RawMessage, bound int) []json.RawMessage {
	if len(items) <= bound {
		return items
	}
	from := len(items) - bound
	for i := from; i < len(items); i++ {
		if isUser(items[i]) {
			return items[i:]
		}
	}
	for i := from; i > 0; i-- {
		if isUser(items[i]) {
			return items[i:]
		}
	}
	return items
}

// isUser relies on the form in which sessions write messages: role first.
func isUser(item json.RawMessage) bool { return bytes.HasPrefix(item, []byte(`{"role":"user"`)) }
