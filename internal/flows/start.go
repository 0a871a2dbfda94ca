package flows

import (
	"context"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// start creates a flow, in one commit.
func (c *call) start(req *wire.StartRequest) {
	id, cmd, err := c.s.startCommand(c.tenant, req, c.req.Trace)
	if err != nil {
		c.fail(err)
		return
	}
	flowID := FlowID(c.tenant, id)
	e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_StartFlow{StartFlow: cmd}}
	reply := func(rep core.Reply) *wire.Answer {
		return &wire.Answer{Result: &wire.Answer_Start{Start: &wire.StartReply{FlowId: id, RunId: rep.RunID, Created: rep.Created}}}
	}
	refs := blobsOfStart(nil, cmd)
	if len(refs) == 0 {
		c.propose(e, reply)
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		if err := c.s.verifyBlobs(ctx, flowID, refs, nil); err != nil {
			return nil, err
		}
		return nil, c.submit(e, reply)
	})
}

// StartCommand checks a start and gives the command for it, with what the
// flow's declaration says filled in, and the flow's ID as users see it, made when
// the request has none. Blobs are not looked up. Its errors are *Error.
func (s *Service) StartCommand(tenant string, req *wire.StartRequest) (id string, cmd *wire.StartFlow, err error) {
	return s.startCommand(tenant, given(req).CloneVT(), nil)
}

// startCommand is StartCommand for a request that is not needed any more: it is
// changed, and lives on in the command. trace is the starter's.
func (s *Service) startCommand(tenant string, req *wire.StartRequest, trace []byte) (id string, cmd *wire.StartFlow, err error) {
	id = req.FlowId
	if id == "" {
		if req.RequestId != "" {
			return "", nil, refuse(Invalid, "a request ID needs a flow ID beside it, or a repeated request would start another flow")
		}
		id = s.mintID()
	} else if err := checkID(id); err != nil {
		return "", nil, err
	}
	cmd = &wire.StartFlow{
		Type: req.FlowType, Attributes: req.Attributes, RequestId: req.RequestId, Reuse: req.Reuse, DelayUs: req.DelayUs,
		TimeoutUs: req.TimeoutUs, Priority: req.Priority, RetentionUs: req.RetentionUs, Trace: trace,
	}
	if cmd.Steps, err = firstStep(req); err != nil {
		return "", nil, err
	}
	if cmd.Publish, err = firstMessages(id, req.Publish); err != nil {
		return "", nil, err
	}
	if err := s.complete(tenant, cmd); err != nil {
		return "", nil, err
	}
	if s.cfg.Trace != nil {
		cmd.Trace = s.cfg.Trace(cmd.Trace, id, cmd.Type)
	}
	return id, cmd, nil
}

// checkTrace bounds what is handed on with a call; what it says is the callee's
// to read.
func checkTrace(trace []byte) error {
	if len(trace) > core.MaxName {
		return refuse(Invalid, "the trace parent has %d bytes, at most %d", len(trace), core.MaxName)
	}
	return nil
}

// mintID gives an ID whose order is that of time.
func (s *Service) mintID() string {
	const hex = "0123456789abcdef"
	b := [30]byte{0: 'f', 1: '_'}
	ms, r := uint64(s.cfg.Env.Clock.Now().UnixMilli()), s.cfg.Env.Rand.Uint64()
	for i := range 12 {
		b[2+i] = hex[ms>>(44-4*i)&15]
	}
	for i := range 16 {
		b[14+i] = hex[r>>(60-4*i)&15]
	}
	return string(b[:])
}

// startable gives the declaration of a type that is to be started.
func (s *Service) startable(tenant, flowType string, steps bool) (declaration, error) {
	if flowType == "" || flowType == stateType {
		if steps {
			return declaration{}, refuse(UnknownStep, "a flow of type %q holds attributes only, it has no steps", stateType)
		}
		return declaration{flowType: stateType}, nil
	}
	if err := checkName("flow type", flowType); err != nil {
		return declaration{}, err
	}
	if strings.HasPrefix(flowType, reservedType) {
		return declaration{}, refuse(Invalid, "flow types that begin with %q are the server's own", reservedType)
	}
	d := s.declared(tenant, flowType)
	if !d.known {
		return d, s.unknownType(tenant, flowType)
	}
	return d, nil
}

func checkTime(what string, us int64) error {
	switch {
	case us < 0:
		return refuse(Invalid, "the %s is negative", what)
	case us > core.MaxDelayUs:
		return refuse(Invalid, "the %s is %s, at most %s", what, time.Duration(us)*time.Microsecond, time.Duration(core.MaxDelayUs)*time.Microsecond)
	}
	return nil
}

func firstStep(req *wire.StartRequest) ([]*wire.StepSpec, error) {
	if req.Step == "" {
		if len(req.Input) > 0 || req.InputBlob != "" || req.Spec != nil {
			return nil, refuse(Invalid, "an input or options of a first step are given, but no step")
		}
		return nil, nil
	}
	spec := req.Spec
	if spec == nil {
		spec = &wire.StepSpec{}
	}
	spec.Name, spec.Input, spec.InputBlob = req.Step, req.Input, req.InputBlob
	return []*wire.StepSpec{spec}, nil
}

// step checks a step, and says whether its WaitFor is to be called: as declared,
// unless the wait is there. Of a decision's own steps it is left out as well when
// the handler has called it and it wanted nothing.
func (s *Service) step(d declaration, spec *wire.StepSpec, own bool, depth int) error {
	if spec == nil {
		return refuse(Invalid, "a step is missing")
	}
	if depth > maxRecoverDepth {
		return refuse(Invalid, "more than %d recovery steps are nested", maxRecoverDepth)
	}
	if err := checkName("step name", spec.Name); err != nil {
		return err
	}
	t, err := d.step(spec.Name)
	if err != nil && d.known {
		return err
	}
	switch {
	case spec.Prefetch:
		return refuse(Invalid, "step %q asks for prefetch, which only the server's own steps may", spec.Name)
	case spec.Failure != "":
		return refuse(Invalid, "step %q names the failure that it recovers, which only the server may", spec.Name)
	case spec.InputBlob != "" && len(spec.Input) > 0:
		return refuse(Invalid, "step %q has an input and an input blob", spec.Name)
	}
	if spec.InputBlob != "" {
		if _, err := parseBlobID(spec.InputBlob); err != nil {
			return err
		}
	}
	if err := s.checkJSON("the input of step "+spec.Name, spec.Input); err != nil {
		return err
	}
	if err := checkTime("timeout of step "+spec.Name, spec.TimeoutUs); err != nil {
		return err
	}
	if err := checkTime("heartbeat of step "+spec.Name, spec.HeartbeatUs); err != nil {
		return err
	}
	spec.WaitFor = (t.GetWaitFor() || !d.known) && spec.Wait == nil && (spec.WaitFor || !own)
	if spec.Recover != nil {
		return s.step(d, spec.Recover, own, depth+1)
	}
	return nil
}

func firstMessages(id string, reqs []*wire.PublishRequest) ([]*wire.Publish, error) {
	var out []*wire.Publish
	for _, req := range reqs {
		req = given(req)
		if req.FlowId != "" && req.FlowId != id {
			return nil, refuse(Invalid, "a first message names the flow %q, not the one that is started", req.FlowId)
		}
		if err := checkMessages(req); err != nil {
			return nil, err
		}
		if out = append(out, messages(req)...); len(out) > MaxPublish {
			break // refused with the rest of the command
		}
	}
	return out, nil
}
