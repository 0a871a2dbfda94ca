package sim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/perdure-dev/perdure/internal/wire"
)

// The users' programs: each is a small use of the engine with something that can
// be counted in the end.

const (
	typeCount  = "count"  // k steps that add one each; closes with the sum
	typeMail   = "mail"   // keeps what it is sent, in order; closes with it
	typeEntity = "entity" // a counter that calls add to, without a step that runs
	typeParent = "parent" // starts children, waits for all, adds up what they say
	typePay    = "pay"    // a payment or a timer, whichever is first
	typeKeyed  = "keyed"  // steps under a concurrency key
	typeSaga   = "saga"   // a step that fails, its recovery, a message to a mailbox
	typeRace   = "race"   // two steps, the first one wins
)

func flowTypes() []*wire.FlowType {
	mk := func(name string, steps ...string) *wire.FlowType {
		t := &wire.FlowType{Name: name, Rpcs: []*wire.RpcType{{Name: "add", Locked: true}, {Name: "get"}}}
		for _, s := range steps {
			t.Steps = append(t.Steps, &wire.StepType{Name: s})
		}
		return t
	}
	return []*wire.FlowType{
		mk(typeCount, "inc", "inc-async", "hop-async"), mk(typeMail, "read"), mk(typeEntity, "rest"), mk(typeParent, "gather"),
		mk(typePay, "pay"), mk(typeKeyed, "charge"), mk(typeSaga, "book", "undo"), mk(typeRace, "run"),
	}
}

// mayRunEarly says which steps ask to be handed out before their commit.
func mayRunEarly(step string) bool { return strings.HasSuffix(step, "-async") }

func nameOf(what string, i int) string { return what + strconv.Itoa(i) }

func sortedTasks(m map[taskKey]*flowTask) []taskKey {
	return slices.SortedFunc(maps.Keys(m), func(a, b taskKey) int {
		return cmp.Or(cmp.Compare(a.flow, b.flow), cmp.Compare(a.exec, b.exec), slices.Compare(a.attempt[:], b.attempt[:]))
	})
}

var flowRetry = &wire.RetryPolicy{MaxAttempts: 4, InitialUs: 20_000, MaxUs: 400_000}

func attrInt(name string, v int) *wire.Attribute {
	return &wire.Attribute{Name: name, Value: strconv.AppendInt(nil, int64(v), 10), Index: wire.Attribute_INT}
}

func intOf(as []*wire.Attribute, name string) int {
	n, _ := strconv.Atoi(string(valueOf(as, name)))
	return n
}

func valueOf(as []*wire.Attribute, name string) []byte {
	for _, a := range as {
		if a.Name == name {
			return a.Value
		}
	}
	return nil
}

func onChannel(name, channel string, least, most uint32) *wire.Condition {
	return &wire.Condition{Name: name, On: &wire.Condition_Channel{Channel: &wire.OnChannel{Name: channel, AtLeast: least, AtMost: most}}}
}

func onTimer(name string, us int64) *wire.Condition {
	return &wire.Condition{Name: name, On: &wire.Condition_TimerUs{TimerUs: us}}
}

var anyOfTwo = []*wire.Combination{{Of: []uint32{0}}, {Of: []uint32{1}}}

func readStep() *wire.StepSpec {
	return &wire.StepSpec{Name: "read", Retry: flowRetry, Wait: &wire.Wait{Conditions: []*wire.Condition{onChannel("mail", "in", 1, 3)}}}
}

// firstSteps gives what a flow of the type begins with.
func firstSteps(typ, id string, rng *source) ([]*wire.StepSpec, []*wire.Attribute) {
	switch typ {
	case typeCount:
		name := pick(rng, "inc", "inc-async")
		k := 1 + rng.intn(6)
		if mayRunEarly(name) && rng.percent(50) {
			k = 30
		}
		return []*wire.StepSpec{countStep(name)}, []*wire.Attribute{attrInt("k", k)}
	case typeMail:
		return []*wire.StepSpec{readStep()}, nil
	case typeEntity:
		return []*wire.StepSpec{{Name: "rest", Wait: &wire.Wait{Conditions: []*wire.Condition{onChannel("", "never", 1, 1)}}}}, []*wire.Attribute{attrInt("n", 0)}
	case typeParent:
		return []*wire.StepSpec{gatherStep(id, rng)}, nil
	case typePay:
		return []*wire.StepSpec{{Name: "pay", WaitFor: true, Retry: flowRetry}}, nil
	case typeKeyed:
		return []*wire.StepSpec{keyedStep(rng), keyedStep(rng)}, []*wire.Attribute{attrInt("k", 1+rng.intn(2))}
	case typeSaga:
		return []*wire.StepSpec{{Name: "book", Input: []byte(`"room"`), Retry: &wire.RetryPolicy{MaxAttempts: 2, InitialUs: 10_000},
			Recover: &wire.StepSpec{Name: "undo", Retry: flowRetry}, HeartbeatUs: 2_500_000}}, nil
	}
	return []*wire.StepSpec{{Name: "run", Input: []byte("1")}, {Name: "run", Input: []byte("2"), HeartbeatUs: 2_900_000}}, nil
}

func countStep(name string) *wire.StepSpec {
	return &wire.StepSpec{Name: name, Retry: flowRetry, Async: mayRunEarly(name)}
}

func keyedStep(rng *source) *wire.StepSpec {
	return &wire.StepSpec{Name: "charge", Retry: flowRetry, ConcurrencyKey: pick(rng, "k1", "k2"), ConcurrencyLimit: 2}
}

func gatherStep(id string, rng *source) *wire.StepSpec {
	w := &wire.Wait{}
	for i := range 1 + rng.intn(3) {
		child := fmt.Sprintf("%s-c%d", id, i)
		steps, attrs := firstSteps(typeCount, child, rng)
		w.Conditions = append(w.Conditions, &wire.Condition{On: &wire.Condition_Flow{Flow: &wire.OnFlow{FlowId: child, Start: &wire.StartFlow{
			Type: typeCount, Steps: steps, Attributes: attrs, Reuse: pick(rng, wire.StartFlow_REFUSE, wire.StartFlow_IF_CLOSED, wire.StartFlow_ATTACH)}}}})
	}
	return &wire.StepSpec{Name: "gather", Wait: w, Retry: flowRetry}
}

func gracefully(output []byte) *wire.Close {
	return &wire.Close{How: wire.Close_GRACEFUL, Output: output}
}

// handle is a user's handler.
func (f *flowWorker) handle(t *wire.Task) *wire.StepResult {
	if t.Cancelled {
		return cancelled(t)
	}
	if !f.w.calm && t.Step != "book" && f.rng.percent(f.w.p.handlerFails) {
		f.w.fault("handler-fails")
		return &wire.StepResult{Retry: &wire.Retry{Error: "a bad day", AfterUs: f.rng.between(0, 50_000)},
			Close: &wire.Close{How: wire.Close_FAIL, Error: "too many bad days"}}
	}
	switch t.Step {
	case "inc":
		return f.count(t, func() *wire.StepSpec { return countStep(t.Step) })
	case "inc-async", "hop-async": // which one is a matter of chance, again after a loss
		return f.count(t, func() *wire.StepSpec { return countStep(pick(f.rng, "inc-async", "hop-async")) })
	case "charge":
		if t.Exec == 2 && f.rng.percent(40) {
			return &wire.StepResult{} // a dead end: the other one closes
		}
		return f.count(t, func() *wire.StepSpec { return keyedStep(f.rng) })
	case "read":
		return f.read(t)
	case "gather":
		return gather(t)
	case "pay":
		return f.pay(t)
	case "book":
		return &wire.StepResult{Retry: &wire.Retry{Error: "no room", Permanent: f.rng.percent(30)}, Close: &wire.Close{How: wire.Close_FAIL, Error: "no recovery"}}
	case "undo":
		return f.undo(t)
	}
	return &wire.StepResult{CancelSteps: []string{"run"}, Close: gracefully(t.Input)}
}

func cancelled(t *wire.Task) *wire.StepResult {
	return &wire.StepResult{Attributes: []*wire.Attribute{{Name: "undone", Value: []byte("true")}}}
}

// count adds one; its output is the number of times it did.
func (f *flowWorker) count(t *wire.Task, next func() *wire.StepSpec) *wire.StepResult {
	n := intOf(t.Attributes, "n") + 1
	r := &wire.StepResult{Attributes: []*wire.Attribute{attrInt("n", n)}}
	if f.rng.percent(10) {
		r.Attributes = append(r.Attributes, &wire.Attribute{Name: "bulk", Value: []byte(strconv.Quote(strings.Repeat("x", f.rng.intn(3000))))})
	}
	if n < intOf(t.Attributes, "k") {
		r.Next = []*wire.StepSpec{next()}
		return r
	}
	r.Close = gracefully(r.Attributes[0].Value)
	return r
}

// read keeps the messages; one that says end closes when nothing more waits.
func (f *flowWorker) read(t *wire.Task) *wire.StepResult {
	var log []string
	if err := json.Unmarshal(orEmpty(valueOf(t.Attributes, "log")), &log); err != nil {
		f.w.violate("attributes", flowPrefix+t.FlowId, "log is %s: %v", valueOf(t.Attributes, "log"), err)
	}
	end := false
	for _, m := range t.Messages {
		log = append(log, string(m.Payload))
		end = end || string(m.Payload) == "end"
	}
	text, err := json.Marshal(log)
	if err != nil {
		f.w.violate("simulator", t.FlowId, "%v", err)
	}
	r := &wire.StepResult{Attributes: []*wire.Attribute{{Name: "log", Value: text}}}
	if end {
		r.Close = &wire.Close{How: wire.Close_IF_EMPTY, Channels: []string{"in"}, Otherwise: readStep(), Output: text}
		return r
	}
	r.Next = []*wire.StepSpec{readStep()}
	return r
}

func orEmpty(v []byte) []byte {
	if len(v) == 0 {
		return []byte("[]")
	}
	return v
}

func gather(t *wire.Task) *wire.StepResult {
	sum, bad := 0, 0
	for _, c := range t.Conditions {
		n, _ := strconv.Atoi(string(c.Output))
		if sum += n; c.Status != wire.Status_COMPLETED {
			bad++
		}
	}
	return &wire.StepResult{Close: gracefully(fmt.Appendf(nil, `"%d of %d children, %d bad"`, sum, len(t.Conditions), bad))}
}

// pay first says what it waits for.
func (f *flowWorker) pay(t *wire.Task) *wire.StepResult {
	if t.Phase == wire.Task_WAIT_FOR {
		r := &wire.StepResult{Locals: []byte(`"cart"`), Attributes: []*wire.Attribute{attrInt("asked", 1)},
			Wait: &wire.Wait{Conditions: []*wire.Condition{onChannel("paid", "payments", 1, 1), onTimer("late", f.rng.between(0, 2_500_000))}, Combinations: anyOfTwo}}
		if f.rng.percent(10) {
			r.Publish = []*wire.Publish{{Channel: "payments", Payload: []byte(`"own"`)}}
		}
		return r
	}
	if string(t.Locals) != `"cart"` {
		f.w.violate("locals", flowPrefix+t.FlowId, "Execute got the locals %q", t.Locals)
	}
	switch {
	case t.Conditions[0].Done && len(t.Messages) == 1:
		return &wire.StepResult{Close: gracefully(t.Messages[0].Payload)}
	case t.Conditions[1].Done:
		return &wire.StepResult{Close: &wire.Close{How: wire.Close_FAIL, Error: "late"}}
	}
	f.w.violate("waits", flowPrefix+t.FlowId, "step %d runs and nothing of its wait holds: %v", t.Exec, t.Conditions)
	return &wire.StepResult{}
}

func (f *flowWorker) undo(t *wire.Task) *wire.StepResult {
	if t.Failure != "no room" && !strings.Contains(t.Failure, "timed out") || string(t.Input) != `"room"` {
		f.w.violate("recovery", flowPrefix+t.FlowId, "the recovery got failure %q and input %q", t.Failure, t.Input)
	}
	to := flowPrefix + nameOf("mail", f.rng.intn(f.w.p.mailboxes))
	return &wire.StepResult{
		Sends: []*wire.Send{{FlowId: to, Command: &wire.Send_Publish{Publish: &wire.Publish{Channel: "in", Payload: fmt.Appendf(nil, "undo of %s %d", t.RunId, t.Exec)}}}},
		Close: &wire.Close{How: wire.Close_FAIL, Error: t.Failure},
	}
}

// handleCall runs the RPCs add and get.
func (f *flowWorker) handleCall(t *wire.RpcTask) *wire.RpcResult {
	n := intOf(t.Attributes, "n")
	if t.Name == "get" {
		return &wire.RpcResult{Update: &wire.Update{Output: strconv.AppendInt(nil, int64(n), 10)}}
	}
	return &wire.RpcResult{Update: &wire.Update{Attributes: []*wire.Attribute{attrInt("n", n+1)}, Output: strconv.AppendInt(nil, int64(n+1), 10)}}
}
