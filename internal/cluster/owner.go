package cluster

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
)

const (
	// takeRounds bounds the tries of one Take: with a clock about a minute.
	takeRounds = 64
	// changeRounds bounds the tries of one Advance or Release.
	changeRounds = 4

	firstTakePause, maxTakePause = 50 * time.Millisecond, time.Second
)

// Manifest says who owns a partition and which part of its log is alive.
type Manifest struct {
	Format  int    `json:"format"`  // 0: of an earlier version, with the epoch alone
	Epoch   uint64 `json:"epoch"`   // one more at each Take
	Node    string `json:"node"`    // the owner's ID
	Address string `json:"address"` // where the owner is reached; may be empty
	Nonce   string `json:"nonce"`   // of the Take that made this epoch
	// Window is the most batches that any epoch so far may have had in flight.
	Window int `json:"window"`
	// HeadSeq and HeadLSN begin the log: everything before is in a verified
	// snapshot and may be gone, nothing from here on is ever deleted.
	HeadSeq uint64 `json:"head_seq"`
	HeadLSN uint64 `json:"head_lsn"`
	// Released: the owner stopped for good with nothing in flight, and TailSeq
	// is the next sequence number of the log.
	Released bool   `json:"released"`
	TailSeq  uint64 `json:"tail_seq"`
}

// OwnerKey is the key of a partition's manifest.
func OwnerKey(partition int) string { return fmt.Sprintf("p%03d/owner.json", partition) }

// DecodeManifest reads what is stored under key. Errors: ErrTooNew, ErrDamaged.
func DecodeManifest(key string, data []byte) (Manifest, error) {
	var m Manifest
	format, err := decodeRecord(key, data, &m)
	if err != nil {
		return Manifest{}, err
	}
	if format == 0 {
		if m.Epoch == 0 || m != (Manifest{Epoch: m.Epoch}) {
			return Manifest{}, damaged(key, errors.New("neither a manifest nor the epoch of an earlier version"))
		}
		return Manifest{Epoch: m.Epoch, HeadSeq: 1, HeadLSN: 1}, nil
	}
	if err := m.check(); err != nil {
		return Manifest{}, damaged(key, err)
	}
	return m, nil
}

func (m Manifest) check() error {
	switch {
	case m.Epoch == 0:
		return errors.New("epoch 0")
	case m.Window < 0 || m.Window > MaxWindow:
		return fmt.Errorf("window %d, want 0 to %d", m.Window, MaxWindow)
	case m.HeadSeq == 0 || m.HeadLSN == 0:
		return fmt.Errorf("head at sequence %d, LSN %d: both begin at 1", m.HeadSeq, m.HeadLSN)
	case m.Released && m.TailSeq < m.HeadSeq:
		return fmt.Errorf("released with tail %d before head %d", m.TailSeq, m.HeadSeq)
	case !m.Released && m.TailSeq != 0:
		return fmt.Errorf("tail %d, but not released", m.TailSeq)
	}
	return errors.Join(checkNode(m.Node), checkText("address", m.Address), checkNonce(m.Nonce))
}

// Read is a partition's manifest, for those who follow its log. Without one the
// error is blob.ErrNotFound: nobody has owned the partition yet.
func Read(ctx context.Context, store blob.Store, partition int) (Manifest, error) {
	m, _, err := readManifest(ctx, store, OwnerKey(partition))
	return m, err
}

func readManifest(ctx context.Context, store blob.Store, key string) (Manifest, blob.Token, error) {
	obj, err := store.Get(ctx, key)
	if err != nil {
		return Manifest{}, "", fmt.Errorf("cluster: read %s: %w", key, err)
	}
	m, err := DecodeManifest(key, obj.Data)
	return m, obj.Token, err
}

// Claim is what a new owner says about itself.
type Claim struct {
	Node    string
	Address string // may be empty
	Window  int    // the most batches it will have in flight
	Rand    env.Rand
	// Valid says whether the lease still holds; it is asked right before each write,
	// so that a process that was stopped after its election does not take partitions
	// from the one that was elected since. nil: always.
	Valid func() bool
	// Clock passes the pauses while the store is unavailable, 50 ms to 1 s. nil:
	// no pauses.
	Clock env.Clock
}

// Take makes the caller the owner of a partition, in a new epoch. It does not ask
// whether the former owner lives: that is the caller's matter, and whoever
// writes in a former epoch is fenced by the log's seal.
//
// It tries again while the store is unavailable, at most 64 times or until ctx
// ends. ErrFenced: another one took the partition at the same time.
func Take(ctx context.Context, store blob.Store, partition int, c Claim) (*Owned, error) {
	next := Manifest{Format: recordFormat, Epoch: 1, Node: c.Node, Address: c.Address, Nonce: newNonce(c.Rand), Window: c.Window, HeadSeq: 1, HeadLSN: 1}
	if err := next.check(); err != nil {
		return nil, fmt.Errorf("%w: take partition %d: %w", ErrInvalid, partition, err)
	}
	t := take{store: store, key: OwnerKey(partition), claim: next, valid: c.Valid}
	wait := firstTakePause
	for {
		done, err := t.round(ctx)
		switch {
		case done:
			return &Owned{store: store, key: t.key, former: t.former, turn: make(chan struct{}, 1), m: t.next, token: t.token}, nil
		case err == nil:
			continue // somebody changed the manifest: look at once
		case !settles(err) || t.rounds >= takeRounds:
			return nil, fmt.Errorf("take partition %d: %w", partition, err)
		}
		if perr := pause(ctx, c.Clock, wait); perr != nil {
			return nil, fmt.Errorf("take partition %d: %w (last answer: %w)", partition, perr, err)
		}
		wait = min(2*wait, maxTakePause)
	}
}

// take is one Take on its way.
type take struct {
	store  blob.Store
	key    string
	claim  Manifest
	valid  func() bool // nil: always
	rounds int
	former Manifest // what next is made of
	next   Manifest // what was written, with token once that is known
	token  blob.Token
}

// round reads and writes once. Neither done nor an error: the compare-and-swap
// was lost, and the next round's read tells to whom.
func (t *take) round(ctx context.Context) (done bool, err error) {
	t.rounds++
	cur, token, err := readManifest(ctx, t.store, t.key)
	put := blob.PutOptions{IfMatch: token}
	switch {
	case errors.Is(err, blob.ErrNotFound):
		cur, put = Manifest{}, blob.PutOptions{IfNoneMatch: true}
	case err != nil:
		return false, err
	case cur.Epoch == math.MaxUint64:
		return false, fmt.Errorf("%w: %s: no epoch is left", ErrDamaged, t.key)
	}
	if t.next.Epoch > 0 { // not the first look
		switch {
		case cur == t.next:
			t.token = token // the write of a former round has landed
			return true, nil
		case cur.Epoch != t.former.Epoch:
			return false, fmt.Errorf("%w: node %q took epoch %d at the same time", ErrFenced, cur.Node, cur.Epoch)
		}
	}
	t.former, t.next = cur, t.claim
	t.next.Epoch = cur.Epoch + 1
	if objectlog.PlantReuseEpoch && cur.Epoch > 0 {
		t.next.Epoch = cur.Epoch
	}
	if cur.Epoch > 0 {
		t.next.Window = max(cur.Window, t.claim.Window)
		t.next.HeadSeq, t.next.HeadLSN = cur.HeadSeq, cur.HeadLSN
	}
	if t.valid != nil && !t.valid() {
		return false, ErrLost
	}
	t.token, err = t.store.Put(ctx, t.key, encodeRecord(t.next), put)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, blob.ErrPrecondition) && t.rounds < takeRounds:
		return false, nil
	}
	return false, fmt.Errorf("write %s: %w", t.key, err)
}

// Owned is a partition's manifest in the hands of its owner. Its methods are safe
// for concurrent use.
type Owned struct {
	store  blob.Store
	key    string
	former Manifest
	turn   chan struct{} // holds one while a request is on its way

	mu     sync.Mutex // guards what follows
	m      Manifest
	token  blob.Token
	fenced error
}

// Former is the manifest that was taken over, with epoch 0 if there was none. A
// released one says where the tail of the log is.
func (o *Owned) Former() Manifest { return o.former }

// Manifest is the manifest as last known.
func (o *Owned) Manifest() Manifest {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.m
}

// Advance moves the head: from now on everything before seq and lsn may be
// deleted, so it is called first. A head that is there already, or further on,
// is left as it is. Of errors that match blob.ErrUnavailable or blob.ErrAmbiguous
// the head may have been moved or not: call it again later, delete nothing.
func (o *Owned) Advance(ctx context.Context, seq, lsn uint64) error {
	return o.change(ctx, func(m *Manifest) (bool, error) {
		if seq <= m.HeadSeq {
			return false, nil
		}
		if lsn < m.HeadLSN {
			return false, fmt.Errorf("%w: head at sequence %d, LSN %d after sequence %d, LSN %d", ErrInvalid, seq, lsn, m.HeadSeq, m.HeadLSN)
		}
		if m.Released {
			return false, ErrReleased
		}
		m.HeadSeq, m.HeadLSN = seq, lsn
		return true, nil
	})
}

// Release says that this owner has stopped for good, with nothing in flight and
// tailSeq the next sequence number. Errors as of Advance; without it the next
// owner only has to search for the tail.
func (o *Owned) Release(ctx context.Context, tailSeq uint64) error {
	return o.change(ctx, func(m *Manifest) (bool, error) {
		switch {
		case m.Released && m.TailSeq == tailSeq:
			return false, nil
		case m.Released:
			return false, ErrReleased
		case tailSeq < m.HeadSeq:
			return false, fmt.Errorf("%w: tail %d before head %d", ErrInvalid, tailSeq, m.HeadSeq)
		}
		m.Released, m.TailSeq = true, tailSeq
		return true, nil
	})
}

// change writes what edit makes of the manifest. edit reports whether anything is
// to be written; it is called again when the store holds another manifest of
// this owner than was known, which a lost answer leaves behind.
func (o *Owned) change(ctx context.Context, edit func(*Manifest) (bool, error)) error {
	if err := o.enter(ctx); err != nil {
		return err
	}
	defer o.leave()
	var last error
	for range changeRounds {
		next, token, err := o.known()
		if err != nil {
			return err
		}
		if needed, err := edit(&next); err != nil || !needed {
			return err
		}
		token, err = o.store.Put(ctx, o.key, encodeRecord(next), blob.PutOptions{IfMatch: token})
		if err == nil {
			o.learn(next, token)
			return nil
		}
		last = fmt.Errorf("cluster: write %s: %w", o.key, err)
		if !errors.Is(err, blob.ErrPrecondition) && !errors.Is(err, blob.ErrAmbiguous) {
			return last
		}
		if err := o.reload(ctx); errors.Is(err, blob.ErrUnavailable) {
			return fmt.Errorf("%w: %w", blob.ErrAmbiguous, err)
		} else if err != nil {
			return err
		}
	}
	return last
}

// Confirm asks the store whether this still is the owner: nil or ErrFenced. Any
// other error means that it is not known.
func (o *Owned) Confirm(ctx context.Context) error {
	if err := o.enter(ctx); err != nil {
		return err
	}
	defer o.leave()
	if _, _, err := o.known(); err != nil {
		return err
	}
	return o.reload(ctx)
}

// enter waits until no other request of this owner is on its way.
func (o *Owned) enter(ctx context.Context) error {
	select {
	case o.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cluster: use %s: %w", o.key, ctx.Err())
	}
}

func (o *Owned) leave() { <-o.turn }

// reload learns what the store holds, or that it is no longer this owner's.
func (o *Owned) reload(ctx context.Context) error {
	m, token, err := readManifest(ctx, o.store, o.key)
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return fmt.Errorf("%w: %s is gone while it was owned: somebody deleted it", ErrDamaged, o.key)
	case err != nil:
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if m.Epoch != o.m.Epoch || m.Node != o.m.Node || m.Nonce != o.m.Nonce {
		o.fenced = fmt.Errorf("%w: %s is of node %q, epoch %d, no longer of epoch %d", ErrFenced, o.key, m.Node, m.Epoch, o.m.Epoch)
		return o.fenced
	}
	o.m, o.token = m, token
	return nil
}

func (o *Owned) known() (Manifest, blob.Token, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.m, o.token, o.fenced
}

func (o *Owned) learn(m Manifest, token blob.Token) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.m, o.token = m, token
}
