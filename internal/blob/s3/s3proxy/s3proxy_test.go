package s3proxy_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/blob/s3"
	"github.com/perdure-dev/perdure/internal/blob/s3/s3proxy"
	"github.com/perdure-dev/perdure/internal/env"
)

// world is a server, a proxy before it, and a store on each.
type world struct {
	proxy          *s3proxy.Proxy
	direct, behind *s3.Store
}

func begin(t *testing.T) *world {
	t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(gofakes3.New(backend).Server())
	t.Cleanup(server.Close)
	real := env.Real()
	proxy, err := s3proxy.Start(s3proxy.Options{Target: server.URL, Clock: real.Clock, Rand: real.Rand})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	open := func(endpoint string) *s3.Store {
		s, err := s3.Open(s3.Config{
			Bucket: "bucket", Endpoint: endpoint, PathStyle: true, Credentials: s3.Credentials{AccessKey: "a", SecretKey: "b"},
			Dialer: real.Dialer, Clock: real.Clock, Rand: real.Rand,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		return s
	}
	return &world{proxy: proxy, direct: open(server.URL), behind: open(proxy.URL())}
}

func (w *world) put(ctx context.Context, key string) error {
	_, err := w.behind.Put(ctx, key, []byte(key), blob.PutOptions{IfNoneMatch: true})
	return err
}

// exists asks the server itself.
func (w *world) exists(t *testing.T, key string) bool {
	t.Helper()
	_, err := w.direct.Get(t.Context(), key)
	if err != nil && !errors.Is(err, blob.ErrNotFound) {
		t.Fatal(err)
	}
	return err == nil
}

func TestConformanceThroughTheProxy(t *testing.T) {
	blobtest.RunWith(t, blobtest.Quirks{LooseDeletes: true}, func(t *testing.T) blob.Store { return begin(t).behind })
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		rules s3proxy.Rules
		want  error
		done  bool
		count s3proxy.Stats
	}{
		{"none", s3proxy.Rules{}, nil, true, s3proxy.Stats{Requests: 1}},
		{"slow down", s3proxy.Rules{SlowDown: 100}, blob.ErrUnavailable, false, s3proxy.Stats{Requests: 1, SlowDowns: 1}},
		{"lost", s3proxy.Rules{Lost: 100}, blob.ErrAmbiguous, false, s3proxy.Stats{Requests: 1, Lost: 1}},
		{"answer lost", s3proxy.Rules{AnswerLost: 100}, blob.ErrAmbiguous, true, s3proxy.Stats{Requests: 1, AnswersLost: 1}},
		{"late", s3proxy.Rules{Late: 100, LateBy: time.Hour}, blob.ErrAmbiguous, false, s3proxy.Stats{Requests: 1, Late: 1}},
	} {
		w := begin(t)
		c.rules.WritesOnly = true
		w.proxy.Set(c.rules)
		if err := w.put(t.Context(), "a/b"); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if got := w.proxy.Stats(); got != c.count {
			t.Errorf("%s: %+v", c.name, got)
		}
		if w.exists(t, "a/b") != c.done {
			t.Errorf("%s: done is %v", c.name, !c.done)
		}
		if _, err := w.behind.Get(t.Context(), "a/b"); err != nil && !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("%s: reads are spared, but: %v", c.name, err)
		}
	}
}

// TestLateWrites arrive after the client was told that the connection broke.
func TestLateWrites(t *testing.T) {
	w := begin(t)
	w.proxy.Set(s3proxy.Rules{Late: 100, LateBy: time.Millisecond, WritesOnly: true})
	if err := w.put(t.Context(), "k"); !errors.Is(err, blob.ErrAmbiguous) {
		t.Fatal(err)
	}
	sleep := blob.SleepBy(env.SystemClock{})
	for range 1000 {
		if w.exists(t, "k") {
			return
		}
		_ = sleep(t.Context(), 5*time.Millisecond)
	}
	t.Error("never done")
}

func TestMixedFaultsAreDrawn(t *testing.T) {
	w := begin(t)
	w.proxy.Set(s3proxy.Rules{SlowDown: 20, Lost: 20, AnswerLost: 20, Late: 20, LateBy: time.Millisecond})
	for range 200 {
		_ = w.put(t.Context(), "k")
	}
	s := w.proxy.Stats()
	faults := s.SlowDowns + s.Lost + s.AnswersLost + s.Late
	if s.Requests != 200 || faults < 120 || faults == 200 || min(s.SlowDowns, s.Lost, s.AnswersLost, s.Late) == 0 {
		t.Errorf("%+v", s)
	}
}

// TestErrorsAreHonest: under all faults, what is said to be done is done, and
// what is said not to be done is not.
func TestErrorsAreHonest(t *testing.T) {
	w := begin(t)
	w.proxy.Set(s3proxy.Rules{SlowDown: 20, Lost: 20, AnswerLost: 20, Late: 10, LateBy: time.Millisecond, WritesOnly: true})
	const writers, each = 8, 40
	said := make([]error, writers*each)
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			for n := i * each; n < (i+1)*each; n++ {
				said[n] = w.put(t.Context(), fmt.Sprint("k", n))
			}
		})
	}
	all.Wait()
	counts := map[blob.Result]int{}
	for n, err := range said {
		r := blob.ResultOf(err)
		counts[r]++
		exists := w.exists(t, fmt.Sprint("k", n))
		if (r == blob.ResultOK && !exists) || (r == blob.ResultUnavailable && exists) {
			t.Errorf("k%d: %v, but exists is %v", n, err, exists)
		}
	}
	if counts[blob.ResultOK]+counts[blob.ResultUnavailable]+counts[blob.ResultAmbiguous] != len(said) || len(counts) != 3 {
		t.Errorf("%v", counts)
	}
	put := w.behind.Stats()[blob.KindPut]
	if put.Requests() != uint64(len(said)) || put.BytesOut == 0 {
		t.Errorf("%d puts were counted", put.Requests())
	}
}

// TestCut breaks what is on the way, and everything until it is healed.
func TestCut(t *testing.T) {
	w := begin(t)
	if err := w.put(t.Context(), "before"); err != nil {
		t.Fatal(err)
	}
	w.proxy.Hold()
	outcome := make(chan error, 1)
	go func() { outcome <- w.put(t.Context(), "during") }()
	sleep := blob.SleepBy(env.SystemClock{})
	for w.proxy.Stats().Held == 0 {
		_ = sleep(t.Context(), time.Millisecond)
	}
	w.proxy.Cut()
	if err := <-outcome; !errors.Is(err, blob.ErrAmbiguous) {
		t.Error(err)
	}
	if err := w.put(t.Context(), "cut"); !errors.Is(err, blob.ErrAmbiguous) && !errors.Is(err, blob.ErrUnavailable) {
		t.Error(err)
	}
	w.proxy.Heal()
	if err := w.put(t.Context(), "after"); err != nil {
		t.Error(err)
	}
	if w.exists(t, "cut") || !w.exists(t, "before") || !w.exists(t, "after") {
		t.Error("objects are not as they should be")
	}
}

// TestHold: no answer and no error, until the client gives up or it is healed.
func TestHold(t *testing.T) {
	w := begin(t)
	w.proxy.Hold()
	w.proxy.Hold()
	ctx, cancel := context.WithCancel(t.Context())
	outcome := make(chan error, 2)
	sleep := blob.SleepBy(env.SystemClock{})
	go func() { outcome <- w.put(ctx, "given-up") }()
	for w.proxy.Stats().Held < 1 {
		_ = sleep(t.Context(), time.Millisecond)
	}
	cancel()
	if err := <-outcome; !errors.Is(err, blob.ErrAmbiguous) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	go func() { outcome <- w.put(t.Context(), "patient") }()
	for w.proxy.Stats().Held < 2 {
		_ = sleep(t.Context(), time.Millisecond)
	}
	w.proxy.Heal()
	if err := <-outcome; err != nil {
		t.Error(err)
	}
	if !w.exists(t, "patient") {
		t.Error("the patient write was not done")
	}
}

func TestLatency(t *testing.T) {
	w := begin(t)
	var l blob.Latencies
	l[blob.KindPut] = blob.Latency{P50: 60 * time.Millisecond}
	w.proxy.Set(s3proxy.Rules{Latency: l})
	if err := w.put(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.behind.Get(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	if took := w.behind.Stats()[blob.KindPut].Latency; took < 60*time.Millisecond {
		t.Errorf("a put took %v", took)
	}
}

func TestStartRefuses(t *testing.T) {
	for _, o := range []s3proxy.Options{{Target: "nowhere"}, {Target: "http://127.0.0.1:1", Listen: "127.0.0.1:port"}} {
		if p, err := s3proxy.Start(o); err == nil {
			p.Close()
			t.Errorf("%+v was accepted", o)
		}
	}
}
