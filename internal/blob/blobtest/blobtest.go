// Package blobtest is the conformance suite of blob.Store.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
)

// Quirks are promises that some server behind a store does not keep, and that
// nothing in Perdure depends on. Prove does not ask for them either.
type Quirks struct {
	// LooseDeletes: Delete takes no notice of its condition, or succeeds under a
	// condition where there is no object.
	LooseDeletes bool
	// KeysAreFiles: an object "a" and another "a/b" cannot both be.
	KeysAreFiles bool
}

// Run holds the stores that open makes to the contract of blob.Store. Each
// call of open must give an empty store.
func Run(t *testing.T, open func(t *testing.T) blob.Store) { RunWith(t, Quirks{}, open) }

// RunWith is Run for a store with quirks.
func RunWith(t *testing.T, q Quirks, open func(t *testing.T) blob.Store) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s blob.Store)
	}{
		{"GetPut", q.testGetPut},
		{"Conditions", testConditions},
		{"Delete", q.testDelete},
		{"List", q.testList},
		{"ListPages", testListPages},
		{"Arguments", testArguments},
		{"Contexts", testContexts},
		{"OwnBytes", testOwnBytes},
		{"RaceCreate", testRaceCreate},
		{"RaceSwap", testRaceSwap},
		{"RaceDelete", q.testRaceDelete},
		{"RaceReaders", testRaceReaders},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

// writers race in the tests of exact conditions.
const writers = 32

var (
	none      blob.PutOptions
	ifMissing = blob.PutOptions{IfNoneMatch: true}
)

func ifMatch(t blob.Token) blob.PutOptions { return blob.PutOptions{IfMatch: t} }

func put(t *testing.T, s blob.Store, key, data string) blob.Token {
	t.Helper()
	token, err := s.Put(t.Context(), key, []byte(data), none)
	if err != nil || token == "" {
		t.Fatalf("put %s: token %q, %v", key, token, err)
	}
	return token
}

func wantObject(t *testing.T, s blob.Store, key, data string, token blob.Token) {
	t.Helper()
	o, err := s.Get(t.Context(), key)
	if err != nil || string(o.Data) != data || o.Token != token {
		t.Fatalf("get %s: %d bytes, token %q (want %q), %v", key, len(o.Data), o.Token, token, err)
	}
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: %v, want %v", what, err, want)
	}
}

func (q Quirks) testGetPut(t *testing.T, s blob.Store) {
	for _, key := range []string{"a", "a/b", "a/b/c", "none"} {
		_, err := s.Get(t.Context(), key)
		wantErr(t, "get "+key, err, blob.ErrNotFound)
	}
	big := strings.Repeat("0123456789abcdef", 1<<16) + "x"
	objects := map[string]string{"a": "object", "a/b": "below an object", "a/b/c.d": "", "x-y_z=+@.9": "z", "big": big}
	if q.KeysAreFiles {
		delete(objects, "a/b")
		delete(objects, "a/b/c.d")
	}
	for key, data := range objects {
		token := put(t, s, key, data)
		wantObject(t, s, key, data, token)
	}
	first := put(t, s, "a", "one")
	second := put(t, s, "a", "two")
	if first == second {
		t.Fatal("different contents have the same token")
	}
	wantObject(t, s, "a", "two", second)
}

func testConditions(t *testing.T, s blob.Store) {
	ctx := t.Context()
	_, err := s.Put(ctx, "k/v", []byte("x"), ifMatch("no-such-token"))
	wantErr(t, "swap of what is not there", err, blob.ErrPrecondition)
	_, err = s.Get(ctx, "k/v")
	wantErr(t, "get after a refused put", err, blob.ErrNotFound)

	one, err := s.Put(ctx, "k/v", []byte("one"), ifMissing)
	wantErr(t, "create", err, nil)
	_, err = s.Put(ctx, "k/v", []byte("one"), ifMissing)
	wantErr(t, "create again, same content", err, blob.ErrPrecondition)
	wantObject(t, s, "k/v", "one", one)

	two, err := s.Put(ctx, "k/v", []byte("two"), ifMatch(one))
	wantErr(t, "swap", err, nil)
	_, err = s.Put(ctx, "k/v", []byte("three"), ifMatch(one))
	wantErr(t, "swap with an old token", err, blob.ErrPrecondition)
	wantObject(t, s, "k/v", "two", two)

	wantErr(t, "delete", s.Delete(ctx, "k/v", blob.DeleteOptions{}), nil)
	_, err = s.Put(ctx, "k/v", []byte("three"), ifMatch(two))
	wantErr(t, "swap of what was deleted", err, blob.ErrPrecondition)
	_, err = s.Put(ctx, "k/v", []byte("four"), ifMissing)
	wantErr(t, "create after delete", err, nil)
}

func (q Quirks) testDelete(t *testing.T, s blob.Store) {
	ctx := t.Context()
	wantErr(t, "delete nothing", s.Delete(ctx, "a/b", blob.DeleteOptions{}), nil)
	old := put(t, s, "a/b", "1")
	now := put(t, s, "a/b", "2")
	stays := "a"
	if q.KeysAreFiles {
		stays = "b"
	}
	put(t, s, stays, "stays")
	if !q.LooseDeletes {
		wantErr(t, "conditional delete of nothing", s.Delete(ctx, "a/c", blob.DeleteOptions{IfMatch: "x"}), blob.ErrPrecondition)
		wantErr(t, "delete with an old token", s.Delete(ctx, "a/b", blob.DeleteOptions{IfMatch: old}), blob.ErrPrecondition)
	}
	wantObject(t, s, "a/b", "2", now)
	wantErr(t, "delete with the token", s.Delete(ctx, "a/b", blob.DeleteOptions{IfMatch: now}), nil)
	_, err := s.Get(ctx, "a/b")
	wantErr(t, "get what was deleted", err, blob.ErrNotFound)
	if got := keys(t, s, "", "", 10); !slices.Equal(got, []string{stays}) {
		t.Fatalf("list after delete: %v", got)
	}
}

func keys(t *testing.T, s blob.Store, prefix, after string, limit int) []string {
	t.Helper()
	infos, err := s.List(t.Context(), prefix, after, limit)
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, i := range infos {
		out = append(out, i.Key)
	}
	return out
}

func (q Quirks) testList(t *testing.T, s blob.Store) {
	if got := keys(t, s, "", "", 10); len(got) != 0 {
		t.Fatalf("an empty store lists %v", got)
	}
	// In byte order: '+' '-' '.' '/' digits, letters.
	all := []string{"a", "a+", "a-b", "a.b", "a.d/x.o", "a/+", "a/b", "a/b/c", "a/b/d", "a/b0", "a/c.d", "a/c.o", "a0", "aB", "b/b", "ba"}
	if q.KeysAreFiles {
		all = slices.DeleteFunc(all, func(k string) bool { return k == "a" || k == "a/b" })
	}
	for i := range all { // put in another order
		key := all[(i*5+3)%len(all)]
		put(t, s, key, strings.Repeat("x", len(key)))
	}
	for _, prefix := range append([]string{"", "a/b/", "b/", "a/b/c/", "c", "a.", "/"}, all...) {
		for _, after := range append([]string{"", "a/", "zzz", "a/b/", "+"}, all...) {
			for _, limit := range []int{1, 2, 3, len(all), blob.MaxList} {
				want := []string{}
				for _, k := range all {
					if strings.HasPrefix(k, prefix) && k > after && len(want) < limit {
						want = append(want, k)
					}
				}
				if got := keys(t, s, prefix, after, limit); !slices.Equal(got, want) {
					t.Fatalf("list %q after %q limit %d: %v, want %v", prefix, after, limit, got, want)
				}
			}
		}
	}
	infos, err := s.List(t.Context(), "a/b/c", "", 1)
	if err != nil || len(infos) != 1 || infos[0].Size != int64(len("a/b/c")) {
		t.Fatalf("%+v %v", infos, err)
	}
}

func testListPages(t *testing.T, s blob.Store) {
	want := []string{}
	for i := range 60 {
		key := fmt.Sprintf("p/%d/k%02d", i/20, i)
		put(t, s, key, "")
		want = append(want, key)
	}
	got := []string{}
	for after := ""; ; {
		page := keys(t, s, "p/", after, 7)
		got = append(got, page...)
		if len(page) < 7 {
			break
		}
		after = page[len(page)-1]
	}
	if !slices.Equal(got, want) {
		t.Fatalf("pages give %v", got)
	}
}

func testArguments(t *testing.T, s blob.Store) {
	ctx := t.Context()
	for _, key := range []string{
		"", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a b", "a\x00", "a\\b", "é", "a:b", "a*", "~",
		strings.Repeat("e", blob.MaxElement+1), strings.Repeat("abc/", blob.MaxKey/4) + "d",
	} {
		_, err := s.Get(ctx, key)
		wantErr(t, fmt.Sprintf("get %q", key), err, blob.ErrInvalid)
		_, err = s.Put(ctx, key, nil, none)
		wantErr(t, fmt.Sprintf("put %q", key), err, blob.ErrInvalid)
		wantErr(t, fmt.Sprintf("delete %q", key), s.Delete(ctx, key, blob.DeleteOptions{}), blob.ErrInvalid)
	}
	for _, key := range []string{strings.Repeat("e", blob.MaxElement), strings.Repeat("abc/", blob.MaxKey/4-1) + "abcd", "...", "a..b"} {
		wantObject(t, s, key, key, put(t, s, key, key))
	}
	_, err := s.Put(ctx, "k", nil, blob.PutOptions{IfNoneMatch: true, IfMatch: "x"})
	wantErr(t, "two conditions", err, blob.ErrInvalid)
	_, err = s.Put(ctx, "k", make([]byte, blob.MaxObjectSize+1), none)
	wantErr(t, "too large", err, blob.ErrInvalid)
	for _, limit := range []int{-1, 0, blob.MaxList + 1} {
		_, err = s.List(ctx, "", "", limit)
		wantErr(t, "limit", err, blob.ErrInvalid)
	}
	_, err = s.List(ctx, "a b", "", 1)
	wantErr(t, "prefix", err, blob.ErrInvalid)
	_, err = s.List(ctx, "", strings.Repeat("a", blob.MaxKey+1), 1)
	wantErr(t, "start", err, blob.ErrInvalid)
}

func testContexts(t *testing.T, s blob.Store) {
	token := put(t, s, "k", "before")
	done, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Get(done, "k")
	wantErr(t, "get", err, context.Canceled)
	_, err = s.Put(done, "k", []byte("after"), none)
	wantErr(t, "put", err, context.Canceled)
	_, err = s.List(done, "", "", 1)
	wantErr(t, "list", err, context.Canceled)
	wantErr(t, "delete", s.Delete(done, "k", blob.DeleteOptions{}), context.Canceled)
	wantObject(t, s, "k", "before", token)
}

func testOwnBytes(t *testing.T, s blob.Store) {
	data := []byte("mine")
	token, err := s.Put(t.Context(), "k", data, none)
	wantErr(t, "put", err, nil)
	if string(data) != "mine" {
		t.Fatalf("put changed the caller's data to %q", data)
	}
	copy(data, "XXXX")
	o, err := s.Get(t.Context(), "k")
	wantErr(t, "get", err, nil)
	copy(o.Data, "YYYY")
	wantObject(t, s, "k", "mine", token)
}

// race runs f in all writers at once.
func race(f func(i int)) {
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for i := range writers {
		wg.Go(func() {
			<-begin
			f(i)
		})
	}
	close(begin)
	wg.Wait()
}

func testRaceCreate(t *testing.T, s blob.Store) {
	for round := range 10 {
		key := fmt.Sprintf("race/%d/k", round)
		var winners atomic.Int32
		var won atomic.Value
		race(func(i int) {
			data := fmt.Sprintf("writer %d", i)
			token, err := s.Put(t.Context(), key, []byte(data), ifMissing)
			switch {
			case err == nil:
				winners.Add(1)
				won.Store(blob.Object{Data: []byte(data), Token: token})
			case !errors.Is(err, blob.ErrPrecondition):
				t.Errorf("writer %d: %v", i, err)
			}
		})
		if winners.Load() != 1 {
			t.Fatalf("round %d: %d winners", round, winners.Load())
		}
		w := won.Load().(blob.Object)
		wantObject(t, s, key, string(w.Data), w.Token)
	}
}

// testRaceSwap counts with compare-and-swap: a swap that wins wrongly, or loses
// after all, shows in the sum.
func testRaceSwap(t *testing.T, s blob.Store) {
	const each = 5
	put(t, s, "counter", "0")
	race(func(i int) {
		for range each {
			for swapped := false; !swapped; {
				o, err := s.Get(t.Context(), "counter")
				if err != nil {
					t.Error(err)
					return
				}
				n, err := strconv.Atoi(string(o.Data))
				if err != nil {
					t.Error(err)
					return
				}
				_, err = s.Put(t.Context(), "counter", []byte(strconv.Itoa(n+1)), ifMatch(o.Token))
				if err != nil && !errors.Is(err, blob.ErrPrecondition) {
					t.Error(err)
					return
				}
				swapped = err == nil
			}
		}
	})
	o, err := s.Get(t.Context(), "counter")
	if err != nil || string(o.Data) != strconv.Itoa(writers*each) {
		t.Fatalf("counter is %s, want %d (%v)", o.Data, writers*each, err)
	}
}

// testRaceDelete lets half of the writers delete and half swap, all with one
// token.
func (q Quirks) testRaceDelete(t *testing.T, s blob.Store) {
	if q.LooseDeletes {
		t.Skip("this store's conditions of deletes are loose")
	}
	for round := range 10 {
		token := put(t, s, "k", fmt.Sprintf("round %d", round))
		var winners atomic.Int32
		var deleted atomic.Bool
		race(func(i int) {
			var err error
			if i%2 == 0 {
				err = s.Delete(t.Context(), "k", blob.DeleteOptions{IfMatch: token})
			} else {
				_, err = s.Put(t.Context(), "k", fmt.Appendf(nil, "writer %d", i), ifMatch(token))
			}
			switch {
			case err == nil:
				winners.Add(1)
				deleted.Store(i%2 == 0)
			case !errors.Is(err, blob.ErrPrecondition):
				t.Errorf("writer %d: %v", i, err)
			}
		})
		_, err := s.Get(t.Context(), "k")
		if winners.Load() != 1 || errors.Is(err, blob.ErrNotFound) != deleted.Load() {
			t.Fatalf("round %d: %d winners, deleted %v, get: %v", round, winners.Load(), deleted.Load(), err)
		}
	}
}

// testRaceReaders checks that readers see whole objects only, and none that is
// older than what was acknowledged before they began.
func testRaceReaders(t *testing.T, s blob.Store) {
	const size, versions = 20_000, 60
	content := func(v int) []byte { return bytes.Repeat([]byte{byte(v)}, size+v) }
	var acked atomic.Int64
	if _, err := s.Put(t.Context(), "k", content(0), none); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				least := acked.Load()
				o, err := s.Get(t.Context(), "k")
				if err != nil {
					t.Error(err)
					return
				}
				v := len(o.Data) - size
				if v < int(least) || !bytes.Equal(o.Data, content(v)) {
					t.Errorf("read version %d (mixed or stale), acknowledged was %d", v, least)
					return
				}
			}
		})
	}
	for v := 1; v <= versions; v++ {
		if _, err := s.Put(t.Context(), "k", content(v), none); err != nil {
			t.Error(err)
		}
		acked.Store(int64(v))
	}
	close(stop)
	readers.Wait()
}
