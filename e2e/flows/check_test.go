//go:build e2e

package flows

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/perdure-dev/perdure/client"
)

// verify is what is there in the end, and what the clients and the handlers
// knew of it.
type verify struct {
	*loop
	c      *client.Client
	deeds  map[string][]deed // by key
	events int
	steps  int
	faults int
}

// maxFaults bounds what is printed.
const maxFaults = 20

func (v *verify) fail(format string, args ...any) {
	v.t.Helper()
	if v.faults++; v.faults <= maxFaults {
		v.t.Errorf(format, args...)
	}
}

// check holds the promises against the end; the load is over and nothing runs.
func (k *loop) check() string {
	v := &verify{loop: k, c: k.load.sure, deeds: map[string][]deed{}}
	v.readDeeds()
	for _, s := range k.load.starts {
		v.start(s)
	}
	v.wasJoined()
	for i := range inboxes {
		v.letters(inboxID(i))
	}
	for i := range counters {
		v.counter(counterID(i))
	}
	v.queues()
	v.allHistories()
	return fmt.Sprintf("%d events, %d steps, %d deeds, %d starts, %d letters, %d additions and looks, %d remarks",
		v.events, v.steps, len(v.deeds), len(k.load.starts), len(k.load.letters), len(k.load.adds), len(k.load.remarks))
}

// readDeeds reads the ledgers. No attempt of a SYNC step is handed out twice
// under one number, and a key is always of one step.
func (v *verify) readDeeds() {
	for _, d := range v.pool.deeds() {
		v.deeds[d.Key] = append(v.deeds[d.Key], d)
	}
	again := 0
	for key, all := range v.deeds {
		numbers := map[int]bool{}
		for _, d := range all {
			if d.Flow != all[0].Flow || d.Step != all[0].Step {
				v.fail("the key %s was given to two steps: %v and %v", key, all[0], d)
			}
			if numbers[d.Attempt] && !d.Async {
				v.fail("attempt %d of SYNC step %s of %s (key %s) was handed out twice", d.Attempt, d.Step, d.Flow, key)
			}
			numbers[d.Attempt] = true
		}
		again += len(all) - 1
	}
	if again == 0 {
		v.fail("no step was ever tried again: the kills proved nothing")
	}
	v.t.Logf("%d attempts after the first", again)
}

// start: what was acknowledged is there and has ended as it should; so has what
// is in doubt, if it is there.
func (v *verify) start(s started) {
	i, err := v.c.Describe(v.t.Context(), s.id)
	if errors.Is(err, client.ErrNotFound) {
		if s.fate == acked {
			v.fail("the acknowledged start of %s (%s) is lost", s.id, s.kind)
		}
		return
	}
	if err != nil {
		v.fail("describe %s: %v", s.id, err)
		return
	}
	if s.fate == refused {
		v.fail("the start of %s (%s) was refused, and it is there", s.id, s.kind)
	}
	if i.Type != s.kind || i.Status != s.want.status || string(i.Output) != s.want.output || !strings.Contains(i.Error, s.want.failed) {
		v.fail("%s is %s, %s, output %s, error %q; want %v", s.id, i.Type, i.Status, i.Output, i.Error, s.want)
	}
	if s.kind == "parent" {
		a, b := childrenOf(s.id)
		for _, id := range []string{a, b} {
			if c, err := v.c.Describe(v.t.Context(), id); err != nil || c.Status != client.Completed {
				v.fail("child %s: %v, %v", id, c, err)
			}
		}
	}
}

// wasJoined notes the messages that fans sent when they were joined.
func (v *verify) wasJoined() {
	for i, err := range v.c.Search(v.t.Context(), `type = "fan"`, 0) {
		if err != nil {
			v.t.Fatal(err)
		}
		v.load.letters = append(v.load.letters, letter{inbox: inboxOf(i.ID), name: joined(i.ID), client: -1, fate: acked})
	}
}

// letters: each acknowledged message was consumed by exactly one step, the
// messages of one client in the order in which they were sent.
func (v *verify) letters(id string) {
	took := map[string]string{} // key by message
	var order []string
	for _, e := range v.history(id) {
		if e.Type != "step.started" {
			continue
		}
		for _, it := range e.Items {
			if name := unquote(string(it)); name != "true" {
				if before := took[name]; before != "" {
					v.fail("%q was given to two steps of %s: %s and %d", name, id, before, e.Exec)
				}
				took[name] = fmt.Sprint(e.Exec)
				order = append(order, name)
			}
		}
	}
	byKey := map[string]string{}
	for key, all := range v.deeds {
		for _, d := range all {
			if d.Flow != id {
				continue
			}
			if !slices.Equal(d.Took, all[0].Took) {
				v.fail("attempts of one step of %s took different messages: %v and %v", id, all[0], d)
			}
			for _, name := range d.Took {
				if before := byKey[name]; before != "" && before != key {
					v.fail("%q was consumed by two steps: %s and %s", name, before, key)
				}
				byKey[name] = key
			}
		}
	}
	place := map[string]int{}
	for i, name := range order {
		place[name] = i
	}
	last := map[int]int{} // by client
	for _, m := range v.load.letters {
		if m.inbox != id {
			continue
		}
		at, there := place[m.name]
		switch {
		case m.fate == acked && (!there || byKey[m.name] == ""):
			v.fail("the acknowledged message %q of %s was never consumed", m.name, id)
		case m.fate == refused && there:
			v.fail("the message %q of %s was refused, and consumed", m.name, id)
		case there && m.client >= 0 && at < last[m.client]:
			v.fail("the message %q of %s was consumed before an earlier one of its client", m.name, id)
		case there:
			last[m.client] = at
		}
	}
	if i, err := v.c.Describe(v.t.Context(), id); err != nil || string(i.Output) != fmt.Sprint(len(order)) {
		v.fail("%s consumed %d messages, and says %v, %v", id, len(order), i, err)
	}
	v.live(id)
}

func unquote(s string) string { return strings.Trim(s, `"`) }

// live: who followed the log over all restarts has seen each event once.
func (v *verify) live(id string) {
	all, seen := v.history(id), v.load.follow[id]
	if len(all) != len(seen) {
		v.fail("the live history of %s gave %d events, the log has %d", id, len(seen), len(all))
		return
	}
	for i := range all {
		if all[i].Cursor != seen[i].Cursor || all[i].Type != seen[i].Type {
			v.fail("event %d of %s is %s at %s, and was %s at %s live", i, id, all[i].Type, all[i].Cursor, seen[i].Type, seen[i].Cursor)
			return
		}
	}
}

// model is a counter: adding gives its new size, looking its size.
var model = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(state, input, output any) (bool, any) {
		if input == "" {
			return output == state, state
		}
		return output == state.(int)+1, state.(int) + 1
	},
	Equal:             func(a, b any) bool { return a == b },
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%v → %v", in, out) },
}

// counter: each acknowledged addition took effect once, each refused one never,
// and the history is linearizable. What is in doubt is looked up in the end.
func (v *verify) counter(id string) {
	all := v.load.ended[id]
	place := map[string]int{}
	for i, name := range all {
		if _, twice := place[name]; twice {
			v.fail("%s: the addition %s took effect twice", id, name)
		}
		place[name] = i
	}
	var ops []porcupine.Operation
	sure, doubtful := 0, 0
	for _, a := range v.load.adds {
		if a.counter != id {
			continue
		}
		at, there := place[a.name]
		delete(place, a.name)
		switch {
		case a.name == "":
		case a.fate == acked && !there:
			v.fail("%s: the acknowledged addition %s is lost", id, a.name)
			continue
		case a.fate == refused && there:
			v.fail("%s: the addition %s was refused, and took effect", id, a.name)
			continue
		case !there:
			continue
		case a.fate == doubt:
			a.op.Output, a.op.Return = at+1, v.load.since()
			doubtful++
		default:
			sure++
		}
		ops = append(ops, a.op)
	}
	for name := range place {
		v.fail("%s: nobody added %s", id, name)
	}
	if len(all) != sure+doubtful {
		v.fail("%s counts %d, but %d additions were acknowledged and %d in doubt took effect", id, len(all), sure, doubtful)
	}
	if got := porcupine.CheckOperationsTimeout(model, ops, 20*time.Second); got != porcupine.Ok {
		v.fail("%s: the history of %d operations is %s", id, len(ops), got)
	}
	v.marks(id, all)
	v.remarks(id)
}

// marks: each addition that starts a step has started one, and no other has.
func (v *verify) marks(id string, all []string) {
	byName := map[string]string{}
	for key, deeds := range v.deeds {
		if d := deeds[0]; d.Flow == id && d.Step == "Mark" {
			name := d.Took[0]
			if before := byName[name]; before != "" {
				v.fail("%s: the addition %s started two steps: %s and %s", id, name, before, key)
			}
			byName[name] = key
		}
	}
	for _, name := range all {
		if marked(name) != (byName[name] != "") {
			v.fail("%s: the addition %s is to start a step: %v; the step's key is %q", id, name, marked(name), byName[name])
		}
		delete(byName, name)
	}
	for name, key := range byName {
		v.fail("%s: the step %s was started by the addition %s, which took no effect", id, key, name)
	}
}

// remarks: an attribute has the last value that was acknowledged, or a later one
// that is in doubt.
func (v *verify) remarks(id string) {
	may := map[string][]int{}
	for _, r := range v.load.remarks {
		if r.counter != id {
			continue
		}
		switch r.fate {
		case acked:
			may[r.key] = []int{r.value}
		case doubt:
			if len(may[r.key]) == 0 {
				may[r.key] = []int{0}
			}
			may[r.key] = append(may[r.key], r.value)
		}
	}
	for key, values := range may {
		have, err := client.Get(v.t.Context(), v.c, id, notes.At(key))
		if err != nil || !slices.Contains(values, have) {
			v.fail("%s: note %s is %d, want one of %d (error %v)", id, key, have, values, err)
		}
	}
}

// queues: nothing waits for a worker, and none has anything.
func (v *verify) queues() {
	eventually(v.t, "empty queues", func() bool {
		all, err := v.c.Queues(v.t.Context())
		if err != nil {
			v.t.Fatal(err)
		}
		return !slices.ContainsFunc(all, func(q client.Queue) bool { return q.Queued+q.Running > 0 })
	})
}

func (v *verify) history(id string) []client.Event {
	var all []client.Event
	for e, err := range v.c.History(v.t.Context(), id, client.HistoryOptions{}) {
		if err != nil {
			v.t.Fatalf("history of %s: %v", id, err)
		}
		all = append(all, *e)
	}
	return all
}

// allHistories looks at the log of every flow there is.
func (v *verify) allHistories() {
	n := 0
	for i, err := range v.c.Search(v.t.Context(), "", 0) {
		if err != nil {
			v.t.Fatal(err)
		}
		n++
		i, err = v.c.Describe(v.t.Context(), i.ID)
		if err != nil {
			v.t.Fatal(err)
		}
		if len(i.Steps) > 0 || slices.ContainsFunc(i.Channels, func(c client.ChannelInfo) bool { return c.Pending > 0 }) {
			v.fail("%s has ended, and has steps %v and channels %v", i.ID, i.Steps, i.Channels)
		}
		if err := v.gapless(i, v.history(i.ID)); err != nil {
			out, _, _ := v.srv.command(nil, "flow", "history", i.ID)
			v.fail("%s: %v\n%s", i.ID, err, out)
		}
	}
	if n < len(v.load.starts)/2 {
		v.fail("search finds %d flows, but %d were started", n, len(v.load.starts))
	}
}

// life is what the log says of one step.
type life struct {
	name     string
	async    bool
	attempts int
	ended    string
}

// gapless holds a log against itself, the flow's state and the ledgers: all
// events are there, in order; every step that was started has ended once; no
// number of an attempt is left out; who completed has a deed under its key.
func (v *verify) gapless(i *client.Info, all []client.Event) error {
	if uint64(len(all)) != i.Events {
		return fmt.Errorf("the log has %d events, the flow says %d", len(all), i.Events)
	}
	v.events += len(all)
	if all[0].Type != "flow.started" {
		return fmt.Errorf("the first event is %s", all[0].Type)
	}
	if last := all[len(all)-1].Type; last != "flow."+i.Status.String() {
		return fmt.Errorf("the last event is %s, and the flow is %s", last, i.Status)
	}
	if !sort.SliceIsSorted(all, func(a, b int) bool { return less(all[a].Cursor, all[b].Cursor) }) {
		return errors.New("the events are not in the order of their cursors")
	}
	steps := map[uint64]*life{}
	completed := uint64(0)
	for _, e := range all {
		if e.Exec == 0 || !strings.HasPrefix(e.Type, "step.") {
			continue // a timer may fire before its step begins
		}
		s := steps[e.Exec]
		switch e.Type {
		case "step.started", "step.preparing":
			if s == nil {
				s = &life{name: e.Step, async: e.Async}
				steps[e.Exec] = s
			}
		case "step.waiting":
			continue
		case "step.cancelled":
			if s == nil { // before a worker had it
				s = &life{name: e.Step}
				steps[e.Exec] = s
			}
		}
		if s == nil {
			return fmt.Errorf("event %s at %s is of step #%d, which was not started", e.Type, e.Cursor, e.Exec)
		}
		if s.ended != "" {
			return fmt.Errorf("event %s at %s is of step #%d, which has ended: %s", e.Type, e.Cursor, e.Exec, s.ended)
		}
		if e.Attempt > s.attempts+1 {
			return fmt.Errorf("event %s at %s is of attempt %d of step #%d; the one before is %d", e.Type, e.Cursor, e.Attempt, e.Exec, s.attempts)
		}
		s.attempts = max(s.attempts, e.Attempt)
		switch e.Type {
		case "step.completed":
			completed++
			s.ended = e.Type
		case "step.failed", "step.cancelled":
			s.ended = e.Type
		}
	}
	v.steps += len(steps)
	if completed != i.StepsDone {
		return fmt.Errorf("the log has %d completed steps, the flow says %d", completed, i.StepsDone)
	}
	return v.againstDeeds(i, steps)
}

func (v *verify) againstDeeds(i *client.Info, steps map[uint64]*life) error {
	for exec, s := range steps {
		if s.ended == "" {
			return fmt.Errorf("step #%d (%s) has not ended", exec, s.name)
		}
		key := fmt.Sprintf("%s-%d", i.RunID, exec)
		deeds := v.deeds[key]
		if len(deeds) == 0 && s.ended == "step.completed" {
			return fmt.Errorf("step #%d (%s) is completed, and no handler did anything under its key %s", exec, s.name, key)
		}
		for _, d := range deeds {
			if d.Flow != i.ID || d.Step != s.name || d.Async != s.async {
				return fmt.Errorf("step #%d is %s (async %v), and the deed under its key %s is %v", exec, s.name, s.async, key, d)
			}
			if d.Attempt > s.attempts && !s.async {
				return fmt.Errorf("attempt %d of step #%d (%s) was handed out, and the log knows of %d", d.Attempt, exec, s.name, s.attempts)
			}
		}
	}
	return nil
}

func less(a, b client.Cursor) bool { return a.LSN < b.LSN || a.LSN == b.LSN && a.N < b.N }
