package partition

import (
	"fmt"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Recovery says what Open found.
type Recovery struct {
	Frames, Entries uint64
	OpenFlows       int
	Redispatched    int
	Timers          int
	Queued          int
	Sends           int
}

// Open makes a Machine: it replays the journal's frames that the tables lack,
// takes up the timers, and proposes each started step again as a new attempt,
// since the worker that had it is gone. Drive the machine afterwards to commit
// those.
func Open(cfg Config) (*Machine, Recovery, error) {
	return Follow(cfg).TakeOver(cfg)
}

// Follower keeps the tables of a partition that another process owns close behind
// its journal. All methods are for one caller at a time.
type Follower struct {
	m   *Machine
	rec Recovery
}

// Follow begins where cfg.Tables end. Of cfg only ID, Env, Tables and the bounds
// are used.
func Follow(cfg Config) *Follower {
	cfg.setDefaults()
	m := &Machine{cfg: cfg, byType: map[string]uint64{}, byStep: map[StepOf]uint64{}}
	m.hot.byID = map[string]*hotFlow{}
	m.committed = cfg.Tables.AppliedLSN()
	m.nextLSN = m.committed + 1
	return &Follower{m: m}
}

// NextLSN is the first entry that the tables lack.
func (f *Follower) NextLSN() uint64 { return f.m.nextLSN }

// Apply takes the next frame of the journal; entries that the tables have are
// passed over. After an error the tables are as far as the frames before.
func (f *Follower) Apply(frame journal.Frame) error {
	if err := f.m.replay(frame, &f.rec); err != nil {
		return err
	}
	return f.m.caughtUp()
}

// TakeOver makes the follower the owner, whose epoch cfg has: it replays what is
// left of cfg.Log, and goes on as Open says. The follower is used up. cfg.Tables
// are those it was made with.
func (f *Follower) TakeOver(cfg Config) (*Machine, Recovery, error) {
	cfg.setDefaults()
	m := f.m
	m.cfg = cfg
	from := m.nextLSN
	if m.lastUs == 0 && m.committed > 0 && m.committed >= cfg.Log.FirstLSN() {
		from = m.committed // its time is needed, see replay
	}
	err := cfg.Log.Replay(from, func(frame journal.Frame) error {
		if frame.Epoch > cfg.Epoch {
			return fmt.Errorf("frame %d is of epoch %d, newer than this owner's %d", frame.Seq, frame.Epoch, cfg.Epoch)
		}
		return m.replay(frame, &f.rec)
	})
	if err == nil {
		err = m.caughtUp()
	}
	if err != nil {
		return nil, f.rec, fmt.Errorf("partition %d: replay journal: %w", cfg.ID, err)
	}
	m.nextSeq = cfg.Log.NextSeq()
	if err := m.takeUp(&f.rec); err != nil {
		return nil, f.rec, fmt.Errorf("partition %d: %w", cfg.ID, err)
	}
	return m, f.rec, nil
}

// Bounds of what is replayed before it is written: a flow that many entries change
// is written once for all of them.
const (
	maxCatchUpEntries = 16 << 10
	maxCatchUpBytes   = 8 << 20
)

// replay applies one frame by the way of the living: same Apply, same rows.
// Effects are dropped; what is not finished is Outstanding afterwards. Rows are
// written now and then: see caughtUp.
func (m *Machine) replay(f journal.Frame, rec *Recovery) error {
	if f.FirstLSN > m.nextLSN {
		return fmt.Errorf("the journal goes on at entry %d but the tables end at %d: restore the newest snapshot first", f.FirstLSN, m.nextLSN-1)
	}
	if m.building == nil {
		m.building = newBatch(m.nextLSN)
	}
	b, before := m.building, m.building.count
	lsn := f.FirstLSN
	for raw, err := range journal.Entries(f.Body) {
		if err != nil {
			return err
		}
		if lsn+1 == m.nextLSN {
			// In the tables already; but time goes on from here, also when the
			// machine's clock was set back while nobody ran.
			if err := m.resumeTime(raw); err != nil {
				return err
			}
		}
		if lsn >= m.nextLSN {
			if err := m.replayEntry(b, raw, lsn); err != nil {
				return err
			}
			m.nextLSN = lsn + 1
			m.catchUpBytes += len(raw)
			rec.Entries++
		}
		lsn++
	}
	if b.count > before {
		rec.Frames++
	}
	if b.count >= maxCatchUpEntries || m.catchUpBytes >= maxCatchUpBytes {
		return m.caughtUp()
	}
	return nil
}

// caughtUp writes what was replayed.
func (m *Machine) caughtUp() error {
	b := m.building
	m.building, m.catchUpBytes = nil, 0
	if b == nil || b.count == 0 {
		return nil
	}
	b.rows = m.cfg.Tables.NewBatch()
	b.encodeRows()
	m.committed = b.lastLSN()
	err := b.rows.Commit(m.committed)
	b.rows.Close()
	if err != nil {
		return fmt.Errorf("write tables: %w", err)
	}
	b.untouch(m)
	return nil
}

func (m *Machine) resumeTime(raw []byte) error {
	e := &wire.Entry{}
	if err := e.UnmarshalVT(raw); err != nil {
		return fmt.Errorf("entry %d: %w", m.nextLSN-1, err)
	}
	m.lastUs = max(m.lastUs, e.TimeUs)
	return nil
}

func (m *Machine) replayEntry(b *batch, raw []byte, lsn uint64) error {
	e := &wire.Entry{}
	if err := e.UnmarshalVT(raw); err != nil {
		return fmt.Errorf("entry %d: %w", lsn, err)
	}
	if e.Lsn != lsn {
		return fmt.Errorf("entry at %d calls itself %d", lsn, e.Lsn)
	}
	h, err := m.load(e.FlowId)
	if err != nil {
		return err
	}
	out, err := core.Apply(h.flow, e)
	if err != nil {
		return fmt.Errorf("entry %d was accepted once and is refused now: %w", lsn, err)
	}
	m.lastUs = max(m.lastUs, e.TimeUs)
	m.changed(h, lsn, out)
	b.count++
	b.touch(h)
	b.gates = append(b.gates, gate{lsn: lsn, hot: h, flowID: e.FlowId, events: out.Events, removed: out.Removed, private: closes(out), quiet: out.Flow.GetQuiet()})
	return nil
}

// takeUp starts from what is outstanding, by state alone.
func (m *Machine) takeUp(rec *Recovery) error {
	var again []*wire.Entry
	err := m.cfg.Tables.OpenFlows(func(f *wire.Flow) error {
		rec.OpenFlows++
		for _, ef := range core.Outstanding(f) {
			switch ef.Kind {
			case core.SetTimer:
				rec.Timers++
				m.timers.add(ef.AtUs, ef.FlowID, ef.Exec)
			case core.Queue:
				rec.Queued++
				m.cfg.Executor.Queue(ef)
			case core.Send:
				rec.Sends++
				m.cfg.Outbox.Send(ef.FlowID, ef.Out)
			case core.Dispatch:
				rec.Redispatched++
				again = append(again, &wire.Entry{FlowId: ef.FlowID, Command: &wire.Entry_Redispatch{Redispatch: &wire.Redispatch{
					Exec: ef.Exec, Attempt: ef.Attempt.Wire(), Reason: "the server restarted"}}})
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read open flows: %w", err)
	}
	for _, e := range again {
		m.Propose(Proposal{Entry: e})
	}
	return m.err
}
