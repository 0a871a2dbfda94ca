// Package backup copies a whole store while servers work on it, to a consistent
// point: of each partition a prefix of its log with the snapshot before it, cut
// so that what one partition has noted as delivered to another is there.
//
// A backup is a store like any other: a server can be started on it, and
// restoring is the same copy in the other direction.
package backup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// Errors of Copy, to be matched with errors.Is.
var (
	// ErrNotEmpty: there are objects in the target. Nothing was written.
	ErrNotEmpty = errors.New("the target is not empty")
	// ErrUnfit: the source cannot be copied this way. Nothing was written.
	ErrUnfit = errors.New("the source is no store that can be copied")
	// ErrDamaged: something in the source is not as it was written.
	ErrDamaged = errors.New("the source is damaged; see perdure doctor store")
)

const (
	copyTries     = 10 // each after the source was trimmed under the copy
	putTries      = 3  // of a write whose outcome is unknown
	copiesAtOnce  = 4  // of table files and values
	framesAtOnce  = 8
	maxPartitions = 1000
	layoutKey     = "layout.json"
	layoutFormat  = 1
	// Unfinished is the format of the layout while the copy is under way: no
	// server starts on half a copy.
	Unfinished = 1_000_000
	nodeName   = "backup" // that owns the partitions of a copy, and has released them
)

// Progress is what was copied so far.
type Progress struct {
	Objects int64 `json:"objects"` // written
	Bytes   int64 `json:"bytes"`
}

// Options of a copy.
type Options struct {
	Rand env.Rand // required
	// Clock passes the pauses while a store is unavailable, 100 ms to 5 s. nil:
	// no pauses.
	Clock env.Clock
	// Progress is called after each object, by one goroutine at a time. nil: not.
	Progress func(Progress)
}

// Result says what a copy holds.
type Result struct {
	Progress
	Tries      int         `json:"tries"`  // 1, and one more each time a trim overtook the copy
	CutUs      int64       `json:"cut_us"` // entries up to this time by the servers' clock are in, µs since 1970
	Partitions []Partition `json:"partitions"`
}

// Partition is what a copy holds of one partition.
type Partition struct {
	ID      int    `json:"id"`
	Epoch   uint64 `json:"epoch"`    // of the copy; above all of the source
	HeadSeq uint64 `json:"head_seq"` // its log
	TailSeq uint64 `json:"tail_seq"`
	LastLSN uint64 `json:"last_lsn"` // the newest entry; 0 = none
}

// Copy copies the store from to the empty store to. Servers may work on from
// meanwhile: all that was acknowledged before the call is in the copy, and of
// what comes during it a consistent part. Nobody may use the target before the
// end; a copy that was not finished is none a server would start on, and its
// target has to be emptied by hand.
//
// Every object was read back from the target and compared. Frames, seals,
// manifests and table files were checked against their checksums.
//
// The part of each partition is cut by the time stamps of its entries. With
// several servers whose clocks are apart, or a clock that was set back, a
// message between two partitions that was delivered within that span of the cut
// may be missing at its receiver, though its sender has noted it as delivered.
func Copy(ctx context.Context, from, to blob.Store, o Options) (Result, error) {
	if o.Rand == nil {
		return Result{}, errors.New("backup: Options.Rand is missing")
	}
	c := &copier{from: patient{from, o.Clock}, to: patient{to, o.Clock}, o: o, tables: map[string]bool{}}
	if err := c.run(ctx); err != nil {
		return Result{}, fmt.Errorf("backup: %w", err)
	}
	c.result.Progress = c.done.Progress
	return c.result, nil
}

type copier struct {
	from, to blob.Store
	o        Options
	done     progress
	tables   map[string]bool // keys of table files that are in the target
	result   Result
}

// layout is what is fixed for the life of a store.
type layout struct {
	Format     int `json:"format"`
	Partitions int `json:"partitions"`
}

func (c *copier) run(ctx context.Context) error {
	l, final, err := c.readLayout(ctx)
	if err != nil {
		return err
	}
	infos, err := c.to.List(ctx, "", "", 1)
	if err != nil {
		return err
	}
	if len(infos) > 0 {
		return fmt.Errorf("%w: it has %s; name an empty prefix or folder", ErrNotEmpty, infos[0].Key)
	}
	if err := c.refuse(ctx, l.Partitions); err != nil {
		return err
	}
	token, err := c.beginLayout(ctx, l)
	if err != nil {
		return err
	}
	if err := c.values(ctx); err != nil {
		return err
	}
	if err := c.partitions(ctx, l.Partitions); err != nil {
		return err
	}
	if err := c.rest(ctx); err != nil {
		return err
	}
	// The last step makes it a store.
	if err := c.replace(ctx, layoutKey, final, token); err != nil {
		return fmt.Errorf("finish the copy: %w", err)
	}
	return nil
}

// partitions copies until no trim comes in between.
func (c *copier) partitions(ctx context.Context, n int) error {
	for try := 1; ; try++ {
		err := c.attempt(ctx, n)
		if err == nil {
			c.result.Tries = try
			return nil
		}
		var over *overtaken
		switch {
		case !errors.As(err, &over):
			return err
		case try == copyTries:
			return fmt.Errorf("given up after %d tries: either the source is trimmed faster than it can be copied, or it is damaged (see perdure doctor store): %w", try, err)
		}
	}
}

// attempt copies all partitions. Snapshots are first, since they are large; then
// the logs; and then, once it is known where to cut, the ends of the logs.
func (c *copier) attempt(ctx context.Context, n int) error {
	var parts []*partition
	for id := range n {
		p := &partition{copier: c, id: id}
		if err := p.copySnapshot(ctx); err != nil {
			return err
		}
		parts = append(parts, p)
	}
	cut := int64(0)
	for _, p := range parts {
		if err := p.begin(ctx); err != nil {
			return err
		}
		if err := p.copyLog(ctx, noCut); err != nil {
			return err
		}
		cut = max(cut, p.lastUs)
	}
	for _, p := range parts {
		if err := p.copyLog(ctx, cut); err != nil {
			return err
		}
	}
	c.result.CutUs, c.result.Partitions = cut, []Partition{}
	for _, p := range parts {
		if err := p.finish(ctx); err != nil {
			return err
		}
	}
	return nil
}

// readLayout gives the source's layout, and its bytes.
func (c *copier) readLayout(ctx context.Context) (layout, []byte, error) {
	var l layout
	o, err := c.from.Get(ctx, layoutKey)
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return l, nil, fmt.Errorf("%w: %s is missing; is it the right address and prefix?", ErrUnfit, layoutKey)
	case err != nil:
		return l, nil, err
	}
	if err := json.Unmarshal(o.Data, &l); err != nil {
		return l, nil, fmt.Errorf("%w: %s: %w", ErrDamaged, layoutKey, err)
	}
	switch {
	case l.Format == Unfinished:
		return l, nil, fmt.Errorf("%w: it is a copy that was not finished", ErrUnfit)
	case l.Format > layoutFormat:
		return l, nil, fmt.Errorf("%w: it has layout %d, this program reads up to %d: use a newer one", ErrUnfit, l.Format, layoutFormat)
	case l.Format < 1 || l.Partitions < 1 || l.Partitions > maxPartitions:
		return l, nil, fmt.Errorf("%w: %s: format %d, %d partitions", ErrDamaged, layoutKey, l.Format, l.Partitions)
	}
	return l, o.Data, nil
}

// beginLayout claims the target.
func (c *copier) beginLayout(ctx context.Context, l layout) (blob.Token, error) {
	l.Format = Unfinished
	raw, err := json.Marshal(l)
	if err != nil {
		return "", err
	}
	token, err := c.to.Put(ctx, layoutKey, raw, blob.PutOptions{IfNoneMatch: true})
	if errors.Is(err, blob.ErrPrecondition) {
		return "", fmt.Errorf("%w: somebody else began to use it just now", ErrNotEmpty)
	}
	return token, err
}
