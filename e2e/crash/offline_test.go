//go:build e2e

package crash

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/oracle"
	"github.com/perdure-dev/perdure/internal/partition"
	"github.com/perdure-dev/perdure/internal/session"
	"github.com/perdure-dev/perdure/internal/state"
	"github.com/perdure-dev/perdure/internal/wire"
)

// disk is what a dead server left behind: a copy of its tables, brought up to
// the end of the journal by a replay that is not the server's own.
type disk struct {
	dir   string
	parts []*shard
}

type shard struct {
	tables *state.DB
	log    *journal.Log
	last   uint64 // LSN
	// open is what the next owner must hand out again.
	open []core.Effect
}

// readDisk copies a data directory and reads the copy.
func readDisk(data string) (*disk, error) {
	dir, err := os.MkdirTemp("", "perdure-crash-disk-")
	if err != nil {
		return nil, err
	}
	d := &disk{dir: dir}
	for i := range partitions {
		name := fmt.Sprintf("p%03d", i)
		for _, part := range []string{"journal", "tables"} {
			if err := copyTree(filepath.Join(data, name, part), filepath.Join(dir, name, part)); err != nil {
				d.close()
				return nil, err
			}
		}
		s, err := readShard(filepath.Join(dir, name))
		if err != nil {
			d.close()
			return nil, fmt.Errorf("partition %d: %w", i, err)
		}
		d.parts = append(d.parts, s)
	}
	return d, nil
}

func (d *disk) close() {
	for _, s := range d.parts {
		_ = s.log.Close() // a copy
		_ = s.tables.Close()
	}
	_ = os.RemoveAll(d.dir)
}

// copyTree copies the files of a directory that nobody writes to. One that is
// not there is an empty one.
func copyTree(from, to string) error {
	if err := os.MkdirAll(to, 0o750); err != nil {
		return err
	}
	if _, err := os.Stat(from); os.IsNotExist(err) {
		return nil
	}
	return os.CopyFS(to, os.DirFS(from))
}

func readShard(dir string) (*shard, error) {
	fs := env.Real().FS
	tables, err := state.Open(filepath.Join(dir, "tables"), state.Options{FS: fs, Outbox: true})
	if err != nil {
		return nil, err
	}
	log, err := journal.Open(fs, filepath.Join(dir, "journal"), journal.Options{})
	if err != nil {
		_ = tables.Close()
		return nil, err
	}
	s := &shard{tables: tables, log: log, last: tables.AppliedLSN()}
	if err := log.Replay(s.last+1, s.replay); err != nil {
		return s, fmt.Errorf("replay: %w", err)
	}
	err = tables.OpenFlows(func(f *wire.Flow) error {
		for _, ef := range core.Outstanding(f) {
			if ef.Kind == core.Dispatch {
				s.open = append(s.open, ef)
			}
		}
		return nil
	})
	return s, err
}

// replay brings the tables forward by one frame.
func (s *shard) replay(f journal.Frame) error {
	rows := s.tables.NewBatch()
	defer rows.Close()
	flows := map[string]*wire.Flow{}
	lsn := f.FirstLSN
	for raw, err := range journal.Entries(f.Body) {
		if err != nil {
			return err
		}
		if lsn > s.last {
			if err := s.apply(rows, flows, raw, lsn); err != nil {
				return fmt.Errorf("entry %d: %w", lsn, err)
			}
		}
		lsn++
	}
	for _, id := range slices.Sorted(maps.Keys(flows)) {
		if flows[id] != nil {
			rows.PutFlow(flows[id])
		}
	}
	s.last = max(s.last, lsn-1)
	if s.last == s.tables.AppliedLSN() {
		return nil
	}
	return rows.Commit(s.last)
}

func (s *shard) apply(rows *state.Batch, flows map[string]*wire.Flow, raw []byte, lsn uint64) error {
	e := &wire.Entry{}
	if err := e.UnmarshalVT(slices.Clone(raw)); err != nil {
		return err
	}
	if e.Lsn != lsn {
		return fmt.Errorf("it calls itself %d", e.Lsn)
	}
	f, ok := flows[e.FlowId]
	if !ok {
		var err error
		if f, err = s.tables.Flow(e.FlowId); err != nil {
			return err
		}
	}
	out, err := core.Apply(f, e)
	if err != nil {
		return err
	}
	flows[e.FlowId] = out.Flow
	for _, ev := range out.Events {
		if ev.Type == core.EventDeleted {
			rows.DeleteFlow(e.FlowId)
			continue
		}
		rows.PutEvent(e.FlowId, ev)
	}
	return nil
}

func (d *disk) of(flow string) *shard { return d.parts[partition.Of(flow, partitions)] }

// events reads a flow's log.
func (d *disk) events(flow string) (evs []*wire.Event, err error) {
	err = d.of(flow).tables.Events(flow, 0, 0, 0, func(ev *wire.Event) error {
		evs = append(evs, ev)
		return nil
	})
	return evs, err
}

// shown is an event as every client must see it: cursor and frame.
func shown(ev *wire.Event) (id, raw string) {
	name, data := session.Describe(ev)
	if name == "" {
		return "", ""
	}
	id = fmt.Sprintf("%d.%d", ev.Lsn, ev.N)
	return id, fmt.Sprintf("id: %s\nevent: %s\ndata: %s\n\n", id, name, data)
}

// check holds the ledger of one session against the disk.
func (d *disk) check(r *record, calls map[string]*toolCall) error {
	f, err := d.of(r.flow()).tables.Flow(r.flow())
	if err != nil {
		return err
	}
	evs, err := d.events(r.flow())
	if err != nil {
		return err
	}
	r.mu.Lock()
	var problems []string
	bad := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	created := slices.ContainsFunc(r.ops, func(o *op) bool { return o.kind == opCreate && o.outcome == acked })
	switch {
	case r.deleted && f != nil:
		bad("the session was deleted, and is on the disk")
	case f == nil && len(evs) > 0:
		bad("the session is gone, and left %d events", len(evs))
	case f == nil && created && !r.mayBe:
		bad("the session was acknowledged, and is not on the disk")
	case f != nil:
		r.checkFrames(evs, bad)
		r.checkInputs(f, evs, bad)
		checkTools(f, evs, calls, bad)
	}
	r.dirty = false
	r.mu.Unlock()
	if len(problems) > 0 {
		r.l.fail(r, "on the disk: %s", strings.Join(problems, "\n  "))
	}
	return nil
}

type badFunc func(format string, args ...any)

// checkFrames: what was shown is on the disk, byte by byte, and the watcher
// has seen a beginning of it without a gap.
func (r *record) checkFrames(evs []*wire.Event, bad badFunc) {
	log := map[string]string{}
	var order []string
	for _, ev := range evs {
		if id, raw := shown(ev); id != "" {
			log[id] = raw
			order = append(order, id)
		}
	}
	for id, raw := range r.seen {
		if had, ok := log[id]; !ok {
			bad("this was shown, and is not on the disk: %q", raw)
		} else if had != raw {
			bad("this was shown: %q\n  and this is on the disk: %q", raw, had)
		}
	}
	if n := len(r.watched); n > len(order) || !slices.Equal(r.watched, order[:n]) {
		bad("the watcher saw %v\n  and the log has %v", r.watched, order)
	}
}

// checkInputs: each acknowledged input is in the log exactly once, and one
// without an answer at most once.
func (r *record) checkInputs(f *wire.Flow, evs []*wire.Event, bad badFunc) {
	taken := map[string][]string{} // turns by message
	fate := map[string]int{}       // started, dropped or waiting, by turn
	take := func(turn string, payload []byte) {
		if !slices.Contains(taken[string(payload)], turn) {
			taken[string(payload)] = append(taken[string(payload)], turn)
		}
	}
	for _, ev := range evs {
		switch {
		case ev.Type == core.EventPublished:
			take(ev.Scope, ev.Data)
		case ev.Type == core.EventDropped:
			fate[ev.Scope]++
		case ev.Type == core.EventStepStarted && ev.Step == "turn" && len(ev.Items) == 1:
			take(ev.Scope, ev.Items[0])
			fate[ev.Scope]++
		}
	}
	for _, c := range f.Channels {
		for _, m := range c.Pending {
			if c.Name == "input" {
				take(m.Id, m.Payload)
				fate[m.Id]++
			}
		}
	}
	for _, o := range r.ops {
		if o.kind != opTurn {
			continue
		}
		got := taken[string(session.UserMessage(o.content()))]
		switch {
		case len(got) > 1:
			bad("one input was taken as %v: %s", got, o)
		case o.outcome == acked && len(got) == 0:
			bad("an acknowledged input is not on the disk: %s", o)
		case o.outcome == acked && got[0] != o.turn:
			bad("an input is on the disk as %s: %s", got[0], o)
		case o.outcome == acked && fate[o.turn] != 1:
			bad("an input started, waits or was dropped %d times: %s", fate[o.turn], o)
		}
	}
}

// checkTools: no tool was called before its step was durable, and each call
// that has a good result was made.
func checkTools(f *wire.Flow, evs []*wire.Event, calls map[string]*toolCall, bad badFunc) {
	started := map[uint64]bool{}
	for _, ev := range evs {
		if ev.Type == core.EventStepStarted && ev.Step == "tool" {
			started[ev.Exec] = true
		}
		if ev.Type != "tool.completed" || !strings.Contains(string(ev.Data), `"is_error":false`) {
			continue
		}
		if key := fmt.Sprintf("%s-%d", f.RunId, ev.Exec); calls[key] == nil {
			bad("tool step %d has a result, and the tool was not called with key %s", ev.Exec, key)
		}
	}
	for key, c := range calls {
		if c.run == f.RunId && !started[c.exec] {
			bad("the tool was called with key %s, and the step is not on the disk", key)
		}
	}
}

// judge tells the oracle of everything; settled says that all work has ended.
func (d *disk) judge(records []*record, settled bool) error {
	o := oracle.New()
	flows := map[string]*wire.Flow{}
	for _, r := range records {
		f, err := d.of(r.flow()).tables.Flow(r.flow())
		if err != nil {
			return err
		}
		evs, err := d.events(r.flow())
		if err != nil {
			return err
		}
		run := "gone"
		if f != nil {
			flows[r.flow()], run = f, f.RunId
		}
		for _, ev := range evs {
			o.Event(r.flow(), ev)
		}
		r.testify(o, run)
	}
	if settled {
		o.Settled(flows)
	} else {
		o.Final(flows)
	}
	return o.Err()
}

// testify tells the oracle what the session's client asked for.
func (r *record) testify(o *oracle.Oracle, run string) {
	kinds := map[kind]oracle.Kind{opCreate: oracle.Start, opTurn: oracle.Publish, opCancel: oracle.Cancel, opDelete: oracle.Delete}
	policies := map[string]oracle.OnBusy{"enqueue": oracle.Enqueue, "reject": oracle.Reject, "interrupt": oracle.Interrupt}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, op := range r.ops {
		said := oracle.Op{Kind: kinds[op.kind], FlowID: r.flow(), From: op.from, To: op.to, RequestID: op.key}
		switch op.kind {
		case opTurn:
			said.Payload, said.OnBusy = session.UserMessage(op.content()), policies[op.policy]
		case opCancel:
			said.Scope = op.turn
		}
		switch op.outcome {
		case acked:
			if said.RunID = run; op.kind == opTurn {
				said.MessageID = op.turn
			}
			o.Acked(said)
		case doubt:
			o.Sent(said)
		}
	}
}

// checkTakeUp: the first entries that the next owner wrote hand out again
// exactly what the former left open.
func (d *disk) checkTakeUp(before *disk) error {
	for i, s := range d.parts {
		was := before.parts[i]
		want := map[string]bool{}
		for _, ef := range was.open {
			want[fmt.Sprintf("%s step %d attempt %v", ef.FlowID, ef.Exec, ef.Attempt)] = true
		}
		n := len(want)
		if s.last < was.last {
			return fmt.Errorf("partition %d ends at entry %d, and ended at %d before", i, s.last, was.last)
		}
		if n == 0 || s.last == was.last || s.log.FirstLSN() > was.last+1 {
			continue // nothing to see, or trimmed since
		}
		err := s.log.Replay(was.last+1, func(f journal.Frame) error {
			lsn := f.FirstLSN
			for raw, err := range journal.Entries(f.Body) {
				if err != nil {
					return err
				}
				if lsn > was.last && lsn <= was.last+uint64(n) {
					if err := takeUp(want, raw, lsn); err != nil {
						return err
					}
				}
				lsn++
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("partition %d: %w", i, err)
		}
		if missing := len(want); s.last >= was.last+uint64(n) && missing > 0 {
			return fmt.Errorf("partition %d: not handed out again: %v", i, slices.Sorted(maps.Keys(want)))
		}
	}
	return nil
}

func takeUp(want map[string]bool, raw []byte, lsn uint64) error {
	e := &wire.Entry{}
	if err := e.UnmarshalVT(slices.Clone(raw)); err != nil {
		return err
	}
	c := e.GetRedispatch()
	if c == nil {
		return fmt.Errorf("entry %d of %q is %T, and %v were to be handed out again first", lsn, e.FlowId, e.Command, slices.Sorted(maps.Keys(want)))
	}
	got := fmt.Sprintf("%s step %d attempt %v", e.FlowId, c.Exec, core.Attempt{Epoch: c.Attempt.Epoch, LSN: c.Attempt.Lsn, N: c.Attempt.N})
	if !want[got] {
		return fmt.Errorf("entry %d hands out %s again, open were %v", lsn, got, slices.Sorted(maps.Keys(want)))
	}
	delete(want, got)
	return nil
}
