package flows

import (
	"context"
	"errors"
	"slices"
	"sort"
	"strconv"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// reset begins a new run at a step of the newest run: with the attributes as
// they were before that step was started for the first time, and with the
// messages that were consumed since, that step's own included, waiting again in
// their order. The state is computed from the log. What is not brought back:
// other steps that were live at that moment, and messages that such steps had
// taken before it.
func (c *call) reset(req *wire.ResetRequest) {
	flowID, err := c.flow(req.FlowId)
	switch {
	case err != nil:
	case (req.Exec == 0) == (req.Step == ""):
		err = refuse(Invalid, "a reset names a step execution or a step, not both")
	case len(req.Reason) > core.MaxReason:
		err = refuse(TooLarge, "the reason has %d bytes, at most %d", len(req.Reason), core.MaxReason)
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		for range maxResets {
			cmd, err := c.resetCommand(ctx, flowID, req)
			if err != nil {
				return nil, err
			}
			rep, err := c.s.cfg.Set.For(flowID).Call(ctx, &wire.Entry{FlowId: flowID, Command: &wire.Entry_Reset_{Reset_: cmd}})
			var ce *core.Error
			if errors.As(err, &ce) && ce.Code == core.Conflict {
				continue
			}
			if err != nil {
				return nil, err
			}
			return &wire.Answer{Result: &wire.Answer_Reset_{Reset_: &wire.ResetReply{RunId: rep.RunID}}}, nil
		}
		return nil, refuse(Conflict, "flow %q went on during each of %d computations of the reset; stop it first", UserID(flowID), maxResets)
	})
}

func (c *call) resetCommand(ctx context.Context, flowID string, req *wire.ResetRequest) (*wire.Reset, error) {
	var last, start *wire.Cursor
	var d declaration
	var queued []taken
	err := c.s.viewed(ctx, flowID, func(f *wire.Flow) {
		last, start = f.LastEvent.CloneVT(), f.RunStart.CloneVT()
		d = c.s.declared(c.tenant, f.Type)
		queued = takenByQueued(f)
	})
	if err != nil {
		return nil, err
	}
	if req.Step != "" && d.known {
		if _, err := d.step(req.Step); err != nil {
			return nil, err
		}
	}
	r := c.s.cfg.Set.For(flowID)
	if err := settled(ctx, r); err != nil {
		return nil, err
	}
	b := &pastState{exec: req.Exec, step: req.Step, attributes: map[string]*wire.Attribute{}}
	at := before(cursor(start))
	end := cursor(last)
	err = r.Tables().Events(flowID, at.LSN, at.N, 0, func(ev *wire.Event) error {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case less(end, core.CursorOf(ev)):
			return errEnough // the proposal will be refused as well
		}
		b.add(ev)
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	if b.target == nil {
		return nil, refuse(core.NotFound, "the newest run of flow %q has not started the step %s", UserID(flowID), stepWords(req))
	}
	cmd := &wire.Reset{
		Exec: b.target.Exec, To: &wire.Cursor{Lsn: b.target.Lsn, N: b.target.N}, IfLastEvent: last,
		Attributes: b.kept, Steps: []*wire.StepSpec{b.target.Spec}, Reason: orSaid(req.Reason, "reset by a client"),
	}
	for _, m := range append(b.taken, queued...) {
		p := &wire.Publish{Channel: m.channel, Payload: m.payload, Blob: m.blob}
		if m.blob != "" {
			at, err := parseBlobID(m.blob)
			if err != nil {
				return nil, err
			}
			p.Size = at.size
		}
		cmd.Publish = append(cmd.Publish, p)
	}
	return cmd, c.s.presentForReset(ctx, flowID, cmd)
}

// presentForReset checks that the blobs are there that the run begins with, and
// those that it brings to sub-flows.
func (s *Service) presentForReset(ctx context.Context, flowID string, cmd *wire.Reset) error {
	refs := blobsOfPublishes(blobsOfAttributes(blobsOfSpecs(nil, cmd.Steps), cmd.Attributes), cmd.Publish)
	err := s.presentBlobs(ctx, flowID, refs)
	for _, spec := range cmd.Steps {
		eachChild(spec, func(on *wire.OnFlow) {
			if err == nil {
				err = s.presentBlobs(ctx, on.FlowId, blobsOfStart(nil, on.Start))
			}
		})
	}
	return err
}

func stepWords(req *wire.ResetRequest) string {
	if req.Step != "" {
		return `"` + req.Step + `"`
	}
	return "execution " + strconv.FormatUint(req.Exec, 10)
}

// taken is a message that a step consumed.
type taken struct {
	channel string
	payload []byte
	blob    string // that holds the payload, when it is large
}

// pastState folds the log of a run: the state before the first start of the step
// that is looked for, which is the last one of its name, and what was consumed
// since.
type pastState struct {
	exec       uint64
	step       string
	attributes map[string]*wire.Attribute

	target *wire.Event       // the first start
	kept   []*wire.Attribute // before it, by name
	taken  []taken           // since
	begun  map[uint64]bool
}

func (p *pastState) add(ev *wire.Event) {
	if starts(ev) {
		if p.isTarget(ev) {
			p.target, p.taken, p.kept = ev, nil, p.sorted()
		}
		if p.target != nil && ev.Type == core.EventStepStarted {
			p.taken = append(p.taken, takenBy(ev)...)
		}
	}
	for _, a := range ev.Attributes {
		if len(a.Value) == 0 && a.Blob == "" {
			delete(p.attributes, a.Name)
		} else {
			p.attributes[a.Name] = a
		}
	}
}

func starts(ev *wire.Event) bool {
	return ev.Type == core.EventStepPreparing || ev.Type == core.EventStepStarted
}

// isTarget reports whether ev is the first start of the step execution that is
// meant; of several of one name the last one is.
func (p *pastState) isTarget(ev *wire.Event) bool {
	if ev.Spec == nil || p.begun[ev.Exec] {
		return false
	}
	if p.exec != ev.Exec && (p.step == "" || p.step != ev.Step) {
		return false
	}
	if p.begun == nil {
		p.begun = map[uint64]bool{}
	}
	p.begun[ev.Exec] = true
	return true
}

func (p *pastState) sorted() []*wire.Attribute {
	out := make([]*wire.Attribute, 0, len(p.attributes))
	for _, a := range p.attributes {
		out = append(out, a)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out
}

// takenBy gives the messages that a start consumed: its items, shared out to
// the channels that it waited for.
func takenBy(ev *wire.Event) []taken {
	var out []taken
	for i, ch := range shares(ev.Spec.GetWait(), len(ev.Items)) {
		m := taken{channel: ch, payload: ev.Items[i]}
		if i < len(ev.ItemBlobs) {
			m.blob = ev.ItemBlobs[i]
		}
		out = append(out, m)
	}
	return out
}

// takenByQueued gives the messages of steps that hold them but are not started,
// since no worker had room: the log does not show these yet.
func takenByQueued(f *wire.Flow) []taken {
	var out []taken
	for _, st := range f.Steps {
		if st.State != wire.Step_QUEUED || st.Attempts > 0 {
			continue
		}
		for i, ch := range shares(st.Spec.GetWait(), len(st.Matched)) {
			out = append(out, taken{ch, st.Matched[i].Payload, st.Matched[i].Blob})
		}
	}
	return out
}

// shares says of which channel each of n consumed messages was. They come in the
// order of the conditions, of the first combination that fits them; a condition
// that takes up to a number is as greedy as it was when it took them.
func shares(w *wire.Wait, n int) []string {
	if w == nil || n == 0 {
		return nil
	}
	if len(w.Conditions) == 0 {
		return slices.Repeat([]string{w.Channel}, n)
	}
	sets := [][]uint32{nil}
	if len(w.Combinations) == 0 {
		for i := range w.Conditions {
			sets[0] = append(sets[0], uint32(i))
		}
	} else {
		sets = sets[:0]
		for _, set := range w.Combinations {
			sets = append(sets, set.Of)
		}
	}
	for _, set := range sets {
		if out := shared(w.Conditions, set, n); out != nil {
			return out
		}
	}
	return nil
}

// shared gives each condition its least number, then the first ones up to their
// most; nil when n messages are not what the set takes.
func shared(cs []*wire.Condition, set []uint32, n int) []string {
	var names []string
	var counts, most []int
	left := n
	for _, i := range set {
		on := cs[i].GetChannel()
		if on == nil {
			continue
		}
		least := max(int(on.AtLeast), 1)
		names, counts, most = append(names, on.Name), append(counts, least), append(most, max(int(on.AtMost), least))
		left -= least
	}
	if left < 0 {
		return nil
	}
	var out []string
	for i, name := range names {
		extra := min(left, most[i]-counts[i])
		left -= extra
		out = append(out, slices.Repeat([]string{name}, counts[i]+extra)...)
	}
	if left > 0 {
		return nil
	}
	return out
}
