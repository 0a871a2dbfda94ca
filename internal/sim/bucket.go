package sim

import (
	"bytes"
	"context"
	"fmt"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

// bucket is the object store that all machines share. A request, what it does, and
// its answer are events; requests and answers may be late or lost, and a request
// may do its work long after its sender has given up or died.
type bucket struct {
	w      *world
	inner  *mem.Store
	judges []*judge // by partition; they see every change

	busyUs int64 // it refuses many requests before
	puts   int
}

func newBucket(w *world) *bucket {
	b := &bucket{w: w, inner: mem.New(mem.Options{})}
	for i := range w.p.partitions {
		b.judges = append(b.judges, newJudge(w, b, i))
	}
	return b
}

// storeCall is one request; key is the prefix of a list.
type storeCall struct {
	kind  blob.Kind
	key   string
	data  []byte // not changed any more
	put   blob.PutOptions
	del   blob.DeleteOptions
	after string
	limit int
}

type storeAnswer struct {
	obj  blob.Object // of a Put its token
	list []blob.Info
	err  error
}

func (q *storeCall) writes() bool { return q.kind == blob.KindPut || q.kind == blob.KindDelete }

// noAnswer is what the sender knows when no answer came.
func (q *storeCall) noAnswer() storeAnswer {
	err := blob.ErrUnavailable
	if q.writes() {
		err = blob.ErrAmbiguous
	}
	return storeAnswer{err: fmt.Errorf("%w: %s %s: no answer", err, q.kind, q.key)}
}

func (q *storeCall) refused(why string) storeAnswer {
	return storeAnswer{err: fmt.Errorf("%w: %s %s: %s", blob.ErrUnavailable, q.kind, q.key, why)}
}

// ask makes a request; done is an event of the process, if that lives so long.
func (n *node) ask(q storeCall, done func(storeAnswer)) {
	b, w, r := n.w.bucket, n.w, n.w.rng
	if q.kind == blob.KindPut {
		b.puts++
	}
	there, back := r.between(w.p.storeUs/4, w.p.storeUs), r.between(w.p.storeUs/4, w.p.storeUs)
	answer := func(us int64, a storeAnswer) { n.inLife(us, func() { done(a) }) }
	roll := r.intn(1000)
	switch {
	case w.calm:
	case n.m.cutUs > w.nowUs:
		if roll < 400 {
			answer(there, q.refused("connection refused"))
			return
		}
		if q.writes() && roll < 700 {
			w.fault("store-late")
			b.land(r.between(0, 4_000_000), q, nil)
		}
		answer(w.p.giveUpUs, q.noAnswer())
		return
	case b.busyUs > w.nowUs && roll < 600, roll < 2*w.p.storeFaults:
		w.fault("store-refused")
		answer(there+back, q.refused("slow down"))
		return
	case roll < 4*w.p.storeFaults:
		w.fault("store-lost")
		answer(w.p.giveUpUs, q.noAnswer())
		return
	case roll < 6*w.p.storeFaults:
		w.fault("store-answer-lost")
		b.land(there, q, nil)
		answer(w.p.giveUpUs, q.noAnswer())
		return
	case roll < 8*w.p.storeFaults:
		w.fault("store-late")
		b.land(r.between(0, 6_000_000), q, nil)
		answer(w.p.giveUpUs, q.noAnswer())
		return
	}
	b.land(there, q, func(a storeAnswer) { answer(back, a) })
}

// land lets a request do its work after a while.
func (b *bucket) land(us int64, q storeCall, then func(storeAnswer)) {
	b.w.after(us, func() {
		a := b.do(q)
		if then != nil {
			then(a)
		}
	})
}

// do is the store's work; the judges are told of changes.
func (b *bucket) do(q storeCall) (a storeAnswer) {
	ctx := context.Background()
	switch q.kind {
	case blob.KindGet:
		a.obj, a.err = b.inner.Get(ctx, q.key)
	case blob.KindList:
		a.list, a.err = b.inner.List(ctx, q.key, q.after, q.limit)
	case blob.KindPut:
		before, _ := b.inner.Get(ctx, q.key)
		if a.obj.Token, a.err = b.inner.Put(ctx, q.key, q.data, q.put); a.err == nil && !bytes.Equal(before.Data, q.data) {
			for _, j := range b.judges {
				j.put(q.key, q.data)
			}
		}
	case blob.KindDelete:
		if a.err = b.inner.Delete(ctx, q.key, q.del); a.err == nil {
			for _, j := range b.judges {
				j.deleted(q.key)
			}
		}
	}
	return a
}

// owned reports whether the node may write all logs, by what the store holds.
func (b *bucket) owned(n *node) bool {
	for i, j := range b.judges {
		if j.epoch != n.parts[i].epoch {
			return false
		}
	}
	return true
}

func (b *bucket) cut(m *machine, us int64) { m.cutUs = max(m.cutUs, b.w.nowUs+us) }

// calm ends the outages.
func (b *bucket) calm() {
	b.busyUs = 0
	for _, m := range b.w.machines {
		m.cutUs = 0
	}
}
