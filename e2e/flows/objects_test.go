//go:build e2e

package flows

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/s3/s3proxy"
	"github.com/perdure-dev/perdure/internal/blob/s3/versitygw"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	nodes = 3
	// leaseTTL is short, so that many take-overs fit into a test.
	leaseTTL = time.Second
	bucket   = "bucket"
)

// cluster is processes on one object store. Each reaches it through a proxy of its
// own, which can be cut.
type cluster struct {
	t       *testing.T
	rng     *rand.Rand
	nodes   [nodes]*target
	proxies [nodes]*s3proxy.Proxy

	kills, stops, pauses, cuts, outages, takeovers int
	last                                           int // that was active
}

func startGateway(t *testing.T) *versitygw.Server {
	t.Helper()
	bin, err := versitygw.Binary(t.Context(), "../..")
	if err != nil {
		t.Fatal(err)
	}
	s, err := versitygw.Start(t.Context(), bin, t.TempDir(), bucket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func storeURL(endpoint string) string {
	return fmt.Sprintf("s3://%s/perdure?endpoint=%s&region=us-east-1&path_style=true", bucket, endpoint)
}

func s3Keys() []string {
	return []string{"AWS_ACCESS_KEY_ID=" + versitygw.AccessKey, "AWS_SECRET_ACCESS_KEY=" + versitygw.SecretKey}
}

func newCluster(t *testing.T, rng *rand.Rand, config string) *cluster {
	t.Helper()
	gateway := startGateway(t)
	c := &cluster{t: t, rng: rng}
	for i := range c.nodes {
		proxy, err := s3proxy.Start(s3proxy.Options{Target: gateway.URL(), Clock: env.SystemClock{}, Rand: env.Real().Rand})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(proxy.Close)
		c.proxies[i] = proxy
		s := newTarget(t, config+fmt.Sprintf("cluster: {lease_ttl: %s, follow_every: 100ms}\n", leaseTTL), s3Keys()...)
		s.argv = append(s.argv, "--store", storeURL(proxy.URL()))
		c.nodes[i] = s
	}
	for _, s := range c.nodes {
		s.start()
	}
	c.faults()
	return c
}

// faults is the weather: a store that is slow at times, refuses and loses.
func (c *cluster) faults() {
	for _, p := range c.proxies {
		p.Set(s3proxy.Rules{
			Latency:  blob.Latencies{blob.KindPut: {P50: 5 * time.Millisecond, P99: 40 * time.Millisecond}, blob.KindGet: {P50: 2 * time.Millisecond, P99: 20 * time.Millisecond}},
			SlowDown: 2, Lost: 1, AnswerLost: 2, Late: 1, LateBy: 3 * leaseTTL,
		})
	}
}

// active gives the node that is active, as the nodes themselves say.
func (c *cluster) active() int {
	c.t.Helper()
	found := -1
	eventually(c.t, "an active node", func() bool {
		for i, s := range c.nodes {
			if s.over() {
				continue
			}
			client := http.Client{Timeout: time.Second}
			resp, err := client.Get(s.url("/readyz"))
			if err != nil {
				continue
			}
			var said struct {
				Status string `json:"status"`
			}
			err = json.NewDecoder(resp.Body).Decode(&said)
			_ = resp.Body.Close()
			if err == nil && said.Status == "ready" {
				found = i
				return true
			}
		}
		return false
	})
	if found != c.last {
		c.takeovers++
		c.last = found
	}
	return found
}

// harm does something to the cluster, mostly to its active node.
func (c *cluster) harm() {
	i := c.active()
	s := c.nodes[i]
	switch c.rng.IntN(8) {
	case 0, 1, 2:
		s.kill()
		c.kills++
		c.pause(0, 2*leaseTTL)
		s.start()
	case 3:
		s.stop()
		c.stops++
		s.start()
	case 4: // longer than its lease: it comes back as one of the past
		s.signal(syscall.SIGSTOP)
		c.pauses++
		c.pause(leaseTTL, 4*leaseTTL)
		s.signal(syscall.SIGCONT)
	case 5: // cut off from the store
		c.proxies[i].Cut()
		c.cuts++
		c.pause(leaseTTL/2, 3*leaseTTL)
		c.proxies[i].Heal()
	case 6: // it hears nothing, and is not told so
		c.proxies[i].Hold()
		c.cuts++
		c.pause(leaseTTL/2, 3*leaseTTL)
		c.proxies[i].Heal()
	case 7: // the store is away for all
		for _, p := range c.proxies {
			p.Set(s3proxy.Rules{SlowDown: 100})
		}
		c.outages++
		c.pause(leaseTTL/2, 3*leaseTTL)
		c.faults()
	}
	for _, s := range c.nodes {
		if said := s.log.String(); strings.Contains(said, "panic") || strings.Contains(said, "corrupt") {
			c.t.Fatalf("a node says:\n%s", said)
		}
	}
}

func (c *cluster) pause(from, to time.Duration) {
	time.Sleep(from + time.Duration(c.rng.Int64N(int64(to-from))))
}

// TestKillLoopOnAnObjectStore is the kill loop with three processes on one object
// store: they are killed, stopped, paused for longer than their lease and cut off
// from the store, which itself is slow, refuses, and loses answers, while clients
// and workers use one of them. What clients were told is there in the end.
func TestKillLoopOnAnObjectStore(t *testing.T) {
	seed := fromEnv(t, "PERDURE_FLOWS_SEED", uint64(time.Now().UnixNano()))
	rounds := int(fromEnv(t, "PERDURE_OBJECTS_ROUNDS", 12))
	t.Logf("seed %d", seed)
	k := &loop{t: t, rng: rand.New(rand.NewPCG(seed, 2))}
	c := newCluster(t, k.rng, fmt.Sprintf("kernel: {partitions: 2}\ndrain_timeout: 300ms\nflows: {worker_heartbeat: %s}\n"+
		"journal: {snapshot_every: 1s, snapshot_bytes: 64KiB}\nstate: {memtable_bytes: 256KiB}\n", heartbeat))
	k.srv = c.nodes[0]
	k.pool = newWorkers(t, k.srv)
	for i := range k.run {
		k.run[i] = k.pool.start(casts[i%2]...)
	}
	k.load = newLoad(t, k.srv, seed)
	k.load.begin()
	began := time.Now()
	for range rounds {
		k.sleep(200*time.Millisecond, 1500*time.Millisecond)
		c.harm()
	}
	k.load.end()
	took := time.Since(began)
	for _, p := range c.proxies {
		p.Set(s3proxy.Rules{})
	}
	c.active()
	k.settle()
	t.Logf("%d kills, %d stops, %d pauses, %d cuts and %d outages of the store, %d take-overs in %v; %s", c.kills, c.stops, c.pauses, c.cuts, c.outages, c.takeovers,
		took.Round(time.Millisecond), k.load.summary())
	t.Logf("checked: %s", k.check())
	c.verify()
}

// verify lets the doctor look at the whole store, starts a server from nothing but
// that, backs it up while it works, and starts one on what was restored.
func (c *cluster) verify() {
	c.t.Helper()
	for _, s := range c.nodes {
		s.stop()
	}
	url := storeURL(c.proxies[0].URL())
	restored := strings.Replace(url, "/perdure?", "/restored?", 1)
	copied := filepath.Join(c.t.TempDir(), "copy")
	s := c.nodes[0]
	must := func(args ...string) string {
		c.t.Helper()
		out, errs, code := s.command(s3Keys(), args...)
		if code != 0 {
			c.t.Errorf("perdure %s: exit code %d:\n%s%s", strings.Join(args, " "), code, out, errs)
		}
		return out
	}
	must("doctor", "store", url)
	s.argv = append(s.argv, "--data", filepath.Join(c.t.TempDir(), "empty"))
	s.start()
	flows := strings.Count(must("flow", "list", "--json", "--limit", "0"), "\n")
	if flows < 10 {
		c.t.Errorf("from the store alone there are %d flows", flows)
	}
	must("backup", "--from", url, "--to", copied)
	s.stop()
	must("doctor", "store", copied)
	must("restore", "--from", copied, "--to", restored)
	s.argv = append(s.argv, "--store", restored, "--data", filepath.Join(c.t.TempDir(), "fresh"))
	s.start()
	if n := strings.Count(must("flow", "list", "--json", "--limit", "0"), "\n"); n != flows {
		c.t.Errorf("%d flows were restored of %d", n, flows)
	}
}

// TestAStoreThatCannotBeBuiltOn: a store that does not mind conditions is refused
// with words, and so is one that is not there or does not know the keys.
func TestAStoreThatCannotBeBuiltOn(t *testing.T) {
	careless := httptest.NewServer(&carelessStore{objects: map[string][]byte{}})
	defer careless.Close()
	gateway := startGateway(t)
	for _, c := range []struct {
		name, endpoint string
		env            []string
		says           string
	}{
		{"it ignores conditions", careless.URL, s3Keys(), "If-None-Match"},
		{"nobody is there", "http://" + freeAddress(t), s3Keys(), "connection refused"},
		{"a wrong key", gateway.URL(), []string{"AWS_ACCESS_KEY_ID=somebody", "AWS_SECRET_ACCESS_KEY=very-secret-text"}, "refused by the store"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newTarget(t, "", c.env...)
			s.argv = append(s.argv, "--store", storeURL(c.endpoint))
			if err := s.launch(); err != nil {
				t.Fatal(err)
			}
			code := s.exit(t)
			said := s.log.String()
			if code != 1 || !strings.Contains(said, c.says) || strings.Contains(said, "very-secret-text") {
				t.Errorf("exit code %d, it said:\n%s", code, said)
			}
		})
	}
}

// carelessStore is an S3 server that takes every PUT.
type carelessStore struct {
	mu      sync.Mutex
	objects map[string][]byte // guarded by mu
}

// ServeHTTP implements http.Handler.
func (s *carelessStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := r.URL.Path
	switch r.Method {
	case http.MethodPut:
		b, _ := io.ReadAll(r.Body)
		s.objects[key] = b
		w.Header().Set("ETag", fmt.Sprintf("%q", fmt.Sprintf("%x", sha256.Sum256(b))[:32]))
	case http.MethodDelete:
		delete(s.objects, key)
		w.WriteHeader(http.StatusNoContent)
	default:
		b, ok := s.objects[key]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>`)
			return
		}
		w.Header().Set("ETag", fmt.Sprintf("%q", fmt.Sprintf("%x", sha256.Sum256(b))[:32]))
		_, _ = w.Write(b)
	}
}
