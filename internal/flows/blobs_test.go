package flows

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// pieces gives data in pieces of n bytes.
func pieces(data []byte, n int) func() ([]byte, error) {
	return func() ([]byte, error) {
		if len(data) == 0 {
			return nil, io.EOF
		}
		p := data[:min(n, len(data))]
		data = data[len(p):]
		return p, nil
	}
}

func (w *world) put(id string, data []byte) *wire.BlobRef {
	w.t.Helper()
	ref, err := w.svc.PutBlob(w.ctx, tenant, id, "", pieces(data, chunkSize))
	if err != nil {
		w.t.Fatal(err)
	}
	return ref
}

func (w *world) getBlob(id, ref string) ([]byte, error) {
	var got []byte
	err := w.svc.GetBlob(w.ctx, tenant, &wire.BlobRef{FlowId: id, Blob: ref}, func(p []byte) error {
		if len(p) == 0 || len(p) > chunkSize {
			w.t.Errorf("a piece of %d bytes", len(p))
		}
		got = append(got, p...)
		return nil
	})
	return got, err
}

func (w *world) objects() int {
	w.t.Helper()
	found, err := w.store.List(w.ctx, blobPrefix, "", blob.MaxList)
	if err != nil {
		w.t.Fatal(err)
	}
	return len(found)
}

func code(err error) core.Code {
	if err == nil {
		return ""
	}
	return core.Code(Wire(err).Code)
}

func TestBlobsComeBackAsTheyWerePut(t *testing.T) {
	w := newWorld(t)
	for _, size := range []int{0, 1, chunkSize, partSize, partSize + 1, 2*partSize - 1, 3 * partSize} {
		data := bytes.Repeat([]byte("0123456789abcdefg"), size/17+1)[:size]
		ref := w.put("a", data)
		if ref.Size != uint64(size) || ref.FlowId != "a" {
			t.Errorf("%d bytes: got %v", size, ref)
		}
		got, err := w.getBlob("a", ref.Blob)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: got %d, %v", size, len(got), err)
		}
		if _, err := w.getBlob("b", ref.Blob); code(err) != BlobMissing {
			t.Errorf("another flow gets it: %v", err)
		}
		if err := w.svc.GetBlob(w.ctx, "u", ref, nil); code(err) != BlobMissing {
			t.Errorf("another tenant gets it: %v", err)
		}
	}
}

func TestBlobRefusals(t *testing.T) {
	w := newWorld(t)
	piece := make([]byte, 1<<20)
	sent := 0
	_, err := w.svc.PutBlob(w.ctx, tenant, "a", "", func() ([]byte, error) { sent++; return piece, nil })
	if code(err) != TooLarge || sent != MaxBlob>>20+1 {
		t.Errorf("an endless blob: %v after %d pieces", err, sent)
	}
	broken := errors.New("connection reset")
	if _, err := w.svc.PutBlob(w.ctx, tenant, "a", "", func() ([]byte, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	for _, id := range []string{"", "x", "../../x", strings.Repeat("0", 46)} {
		if _, err := w.getBlob("a", id); code(err) != Invalid {
			t.Errorf("%q: %v", id, err)
		}
	}
	if _, err := w.svc.PutBlob(w.ctx, tenant, "", "", nil); code(err) != Invalid {
		t.Errorf("got %v", err)
	}
	ref := w.put("a", []byte("1"))
	if err := w.svc.GetBlob(w.ctx, tenant, ref, func([]byte) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	w.svc.blobs.moving = newBound(0)
	if _, err := w.svc.PutBlob(w.ctx, tenant, "a", "", nil); code(err) != Overloaded {
		t.Errorf("got %v", err)
	}
	w.svc.cfg.Blobs = nil
	if _, err := w.svc.PutBlob(w.ctx, tenant, "a", "", nil); code(err) != NotServed {
		t.Errorf("got %v", err)
	}
	w.refused(NotServed, start(&wire.StartRequest{FlowId: "b", Attributes: []*wire.Attribute{{Name: "x", Blob: ref.Blob}}}))
	if n, err := w.svc.Sweep(w.ctx); n != 0 || err != nil {
		t.Errorf("swept %d, %v", n, err)
	}
}

func TestBlobsAreNamedByTheirOwnFlow(t *testing.T) {
	w := newWorld(t)
	in, doc := w.put("a", []byte(`"in"`)), w.put("a", []byte(`"doc"`))
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", InputBlob: in.Blob, Attributes: []*wire.Attribute{{Name: "doc", Blob: doc.Blob, Size: doc.Size}}}))
	if k := w.step("pay"); k.Spec.InputBlob != in.Blob || k.Attributes[0].Blob != doc.Blob || k.Attributes[0].Size != 5 {
		t.Errorf("handed out %+v", k.Task)
	}
	ref := func(id string) *wire.Attribute { return &wire.Attribute{Name: "doc", Blob: id} }
	w.refused(BlobMissing, start(&wire.StartRequest{FlowId: "b", FlowType: "order", Attributes: []*wire.Attribute{ref(doc.Blob)}}))
	w.refused(Invalid, start(&wire.StartRequest{FlowId: "b", FlowType: "order", Attributes: []*wire.Attribute{ref("x")}}))
	w.refused(Invalid, start(&wire.StartRequest{FlowId: "b", FlowType: "order", Step: "pay", InputBlob: "x"}))
	w.refused(WrongType, setAttr("a", &wire.Attribute{Name: "total", Blob: doc.Blob}))
	w.refused(core.NotFound, setAttr("b", ref(doc.Blob)))
	w.must(setAttr("a", ref(doc.Blob)))
	old := w.put("a", []byte(`"old"`))
	w.clock.advance(blobFresh + time.Second)
	w.must(setAttr("a", ref(doc.Blob))) // named already
	w.refused(BlobMissing, setAttr("a", ref(old.Blob)))
	w.must(setAttr("a", ref(w.put("a", []byte(`"new"`)).Blob)))
}

func TestSweep(t *testing.T) {
	w := newWorld(t)
	in, doc := w.put("a", make([]byte, partSize+5)), w.put("a", []byte(`"doc"`))
	w.must(start(&wire.StartRequest{FlowId: "a", FlowType: "order", Step: "pay", InputBlob: in.Blob, Attributes: []*wire.Attribute{{Name: "doc", Blob: doc.Blob}}}))
	k := w.step("pay")
	w.put("a", []byte("lost"))
	w.put("gone", []byte("lost"))
	_, _ = w.svc.PutBlob(w.ctx, tenant, "half", "", func() ([]byte, error) { // a part, then the client goes
		if w.objects() < 10 {
			return make([]byte, partSize), nil
		}
		return nil, context.Canceled
	})
	sweep := func(want int) {
		t.Helper()
		if n, err := w.svc.Sweep(w.ctx); n != want || err != nil {
			t.Errorf("swept %d, %v; want %d", n, err, want)
		}
	}
	all := w.objects()
	sweep(0)
	w.clock.advance(blobSafety + time.Second)
	fresh := w.put("a", []byte("fresh"))
	// Left of a: its mark, the input in two objects, the document, the fresh one.
	sweep(all - 4)
	if n := w.objects(); n != 5 {
		t.Errorf("%d objects are left", n)
	}
	for _, ref := range []*wire.BlobRef{in, doc, fresh} {
		if _, err := w.getBlob("a", ref.Blob); err != nil {
			t.Errorf("%v: %v", ref, err)
		}
	}
	w.result(k, complete("1"))
	w.clock.advance(blobSafety + time.Second)
	sweep(3)
	if _, err := w.getBlob("a", doc.Blob); err != nil {
		t.Errorf("an attribute's blob is gone: %v", err)
	}
	if e := w.refused(BlobMissing, reset("a", "pay", 0)); !strings.Contains(e.Message, in.Blob) {
		t.Errorf("got %v", e)
	}
	w.must(&wire.Call{Verb: &wire.Call_Delete{Delete: &wire.DeleteRequest{FlowId: "a"}}})
	w.svc.blobs.enter(ownerKey("t/f/a"))
	sweep(1) // the document; the mark stays while a blob is put
	w.svc.blobs.leave(ownerKey("t/f/a"))
	sweep(1)
	if n := w.objects(); n != 0 {
		t.Errorf("%d objects are left", n)
	}
}
