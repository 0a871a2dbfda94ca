package flows

import (
	"context"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/wire"
)

// messages gives a command for each payload; their sizes are not known yet.
func messages(req *wire.PublishRequest) []*wire.Publish {
	out := make([]*wire.Publish, len(req.Payloads))
	for i, p := range req.Payloads {
		out[i] = &wire.Publish{Channel: req.Channel, Payload: p, MaxPending: req.MaxPending, RequestId: req.RequestId}
		if len(req.Blobs) > 0 {
			out[i].Blob = req.Blobs[i]
		}
		if req.RequestId != "" && len(req.Payloads) > 1 {
			out[i].RequestId += "#" + strconv.Itoa(i+1)
		}
	}
	return out
}

func checkMessages(req *wire.PublishRequest) error {
	if n := len(req.Payloads); n == 0 || n > MaxPublish {
		return refuse(Invalid, "a publish has 1 to %d payloads, not %d", MaxPublish, n)
	}
	if n := len(req.Blobs); n > 0 && n != len(req.Payloads) {
		return refuse(Invalid, "a publish names %d blobs beside %d payloads: as many, or none", n, len(req.Payloads))
	}
	if n := len(req.RequestId); n > 0 && len(req.Payloads) > 1 && n > core.MaxRequestID-len("#1000") {
		return refuse(Invalid, "the request ID of several payloads has %d bytes, at most %d", n, core.MaxRequestID-len("#1000"))
	}
	return checkRequestID(req.RequestId)
}

// publish appends messages to a channel. Each is a command of its own: of
// several, those before the one that is refused stay, which the error says.
func (c *call) publish(req *wire.PublishRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil {
		err = checkName("channel name", req.Channel)
	}
	if err == nil {
		err = checkMessages(req)
	}
	if err != nil {
		c.fail(err)
		return
	}
	ps := messages(req)
	for _, p := range ps {
		if err := c.s.payload(p); err != nil {
			c.fail(err)
			return
		}
	}
	refs := blobsOfPublishes(nil, ps)
	if len(refs) == 0 {
		c.publishTo(flowID, ps)
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		if err := c.s.verifyNamed(ctx, flowID, refs); err != nil {
			return nil, err
		}
		c.publishTo(flowID, ps)
		return nil, nil
	})
}

func (c *call) publishTo(flowID string, ps []*wire.Publish) {
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		if err := c.s.declared(c.tenant, f.Type).channel(ps[0].Channel); err != nil {
			return nil, err
		}
		return nil, c.publishAll(flowID, ps)
	})
}

func (c *call) publishAll(flowID string, ps []*wire.Publish) error {
	if len(ps) == 1 {
		e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_Publish{Publish: ps[0]}}
		return c.submit(e, func(rep core.Reply) *wire.Answer { return published(rep.MessageIDs, rep.Duplicate) })
	}
	b := &burst{c: c, ids: make([]string, 0, len(ps)), duplicate: true}
	b.left.Store(int32(len(ps)))
	r := c.s.cfg.Set.For(flowID)
	for i, p := range ps {
		e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_Publish{Publish: p}}
		if err := r.Submit(partition.Proposal{Entry: e, Reply: b.reply}); err != nil {
			if i == 0 {
				return err
			}
			b.unsent(err, len(ps)-i)
			break
		}
	}
	return nil
}

// burst gathers the outcomes of several messages of one call. Its replies come
// in order on one goroutine; so does unsent, which is called there too.
type burst struct {
	c         *call
	left      atomic.Int32
	ids       []string
	duplicate bool
	err       error // the first one
}

func (b *burst) reply(rep core.Reply, err error) {
	switch {
	case err == nil:
		b.ids = append(b.ids, rep.MessageIDs...)
		b.duplicate = b.duplicate && rep.Duplicate
	case b.err == nil:
		b.err = err
	}
	b.over(1)
}

func (b *burst) unsent(err error, n int) {
	if b.err == nil {
		b.err = err
	}
	b.over(n)
}

func (b *burst) over(n int) {
	if b.left.Add(-int32(n)) > 0 {
		return
	}
	if b.err != nil {
		e := b.c.wire(b.err)
		if len(b.ids) > 0 {
			e.Message = "only " + strconv.Itoa(len(b.ids)) + " of " + strconv.Itoa(cap(b.ids)) + " messages were published: " + e.Message
		}
		b.c.answer(&wire.Answer{Error: e})
		return
	}
	b.c.answer(published(b.ids, b.duplicate))
}

func published(ids []string, duplicate bool) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_Publish{Publish: &wire.PublishReply{MessageIds: ids, Duplicate: duplicate}}}
}

// channelVerb checks what list and drop have in common.
func (c *call) channelVerb(id, channel string) (string, error) {
	flowID, err := c.flow(id)
	if err != nil {
		return "", err
	}
	return flowID, checkName("channel name", channel)
}

func (c *call) listMessages(req *wire.ListMessagesRequest) {
	flowID, err := c.channelVerb(req.FlowId, req.Channel)
	if err != nil {
		c.fail(err)
		return
	}
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		if err := c.s.declared(c.tenant, f.Type).channel(req.Channel); err != nil {
			return nil, err
		}
		rep := &wire.MessagesReply{}
		for _, ch := range f.Channels {
			if ch.Name == req.Channel {
				rep.Messages = slices.Clone(ch.Pending)
			}
		}
		return &wire.Answer{Result: &wire.Answer_Messages{Messages: rep}}, nil
	})
}

// dropMessages takes waiting messages away and shows those that it took.
func (c *call) dropMessages(req *wire.DropMessagesRequest) {
	flowID, err := c.channelVerb(req.FlowId, req.Channel)
	if err == nil && len(req.Ids) > core.MaxPending {
		err = refuse(Invalid, "%d message IDs, at most %d", len(req.Ids), core.MaxPending)
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		if err := c.s.declared(c.tenant, f.Type).channel(req.Channel); err != nil {
			return nil, err
		}
		e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_DropMessages{DropMessages: &wire.DropMessages{Channel: req.Channel, Ids: req.Ids}}}
		return nil, c.submit(e, func(rep core.Reply) *wire.Answer {
			return &wire.Answer{Result: &wire.Answer_Messages{Messages: &wire.MessagesReply{Dropped: uint32(rep.Cancelled)}}}
		})
	})
}
