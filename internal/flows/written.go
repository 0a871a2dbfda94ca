package flows

import (
	"strings"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// What handlers write is checked as what clients ask for is: names by the
// declaration of the flow's type, values by their types, and the IDs of other
// flows, which handlers know without their tenant.

// CheckResult checks what a step's handler of a flow of that type wrote, and
// fills in what only the server knows: how attributes are indexed, which steps
// have a WaitFor, and where the flows are that it names. The result is changed;
// on an error it is not to be used.
func (s *Service) CheckResult(tenant, flowType string, r *wire.StepResult) error {
	d := s.declared(tenant, flowType)
	w := written{tenant: tenant, d: d, attributes: r.Attributes, publish: r.Publish, next: r.Next, sends: r.Sends, events: r.Events, close: r.Close, own: true}
	if err := s.check(w); err != nil {
		return err
	}
	return s.wait(tenant, d, r.Wait)
}

// update checks what the handler of a locked RPC wrote.
func (s *Service) update(tenant string, d declaration, u *wire.Update, have []*wire.Attribute) error {
	return s.check(written{tenant: tenant, d: d, attributes: u.Attributes, have: have, publish: u.Publish, next: u.Next, sends: u.Sends, events: u.Events, close: u.Close, own: true})
}

type written struct {
	tenant     string
	d          declaration
	attributes []*wire.Attribute
	have       []*wire.Attribute
	publish    []*wire.Publish
	next       []*wire.StepSpec
	sends      []*wire.Send
	events     []*wire.NewEvent
	close      *wire.Close
	own        bool // by a handler of the flow itself
}

func (s *Service) check(w written) error {
	if err := s.attributes(w.d, w.attributes, w.have); err != nil {
		return err
	}
	for _, p := range w.publish {
		if err := s.message(w.d, p); err != nil {
			return err
		}
	}
	for _, spec := range w.next {
		if err := s.next(w.tenant, w.d, spec, w.own); err != nil {
			return err
		}
	}
	for _, send := range w.sends {
		if err := s.outgoing(w.tenant, send); err != nil {
			return err
		}
	}
	for _, ev := range w.events {
		if err := checkEvent(ev); err != nil {
			return err
		}
	}
	if err := s.checkJSON("the output of the run", w.close.GetOutput()); err != nil {
		return err
	}
	if o := w.close.GetOtherwise(); o != nil {
		return s.next(w.tenant, w.d, o, w.own)
	}
	return nil
}

// next checks a step that is asked for.
func (s *Service) next(tenant string, d declaration, spec *wire.StepSpec, own bool) error {
	if err := s.step(d, spec, own, 0); err != nil {
		return err
	}
	return s.wait(tenant, d, spec.Wait)
}

// wait checks the channels of a wait and finds its flows.
func (s *Service) wait(tenant string, d declaration, w *wire.Wait) error {
	if w == nil {
		return nil
	}
	if w.Channel != "" {
		if err := d.channel(w.Channel); err != nil {
			return err
		}
	}
	for _, c := range w.Conditions {
		switch on := c.GetOn().(type) {
		case *wire.Condition_Channel:
			if err := d.channel(on.Channel.GetName()); err != nil {
				return err
			}
		case *wire.Condition_Flow:
			if err := s.child(tenant, on.Flow); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Service) child(tenant string, on *wire.OnFlow) error {
	if on == nil {
		return refuse(Invalid, "a condition names no flow")
	}
	if on.Start != nil {
		if on.FlowId == "" {
			on.FlowId = s.mintID()
		}
		if err := s.carried(tenant, on.FlowId, on.Start); err != nil {
			return err
		}
	}
	if err := checkID(on.FlowId); err != nil {
		return err
	}
	on.FlowId = FlowID(tenant, on.FlowId)
	return nil
}

func (s *Service) message(d declaration, p *wire.Publish) error {
	if p == nil {
		return refuse(Invalid, "a message is missing")
	}
	if p.OnBusy != wire.Publish_ENQUEUE {
		return refuse(Invalid, "a message for channel %q has a policy for busy sessions", p.Channel)
	}
	if err := d.channel(p.Channel); err != nil {
		return err
	}
	if err := checkRequestID(p.RequestId); err != nil {
		return err
	}
	return s.payload(p)
}

// payload checks what a message holds, and says how large it is.
func (s *Service) payload(p *wire.Publish) error {
	p.Size = 0
	if p.Blob == "" {
		return s.checkJSON("a message for channel "+p.Channel, p.Payload)
	}
	if len(p.Payload) > 0 {
		return refuse(Invalid, "a message for channel %q has a payload and a blob", p.Channel)
	}
	b, err := parseBlobID(p.Blob)
	p.Size = b.size
	return err
}

// outgoing checks a command to another flow, whose type is not known here.
func (s *Service) outgoing(tenant string, send *wire.Send) error {
	if send == nil {
		return refuse(Invalid, "a send is missing")
	}
	if err := checkID(send.FlowId); err != nil {
		return err
	}
	send.FlowId = FlowID(tenant, send.FlowId)
	switch c := send.Command.(type) {
	case *wire.Send_Start:
		if c.Start == nil {
			return refuse(Invalid, "a start is missing")
		}
		return s.carried(tenant, UserID(send.FlowId), c.Start)
	case *wire.Send_Publish:
		return s.message(declaration{}, c.Publish)
	case *wire.Send_Stop:
		if c.Stop == nil {
			return refuse(Invalid, "a stop is missing")
		}
		c.Stop.RequestId = "" // the flow's own to give
		return nil
	}
	return refuse(Invalid, "flow %q is sent nothing that it could take", UserID(send.FlowId))
}

// carried checks the start of a flow that another one brings.
func (s *Service) carried(tenant, id string, cmd *wire.StartFlow) error {
	if err := s.complete(tenant, cmd); err != nil {
		return err
	}
	if carriesFurther(cmd) {
		return refuse(Invalid, "the start of flow %q starts others with large values: start these from a step of its own", id)
	}
	return nil
}

// complete checks the command that starts a flow, and fills in what its
// declaration says.
func (s *Service) complete(tenant string, cmd *wire.StartFlow) error {
	d, err := s.startable(tenant, cmd.Type, len(cmd.Steps) > 0)
	if err != nil {
		return err
	}
	cmd.Type, cmd.Closes, cmd.Parent = d.flowType, true, nil
	if len(cmd.Items) > 0 {
		return refuse(Invalid, "a start has a history, which only sessions may")
	}
	switch cmd.RetentionUs {
	case 0:
		cmd.RetentionUs = s.cfg.Retention.Microseconds()
	case keepForever:
		cmd.RetentionUs = 0
	}
	if err := checkStart(cmd); err != nil {
		return err
	}
	return s.check(written{tenant: tenant, d: d, attributes: cmd.Attributes, publish: cmd.Publish, next: cmd.Steps})
}

// engineEvents is how the types of the engine's own events begin. Handlers may
// not write those: a client would take one for the end of a run.
var engineEvents = []string{"flow.", "step.", "timer.", "channel.", "attributes.", "rpc.", "cancel."}

func checkEvent(ev *wire.NewEvent) error {
	if err := checkName("event type", ev.GetType()); err != nil {
		return err
	}
	for _, p := range engineEvents {
		if strings.HasPrefix(ev.Type, p) {
			return refuse(Invalid, "event type %q begins as the engine's own do", ev.Type)
		}
	}
	return nil
}

// checkStart checks what does not depend on the type.
func checkStart(cmd *wire.StartFlow) error {
	if _, ok := wire.StartFlow_Reuse_name[int32(cmd.Reuse)]; !ok {
		return refuse(Invalid, "the reuse policy %d is not known", cmd.Reuse)
	}
	if err := checkRequestID(cmd.RequestId); err != nil {
		return err
	}
	switch {
	case cmd.Priority > core.MaxPriority:
		return refuse(Invalid, "the priority is %d, want 0 to %d", cmd.Priority, core.MaxPriority)
	case len(cmd.Publish) > MaxPublish:
		return refuse(core.LimitReached, "more than %d first messages", MaxPublish)
	}
	for _, d := range [...]struct {
		what string
		us   int64
	}{{"delay", cmd.DelayUs}, {"timeout", cmd.TimeoutUs}, {"retention", cmd.RetentionUs}} {
		if err := checkTime(d.what, d.us); err != nil {
			return err
		}
	}
	return nil
}
