package objectlog

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/perdure-dev/perdure/internal/blob"
)

const (
	// deleters is how many deletes of a log are under way at once.
	deleters = 8
	// maxUndeleted bounds what is remembered of deletes that failed; the rest is
	// found by the sweep of the next owner.
	maxUndeleted = 1 << 20
)

// Trim gives up the entries up to and including upTo, which the caller has
// elsewhere, verified; the newest frame stays, see Index.Head. It moves the head in the manifest and then has the
// frames below it deleted in the background; seals stay. nil means that the
// head is durable, or that there was nothing to give up. Deletes that fail are
// counted and made again by the next Trim.
func (l *Log) Trim(upTo uint64) error {
	if l.o.Advance == nil {
		return nil
	}
	l.trimming.Lock()
	defer l.trimming.Unlock()
	l.mu.Lock()
	if l.closed || l.w == nil {
		l.mu.Unlock()
		return fmt.Errorf("objectlog: trim %s: %w", l.o.Prefix, ErrNotReplayed)
	}
	next, _ := l.w.Settled()
	seq, lsn := l.index.Head(upTo, next)
	moves := lsn > l.headLSN
	l.mu.Unlock()
	if moves {
		if err := l.o.Advance(l.ctx, seq, lsn); err != nil {
			return fmt.Errorf("objectlog: move the head of %s to sequence %d: %w", l.o.Prefix, seq, err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if moves {
		l.doomed = append(l.doomed, l.index.Cut(seq)...)
		l.headSeq, l.headLSN = seq, lsn
	}
	if l.closed || l.swept && len(l.doomed) == 0 || l.deleting {
		return nil
	}
	l.deleting = true
	doomed, sweep, head := l.doomed, !l.swept, l.headSeq
	l.doomed = nil
	l.start(func() { l.delete(doomed, sweep, head) })
	return nil
}

// delete removes what is below head. l.deleting is the caller's.
func (l *Log) delete(doomed []uint64, sweep bool, head uint64) {
	var swept bool
	if sweep {
		var err error
		if doomed, err = l.sweep(head); err != nil {
			l.warn("list what earlier trims left", err)
		}
		swept = err == nil
	}
	failed := l.deleteAll(doomed)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deleting = false
	l.swept = l.swept || swept
	if len(failed) <= maxUndeleted-len(l.doomed) {
		l.doomed = append(l.doomed, failed...)
	} else {
		l.swept = false
	}
}

// sweep lists what is below head and may go: what this owner has given up just
// now, and what trims of former ones did not get to.
func (l *Log) sweep(head uint64) ([]uint64, error) {
	var doomed []uint64
	end := Key(l.o.Prefix, head)
	for after := ""; ; {
		infos, err := l.o.Store.List(l.ctx, KeyPrefix(l.o.Prefix), after, blob.MaxList)
		if err != nil {
			return doomed, err
		}
		doomed = append(doomed, Sweep(l.o.Prefix, infos, head)...)
		if len(infos) < blob.MaxList || infos[len(infos)-1].Key >= end || len(doomed) >= maxUndeleted {
			return doomed, nil
		}
		after = infos[len(infos)-1].Key
	}
}

// deleteAll deletes with several requests at once, and gives back what failed.
func (l *Log) deleteAll(doomed []uint64) (failed []uint64) {
	var mu sync.Mutex // guards next, failed, last
	next := 0
	var last error
	var wg sync.WaitGroup
	for range min(deleters, len(doomed)) {
		wg.Add(1)
		l.o.Go(func() {
			defer wg.Done()
			for {
				mu.Lock()
				if next == len(doomed) {
					mu.Unlock()
					return
				}
				seq := doomed[next]
				next++
				mu.Unlock()
				if err := l.o.Store.Delete(l.ctx, Key(l.o.Prefix, seq), blob.DeleteOptions{}); err != nil {
					mu.Lock()
					failed, last = append(failed, seq), err
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	l.mu.Lock()
	l.stats.Deletes += uint64(len(doomed) - len(failed))
	l.stats.DeleteErrors += uint64(len(failed))
	l.mu.Unlock()
	if last != nil {
		l.warn("delete trimmed frames; the next trim does it again", last)
	}
	return failed
}

func (l *Log) warn(what string, err error) {
	if !errors.Is(err, context.Canceled) {
		l.o.Log.Warn("object log: could not "+what, "prefix", l.o.Prefix, "error", err)
	}
}
