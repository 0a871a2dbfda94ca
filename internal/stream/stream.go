// Package stream fans a flow's events out to whoever watches: committed
// events, which have a cursor, and deltas of running messages, which have none
// and are never kept. Publishing never blocks: a reader that falls behind its
// bound is closed and comes back with its cursor.
package stream

import (
	"context"
	"errors"
	"sync"

	"github.com/cespare/xxhash/v2"

	"github.com/perdure-dev/perdure/internal/wire"
)

// Why a subscription ended.
var (
	ErrSlowReader = errors.New("reader fell behind; reconnect with the last event ID")
	ErrClosed     = errors.New("stream closed")
)

// DefaultBound is the bytes a reader may fall behind.
const DefaultBound = 1 << 20

// frameOverhead is charged for each queued frame besides its payload.
const frameOverhead = 64

const shardCount = 64 // a power of two

// Delta is a piece of a message that is being written. Offset is the bytes of
// that message before it: a reader sets text = text[:Offset] + Text, which is
// right also for the first delta after a reconnect (it holds all so far, at 0)
// and after a restart of the step (it begins at 0 again).
type Delta struct {
	Scope   string
	Exec    uint64
	Attempt uint32
	Offset  int
	Text    string
}

// Item is a committed event, shared by all its readers; what they encode it to
// is made once.
type Item struct {
	Event *wire.Event
	once  sync.Once
	enc   []byte
}

// Encoded gives fn(event), calling fn for the first reader only. All readers
// of an item must pass the same function.
func (i *Item) Encoded(fn func(*wire.Event) []byte) []byte {
	i.once.Do(func() { i.enc = fn(i.Event) })
	return i.enc
}

// Frame is what a reader gets: exactly one field is set.
type Frame struct {
	Item  *Item
	Delta *Delta
	Note  any // pushed by the subscription's owner, in order with the rest
}

// Hub holds the subscriptions of one process. Safe for concurrent use.
type Hub struct {
	shards [shardCount]shard
}

type shard struct {
	mu     sync.Mutex
	topics map[string]*topic // guarded by mu; one per flow that is watched or writing
}

type topic struct {
	subs    []*Sub
	partial map[uint64]*partial // messages being written, by step execution
}

type partial struct {
	scope   string
	attempt uint32
	text    []byte
}

// NewHub makes an empty hub.
func NewHub() *Hub {
	h := &Hub{}
	for i := range h.shards {
		h.shards[i].topics = map[string]*topic{}
	}
	return h
}

func (h *Hub) shard(flow string) *shard { return &h.shards[xxhash.Sum64String(flow)&(shardCount-1)] }

func (s *shard) topic(flow string) *topic {
	t := s.topics[flow]
	if t == nil {
		t = &topic{}
		s.topics[flow] = t
	}
	return t
}

func (s *shard) release(flow string, t *topic) {
	if len(t.subs) == 0 && len(t.partial) == 0 {
		delete(s.topics, flow)
	}
}

// Subscribe begins to queue the flow's frames, the messages being written so
// far first. bound is in bytes; 0 means DefaultBound. Close it when done.
func (h *Hub) Subscribe(flow string, bound int) *Sub {
	if bound <= 0 {
		bound = DefaultBound
	}
	sub := &Sub{hub: h, flow: flow, bound: bound, wake: make(chan struct{}, 1)}
	sh := h.shard(flow)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	t := sh.topic(flow)
	t.subs = append(t.subs, sub)
	for exec, p := range t.partial {
		// Not charged: a reader that comes back to a long message would be
		// behind its bound from the start, each time.
		sub.push(Frame{Delta: &Delta{Scope: p.scope, Exec: exec, Attempt: p.attempt, Text: string(p.text)}}, 0)
	}
	return sub
}

// Publish hands committed events of a flow to its readers, in order and together.
func (h *Hub) Publish(flow string, events []*wire.Event) {
	sh := h.shard(flow)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	t := sh.topics[flow]
	if t == nil {
		return
	}
	for _, ev := range events {
		if p := t.partial[ev.Exec]; p != nil && ev.Exec != 0 {
			delete(t.partial, ev.Exec) // ended, or begins again
		}
	}
	if len(t.subs) > 0 {
		items := make([]Item, len(events))
		for i, ev := range events {
			items[i].Event = ev
		}
		for _, s := range t.subs {
			s.pushItems(items)
		}
	}
	sh.release(flow, t)
}

func eventBytes(ev *wire.Event) int {
	n := len(ev.Data) + len(ev.Type) + len(ev.Scope)
	for _, it := range ev.Items {
		n += len(it)
	}
	return n
}

// Delta appends text to the message that a step execution is writing.
func (h *Hub) Delta(flow, scope string, exec uint64, attempt uint32, text string) {
	sh := h.shard(flow)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	t := sh.topic(flow)
	p := t.partial[exec]
	if p == nil || p.attempt != attempt {
		if t.partial == nil {
			t.partial = map[uint64]*partial{}
		}
		p = &partial{scope: scope, attempt: attempt}
		t.partial[exec] = p
	}
	d := &Delta{Scope: scope, Exec: exec, Attempt: attempt, Offset: len(p.text), Text: text}
	p.text = append(p.text, text...)
	for _, s := range t.subs {
		s.push(Frame{Delta: d}, len(text))
	}
}

// Drop forgets the message a step execution was writing, for an attempt that
// ends without an event.
func (h *Hub) Drop(flow string, exec uint64) {
	sh := h.shard(flow)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if t := sh.topics[flow]; t != nil {
		delete(t.partial, exec)
		sh.release(flow, t)
	}
}

// Close ends every subscription there is with err, behind what is queued.
func (h *Hub) Close(err error) {
	for i := range h.shards {
		sh := &h.shards[i]
		sh.mu.Lock()
		for _, t := range sh.topics {
			for _, s := range t.subs {
				s.end(err)
			}
		}
		sh.mu.Unlock()
	}
}

// Watched counts the flows with a reader or a running message.
func (h *Hub) Watched() int {
	n := 0
	for i := range h.shards {
		sh := &h.shards[i]
		sh.mu.Lock()
		n += len(sh.topics)
		sh.mu.Unlock()
	}
	return n
}

// Sub is one reader's queue. Next is for one goroutine; the rest is safe for
// concurrent use.
type Sub struct {
	hub   *Hub
	flow  string
	bound int
	wake  chan struct{}

	mu    sync.Mutex
	tell  func()  // guarded by mu; takes the place of wake
	queue []Frame // guarded by mu
	spare []Frame // guarded by mu; the slice Next gave out before
	bytes int     // guarded by mu
	err   error   // guarded by mu
}

func (s *Sub) push(f Frame, size int) {
	s.mu.Lock()
	s.add(f, size)
	tell := s.tell
	s.mu.Unlock()
	s.signal(tell)
}

// pushItems queues what belongs together: a reader sees all of it or nothing.
func (s *Sub) pushItems(items []Item) {
	s.mu.Lock()
	for i := range items {
		s.add(Frame{Item: &items[i]}, eventBytes(items[i].Event))
	}
	tell := s.tell
	s.mu.Unlock()
	s.signal(tell)
}

// add queues a frame; the caller holds s.mu.
func (s *Sub) add(f Frame, size int) {
	if f.Note != nil {
		s.queue = append(s.queue, f) // the owner's own, and few: never lost to the bound
		return
	}
	if s.err != nil {
		return
	}
	s.bytes += size + frameOverhead
	if s.bytes > s.bound && len(s.queue) > 0 {
		s.err = ErrSlowReader
		return
	}
	s.queue = append(s.queue, f)
}

func (s *Sub) signal(tell func()) {
	if tell != nil {
		tell()
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Notify makes the subscription call fn each time that Next may have something
// to give without waiting, at once when it has. fn runs on the publisher's
// goroutine: it must not block nor call the hub.
func (s *Sub) Notify(fn func()) {
	s.mu.Lock()
	s.tell = fn
	ready := len(s.queue) > 0 || s.err != nil
	s.mu.Unlock()
	if ready {
		fn()
	}
}

// Ready reports whether Next would not wait.
func (s *Sub) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue) > 0 || s.err != nil
}

// Push queues a note behind the frames that are there.
func (s *Sub) Push(note any) { s.push(Frame{Note: note}, 0) }

// Next waits for frames and gives all there are, oldest first; the slice is
// valid until the next call. After an error nothing more comes. What was
// queued before the error is given first.
func (s *Sub) Next(ctx context.Context) ([]Frame, error) {
	for {
		s.mu.Lock()
		if len(s.queue) > 0 {
			out := s.queue
			clear(s.spare)
			s.queue, s.spare = s.spare[:0], out
			s.bytes = 0
			s.mu.Unlock()
			return out, nil
		}
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Close ends the subscription; it may be called more than once.
func (s *Sub) Close() {
	sh := s.hub.shard(s.flow)
	sh.mu.Lock()
	if t := sh.topics[s.flow]; t != nil {
		for i, o := range t.subs {
			if o == s {
				t.subs = append(t.subs[:i], t.subs[i+1:]...)
				break
			}
		}
		sh.release(s.flow, t)
	}
	sh.mu.Unlock()
	s.end(ErrClosed)
}

// end keeps the first reason.
func (s *Sub) end(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	tell := s.tell
	s.mu.Unlock()
	s.signal(tell)
}
