package flow

import (
	"fmt"
	"reflect"
	"strconv"

	"github.com/perdure-dev/perdure/internal/wire"
)

// MaxMessages bounds the messages that wait in one channel, and so what a
// condition can ask for.
const MaxMessages = 1000

// AnyChannel is a Channel, whatever its messages are.
type AnyChannel interface{ channelName() string }

// Channel is a typed durable FIFO of a flow. Messages wait in it until a step's
// condition takes them; each is taken once. Declare it once, as a package
// variable, and make it a part of each flow that has it.
type Channel[T any] struct {
	name string
	base string // the declared name: name, or "base/*" of a map
	err  error
}

// NewChannel declares a channel.
func NewChannel[T any](name string) Channel[T] {
	return Channel[T]{name: name, base: name, err: checkName("channel", name)}
}

// Name is the stored name.
func (c Channel[T]) Name() string { return c.name }

func (c Channel[T]) channelName() string { return c.name }

// ForOne holds when there is a message, and takes it.
func (c Channel[T]) ForOne() Condition { return c.Between(1, 1) }

// ForN holds when there are n messages, and takes these.
func (c Channel[T]) ForN(n int) Condition { return c.Between(n, n) }

// AtLeast holds when there are n messages, and takes all that are there.
func (c Channel[T]) AtLeast(n int) Condition { return c.Between(n, MaxMessages) }

// AtMost holds when there is a message, and takes up to n.
func (c Channel[T]) AtMost(n int) Condition { return c.Between(1, n) }

// Between holds when there are least messages, and takes up to most.
func (c Channel[T]) Between(least, most int) Condition {
	cond := Condition{err: c.err, c: &wire.Condition{Name: c.name, On: &wire.Condition_Channel{
		Channel: &wire.OnChannel{Name: c.name, AtLeast: uint32(least), AtMost: uint32(most)}}}}
	if cond.err == nil && (least < 1 || most < least || most > MaxMessages) {
		cond.err = fmt.Errorf("flow: a wait for %d to %d messages of channel %q, must be within 1 to %d", least, most, c.name, MaxMessages)
	}
	return cond
}

// Messages gives what the step's wait took from this channel, in order; none
// when its condition did not hold.
func (c Channel[T]) Messages(ctx *Context) ([]T, error) {
	var out []T
	err := ctx.messages(c.name, func(b []byte) error {
		v, err := Decode[T](b)
		if err != nil {
			return fmt.Errorf("a message of channel %q: %w", c.name, err)
		}
		out = append(out, v)
		return nil
	})
	return out, err
}

// Message gives the first of what the step's wait took from this channel; ok is
// false when its condition did not hold.
func (c Channel[T]) Message(ctx *Context) (v T, ok bool, err error) {
	all, err := c.Messages(ctx)
	if err != nil || len(all) == 0 {
		return v, false, err
	}
	return all[0], true, nil
}

// Publish appends a message to the flow's own channel, with the handler's
// commit. A value that cannot be stored makes the handler fail, whatever it
// returns.
func (c Channel[T]) Publish(ctx Writer, v T) {
	w := ctx.writing()
	if err := w.flow.checkChannel(c.name); err != nil {
		w.w.fail(err)
		return
	}
	if p := c.message(w, v); p != nil {
		w.w.publish = append(w.w.publish, p)
	}
}

// PublishTo appends a message to the channel of another flow, after the
// handler's commit, once. It is not an error if that flow is not there or has
// ended: the message is dropped then.
func (c Channel[T]) PublishTo(ctx Writer, flowID string, v T) {
	w := ctx.writing()
	if p := c.message(w, v); p != nil {
		w.send(&wire.Send{FlowId: flowID, Command: &wire.Send_Publish{Publish: p}})
	}
}

func (c Channel[T]) message(w *handling, v T) *wire.Publish {
	if c.err != nil {
		w.w.fail(c.err)
		return nil
	}
	b, err := Encode(v)
	if err != nil {
		w.w.fail(fmt.Errorf("a message of channel %q: %w", c.name, err))
		return nil
	}
	if len(b) > MaxValue {
		w.w.fail(&SizeError{What: fmt.Sprintf("a message of channel %q", c.name), Bytes: uint64(len(b)), Most: MaxValue})
		return nil
	}
	return &wire.Publish{Channel: c.name, Payload: b}
}

func (c Channel[T]) addTo(f *Flow) error {
	if c.err != nil {
		return c.err
	}
	if c.base != c.name {
		return fmt.Errorf("channel %q is one of a map: the map is the part", c.name)
	}
	return f.addChannel(c.name)
}

func (f *Flow) addChannel(name string) error {
	if f.channels[name] {
		return fmt.Errorf("two channels have the name %q", name)
	}
	f.channels[name] = true
	f.typ.Channels = append(f.typ.Channels, name)
	return nil
}

// ChannelMap is channels of one type under keys. They are stored as "name/key",
// each on its own.
type ChannelMap[K Key, T any] struct{ of Channel[T] }

// NewChannelMap declares a map of channels.
func NewChannelMap[K Key, T any](name string) ChannelMap[K, T] {
	return ChannelMap[K, T]{Channel[T]{name: name, base: name + "/*", err: checkName("channel map", name)}}
}

// At gives the channel of a key, see AttributeMap.At.
func (m ChannelMap[K, T]) At(key K) Channel[T] {
	c := m.of
	c.name += "/" + keyText(key)
	if c.err == nil {
		c.err = checkKey("channel", c.name)
	}
	return c
}

func (m ChannelMap[K, T]) addTo(f *Flow) error {
	if m.of.err != nil {
		return m.of.err
	}
	return f.addChannel(m.of.base)
}

// checkChannel says whether the flow declares a channel.
func (f *Flow) checkChannel(name string) error {
	if f.channels[name] || f.channels[mapName(name)] || f.external {
		return nil
	}
	return &UnknownNameError{Flow: f.name, Kind: "channel", Name: name}
}

// mapName gives the declared name of a map's member: "a/b" is one of "a/*".
func mapName(name string) string {
	for i := range len(name) {
		if name[i] == '/' {
			return name[:i+1] + "*"
		}
	}
	return ""
}

// parseKey reads what keyText wrote.
func parseKey[K Key](text string) (K, bool) {
	var k K
	v := reflect.ValueOf(&k).Elem()
	switch {
	case v.Kind() == reflect.String:
		v.SetString(text)
	case v.CanInt():
		n, err := strconv.ParseInt(text, 10, v.Type().Bits())
		if err != nil {
			return k, false
		}
		v.SetInt(n)
	default:
		n, err := strconv.ParseUint(text, 10, v.Type().Bits())
		if err != nil {
			return k, false
		}
		v.SetUint(n)
	}
	return k, true
}
