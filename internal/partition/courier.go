package partition

import (
	"errors"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/wire"
)

// How long the courier waits before it tries again where a partition or a
// channel is full.
const (
	courierFirstWait = 5 * time.Millisecond
	courierMaxWait   = time.Second
)

// Courier carries what flows send to others from outboxes to targets, and tells
// the sender when the target has answered durably. What is lost on the way is in
// the outbox still: the sender's next owner sends it again, and the target knows
// it by its key. What waits here is bounded by the outboxes. Safe for concurrent
// use.
type Courier struct {
	clock env.Clock

	mu    sync.Mutex
	set   Set      // guarded by mu
	early []parcel // guarded by mu: sent before Bind
}

type parcel struct {
	from string
	out  *wire.Outgoing
	wait time.Duration
}

// NewCourier makes a courier; Bind it when the partitions are there.
func NewCourier(clock env.Clock) *Courier { return &Courier{clock: clock} }

// Bind says where flows are and sends what waited for it.
func (c *Courier) Bind(set Set) {
	c.mu.Lock()
	early := c.early
	c.set, c.early = set, nil
	c.mu.Unlock()
	for _, p := range early {
		c.carry(p)
	}
}

// Send implements Outbox.
func (c *Courier) Send(flowID string, out *wire.Outgoing) {
	p := parcel{flowID, out, courierFirstWait}
	c.mu.Lock()
	if c.set == nil {
		c.early = append(c.early, p)
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	c.carry(p)
}

func (c *Courier) carry(p parcel) {
	entry := Delivery(p.out)
	err := c.set.For(entry.FlowId).Submit(Proposal{Entry: entry, Reply: func(r core.Reply, err error) {
		var refused *core.Error
		switch {
		case err == nil:
			c.report(p, &wire.OutboxDone{Id: p.out.Id, RunId: r.RunID})
		case errors.As(err, &refused) && refused.Code == core.QueueFull:
			c.again(p, c.carry) // the channel is full, not closed
		case errors.As(err, &refused):
			c.report(p, &wire.OutboxDone{Id: p.out.Id, Error: refused.Message})
		}
		// Otherwise the ownership is lost: the next owner sends it again.
	}})
	if errors.Is(err, ErrOverloaded) {
		c.again(p, c.carry)
	}
}

func (c *Courier) report(p parcel, done *wire.OutboxDone) {
	entry := &wire.Entry{FlowId: p.from, Command: &wire.Entry_OutboxDone{OutboxDone: done}}
	if err := c.set.For(p.from).Submit(Proposal{Entry: entry}); errors.Is(err, ErrOverloaded) {
		c.again(p, func(p parcel) { c.report(p, done) })
	}
}

func (c *Courier) again(p parcel, do func(parcel)) {
	wait := p.wait
	p.wait = min(2*wait, courierMaxWait)
	c.clock.AfterFunc(wait, func() { do(p) })
}

// Delivery gives the command that an outgoing is for its target.
func Delivery(out *wire.Outgoing) *wire.Entry {
	e := &wire.Entry{FlowId: out.Send.FlowId}
	switch c := out.Send.Command.(type) {
	case *wire.Send_Start:
		e.Command = &wire.Entry_StartFlow{StartFlow: c.Start}
	case *wire.Send_Publish:
		e.Command = &wire.Entry_Publish{Publish: c.Publish}
	case *wire.Send_ChildClosed:
		e.Command = &wire.Entry_ChildClosed{ChildClosed: c.ChildClosed}
	case *wire.Send_Stop:
		e.Command = &wire.Entry_StopFlow{StopFlow: c.Stop}
	}
	return e
}
