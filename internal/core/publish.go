package core

import (
	"slices"
	"sort"
	"strconv"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Events of channels.
const (
	EventPublished = "channel.published" // a message waits; its payload is the data
	EventDropped   = "channel.dropped"   // a waiting message was taken away; the data says why
)

// ReasonSuperseded is why an interrupting message stops the work before it.
const ReasonSuperseded = "superseded"

func checkPublish(c *wire.Publish) error {
	if err := checkName("channel name", c.Channel); err != nil {
		return err
	}
	switch {
	case c.OnBusy < wire.Publish_ENQUEUE || c.OnBusy > wire.Publish_INTERRUPT:
		return refuse(Invalid, "on_busy has the unknown value %d", c.OnBusy)
	case len(c.Payload) > MaxPayload:
		return refuse(LimitReached, "payload has %d bytes, at most %d", len(c.Payload), MaxPayload)
	case c.Blob != "" && len(c.Payload) > 0:
		return refuse(Invalid, "message for channel %q has a payload and a blob", c.Channel)
	case len(c.Blob) > MaxName:
		return refuse(LimitReached, "name of the blob of a message has more than %d bytes", MaxName)
	case len(c.RequestId) > MaxRequestID:
		return refuse(LimitReached, "request ID has more than %d bytes", MaxRequestID)
	}
	return nil
}

// applyPublish appends a message to a channel. The step that waits for it
// starts in the same entry.
func (t *tx) applyPublish(c *wire.Publish) error {
	if err := checkPublish(c); err != nil {
		return err
	}
	r := seenMessage(t.f, c.RequestId)
	if err := t.mustRun(""); err != nil && r == nil {
		return err
	}
	if r == nil && seenRequest(t.f, c.RequestId) != nil {
		return refuse(KeyReused, "request ID %q came with a call before", c.RequestId)
	}
	if r != nil {
		if r.PayloadHash != 0 && r.PayloadHash != payloadHash(c) {
			return refuse(KeyReused, "request ID %q came with another payload before", c.RequestId)
		}
		t.reply = Reply{MessageIDs: []string{r.MessageId}, Duplicate: true, RunID: t.f.RunId}
		return nil
	}
	busy := IsBusy(t.f)
	if busy && c.OnBusy == wire.Publish_REJECT {
		return refuse(Busy, "flow %q is running a turn", t.f.Id)
	}
	interrupt := busy && c.OnBusy == wire.Publish_INTERRUPT
	if pending := pendingCount(t.f, c.Channel); !interrupt && pending >= pendingBound(c) {
		return refuse(QueueFull, "%d messages wait already", pending)
	}
	if channelOf(t.f, c.Channel) == nil && len(t.f.Channels) >= MaxChannels {
		return refuse(LimitReached, "flow has %d channels, at most %d", len(t.f.Channels), MaxChannels)
	}
	if interrupt {
		t.dropPending(c.Channel, "", ReasonSuperseded)
		t.cancelSteps("", ReasonSuperseded)
		t.wakeCancelled()
	}
	t.publish(c, false)
	t.reply.RunID = t.f.RunId
	return nil
}

func pendingBound(c *wire.Publish) int {
	if c.MaxPending > 0 && c.MaxPending < MaxPending {
		return int(c.MaxPending)
	}
	return MaxPending
}

// checkRoom says whether the channels can hold the messages of one entry.
func checkRoom(f *wire.Flow, ps []*wire.Publish) error {
	add := make(map[string]int, len(ps))
	channels := len(f.Channels)
	for _, p := range ps {
		if err := checkPublish(p); err != nil {
			return err
		}
		if add[p.Channel]++; add[p.Channel] == 1 && channelOf(f, p.Channel) == nil {
			channels++
		}
		if n := pendingCount(f, p.Channel) + add[p.Channel]; n > MaxPending {
			return refuse(QueueFull, "channel %q would hold %d messages, at most %d", p.Channel, n, MaxPending)
		}
	}
	if channels > MaxChannels {
		return refuse(LimitReached, "flow would have %d channels, at most %d", channels, MaxChannels)
	}
	return nil
}

// publish appends c's message and matches waiting steps; quiet leaves a waiting
// message out of the log. A request ID that was seen before adds nothing. It
// does not check, and the busy policy is the caller's: what a flow publishes to
// itself is always enqueued.
func (t *tx) publish(c *wire.Publish, quiet bool) {
	if r := seenMessage(t.f, c.RequestId); r != nil {
		t.reply.MessageIDs = append(t.reply.MessageIDs, r.MessageId)
		return
	}
	prefix := "turn_"
	if t.f.Closes {
		prefix = "msg_"
	}
	m := &wire.Message{Id: t.mintID(prefix), Payload: c.Payload, AtUs: t.e.TimeUs, Blob: c.Blob, Size: c.Size}
	ch := channelOf(t.f, c.Channel)
	if ch == nil {
		ch = &wire.Channel{Name: c.Channel}
		i := sort.Search(len(t.f.Channels), func(i int) bool { return t.f.Channels[i].Name >= c.Channel })
		t.f.Channels = append(t.f.Channels, nil)
		copy(t.f.Channels[i+1:], t.f.Channels[i:])
		t.f.Channels[i] = ch
	}
	ch.Pending = append(ch.Pending, m)
	t.changed = true
	t.remember(&wire.Request{RequestId: c.RequestId, MessageId: m.Id, PayloadHash: payloadHash(c)})
	t.match(c.Channel)
	started := !isPending(t.f, c.Channel, m.Id)
	if !started && !quiet {
		t.event(&wire.Event{Type: EventPublished, Scope: m.Id, Data: c.Payload, DataBlob: c.Blob, Channel: t.channelName(c.Channel)})
	}
	t.reply.MessageIDs = append(t.reply.MessageIDs, m.Id)
	t.reply.Started = started
}

// dropPending takes waiting messages away: all, or the one with the ID.
func (t *tx) dropPending(channel, id, reason string) int {
	ch := channelOf(t.f, channel)
	if ch == nil {
		return 0
	}
	var keep []*wire.Message
	dropped := 0
	for _, m := range ch.Pending {
		if id != "" && m.Id != id {
			keep = append(keep, m)
			continue
		}
		dropped++
		t.event(&wire.Event{Type: EventDropped, Scope: m.Id, Data: []byte(reason), Channel: t.channelName(channel)})
	}
	if ch.Pending = keep; len(keep) == 0 {
		removeChannel(t.f, channel)
	}
	return dropped
}

// remember keeps an idempotency key; an empty one is none.
func (t *tx) remember(r *wire.Request) {
	if r.RequestId == "" {
		return
	}
	r.Seq, r.Lsn = t.f.NextRequest, t.e.Lsn
	t.f.NextRequest++
	if len(t.f.Requests) < MaxRequests {
		t.f.Requests = append(t.f.Requests, r)
		return
	}
	copy(t.f.Requests, t.f.Requests[1:])
	t.f.Requests[MaxRequests-1] = r
}

// applyDropMessages takes waiting messages away.
func (t *tx) applyDropMessages(c *wire.DropMessages) error {
	if err := checkName("channel name", c.Channel); err != nil {
		return err
	}
	if len(c.Ids) > MaxPending {
		return refuse(LimitReached, "%d messages named, at most %d", len(c.Ids), MaxPending)
	}
	n := 0
	if len(c.Ids) == 0 {
		n = t.dropPending(c.Channel, "", "dropped")
	}
	for _, id := range c.Ids {
		if id != "" {
			n += t.dropPending(c.Channel, id, "dropped")
		}
	}
	t.reply = Reply{RunID: t.f.RunId, Cancelled: n}
	return nil
}

// channelName is what the log says of a channel: sessions have one that matters.
func (t *tx) channelName(name string) string {
	if t.f.Closes {
		return name
	}
	return ""
}

func channelOf(f *wire.Flow, name string) *wire.Channel {
	for _, c := range f.Channels {
		if c.Name == name {
			return c
		}
	}
	return nil
}

func removeChannel(f *wire.Flow, name string) {
	for i, c := range f.Channels {
		if c.Name == name {
			f.Channels = slices.Delete(f.Channels, i, i+1)
			return
		}
	}
}

func pendingCount(f *wire.Flow, channel string) int {
	if c := channelOf(f, channel); c != nil {
		return len(c.Pending)
	}
	return 0
}

func isPending(f *wire.Flow, channel, id string) bool {
	c := channelOf(f, channel)
	if c == nil {
		return false
	}
	for _, m := range c.Pending {
		if m.Id == id {
			return true
		}
	}
	return false
}

func seenRequest(f *wire.Flow, id string) *wire.Request {
	return seen(f, id, func(*wire.Request) bool { return true })
}

// seenUpdate gives what an Update left that came with the request ID.
func seenUpdate(f *wire.Flow, id string) *wire.Request {
	return seen(f, id, func(r *wire.Request) bool { return r.MessageId == "" })
}

// seenMessage gives the message that came with the request ID; that of an Update
// is not one.
func seenMessage(f *wire.Flow, id string) *wire.Request {
	return seen(f, id, func(r *wire.Request) bool { return r.MessageId != "" })
}

func seen(f *wire.Flow, id string, is func(*wire.Request) bool) *wire.Request {
	if id == "" {
		return nil
	}
	last := len(id) - 1
	for _, r := range f.Requests {
		// Keys of one client often differ at their end only.
		if have := r.RequestId; len(have) == len(id) && have[last] == id[last] && have == id && is(r) {
			return r
		}
	}
	return nil
}

// payloadHash tells a repeated request from another one under the same ID. Of a
// payload in a blob only the size is compared: who repeats the request may have
// stored it again, under another name.
func payloadHash(c *wire.Publish) uint64 {
	p := c.Payload
	if c.Blob != "" {
		p = strconv.AppendUint([]byte("blob "), c.Size, 10)
	}
	return max(xxhash.Sum64(p), 1)
}
