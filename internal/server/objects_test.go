package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/spf13/pflag"

	"github.com/perdure-dev/perdure/internal/blob/mem"
	"github.com/perdure-dev/perdure/internal/blob/s3/s3proxy"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
)

// fakeS3 is an S3 server in this process, with a bucket, behind a proxy that can
// be cut.
func fakeS3(t *testing.T) *s3proxy.Proxy {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	backend := s3mem.New()
	if err := backend.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	l := httptest.NewServer(gofakes3.New(backend).Server())
	t.Cleanup(l.Close)
	return proxyTo(t, l.URL)
}

func proxyTo(t *testing.T, url string) *s3proxy.Proxy {
	t.Helper()
	p, err := s3proxy.Start(s3proxy.Options{Target: url, Clock: env.SystemClock{}, Rand: env.Real().Rand})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// process is one on the store, as cmd/perdure runs it.
type process struct {
	t     *testing.T
	url   string
	site  *Site
	l     net.Listener
	end   context.CancelFunc
	ended chan error
}

const testTTL = time.Second

func newProcess(t *testing.T, endpoint string) *process {
	t.Helper()
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	set := config.RegisterFlags(flags)
	args := []string{"--data", t.TempDir(), "--store", "s3://bucket/here?region=us-east-1&path_style=true&endpoint=" + endpoint,
		"--cluster.lease_ttl", testTTL.String(), "--cluster.follow_every", "50ms", "--kernel.partitions", "2", "--drain_timeout", "1s", "--journal.snapshot_every", "200ms"}
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	world := env.Real()
	cfg, _, err := config.Load(config.Input{FS: world.FS, Flags: set})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, l: l, url: "http://" + l.Addr().String(), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	p.end = cancel
	p.site = &Site{Config: cfg, Env: world, Version: "test", Log: slog.New(slog.DiscardHandler), Listener: Lend(ctx, l)}
	go func() { p.ended <- p.run(ctx) }()
	t.Cleanup(func() { p.stop(); _ = l.Close() })
	return p
}

func (p *process) run(ctx context.Context) error {
	for {
		s, err := p.site.Open(ctx)
		if err == nil {
			err = s.Serve(ctx, Lend(ctx, p.l))
		}
		if ctx.Err() != nil || !errors.Is(err, ErrTermOver) && !errors.Is(err, ErrStoreAway) {
			return err
		}
	}
}

func (p *process) stop() error {
	p.end()
	err := <-p.ended
	p.ended <- err
	return err
}

// ask sends a request and decodes the answer.
func (p *process) ask(path, body string) (status int, answer map[string]any) {
	p.t.Helper()
	client := http.Client{Timeout: 10 * time.Second}
	defer client.CloseIdleConnections()
	var res *http.Response
	var err error
	if body == "" {
		res, err = client.Get(p.url + path)
	} else {
		res, err = client.Post(p.url+path, "application/json", strings.NewReader(body))
	}
	if err != nil {
		return 0, map[string]any{"error": err.Error()}
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&answer); err != nil {
		answer = map[string]any{"text": string(b)}
	}
	return res.StatusCode, answer
}

// becomes waits until the process says what it is.
func (p *process) becomes(want string) {
	p.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last any
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); <-tick.C {
		status, a := p.ask("/readyz", "")
		if last = a; status == http.StatusOK && a["status"] == want {
			return
		}
		select {
		case err := <-p.ended:
			p.ended <- err
			p.t.Fatalf("it has ended: %v", err)
		default:
		}
	}
	p.t.Fatalf("it did not become %q: %v", want, last)
}

func (p *process) turn(text string) {
	p.t.Helper()
	status, a := p.ask("/v1/sessions/s/turns", fmt.Sprintf(`{"input":%q,"stream":false}`, text))
	if status != http.StatusOK || a["status"] != "completed" {
		p.t.Errorf("turn %q: status %d, %v", text, status, a)
	}
}

func TestStandbyTakesOver(t *testing.T) {
	store := fakeS3(t)
	a := newProcess(t, store.URL())
	a.becomes("ready")
	if status, said := a.ask("/v1/sessions", `{"id":"s","agent":"demo"}`); status != http.StatusCreated {
		t.Fatal(status, said)
	}
	a.turn("one")
	b := newProcess(t, store.URL())
	b.becomes("standby")
	b.turn("two") // it is passed on

	// In good order: what is asked meanwhile waits, and is answered.
	held := make(chan bool)
	go func() {
		defer close(held)
		b.becomes("ready")
		b.turn("three")
	}()
	if err := a.stop(); err != nil {
		t.Errorf("the end of the active one: %v", err)
	}
	<-held

	c := newProcess(t, store.URL())
	c.becomes("standby")
	status, said := b.ask("/v1/sessions/s/messages", "")
	if messages, _ := said["messages"].([]any); status != http.StatusOK || len(messages) != 6 {
		t.Errorf("after the take-over: status %d, %v", status, said)
	}
	if status, said := c.ask("/healthz", ""); status != http.StatusOK || said["status"] != "standby" {
		t.Errorf("healthz of a standby: %d, %v", status, said)
	}
}

// TestCutOffFromTheStore: who does not reach the store for longer than its lease
// is not active any more, and stands by when it is back.
func TestCutOffFromTheStore(t *testing.T) {
	direct := fakeS3(t)
	cut := proxyTo(t, direct.URL())
	a := newProcess(t, cut.URL())
	a.becomes("ready")
	a.ask("/v1/sessions", `{"id":"s","agent":"demo"}`)
	a.turn("one")
	b := newProcess(t, direct.URL())
	b.becomes("standby")
	cut.Cut()
	b.becomes("ready")
	b.turn("two")
	cut.Heal()
	a.becomes("standby")
	a.turn("three") // passed on
	if err := b.stop(); err != nil {
		t.Error(err)
	}
	a.becomes("ready")
	status, said := a.ask("/v1/sessions/s/messages", "")
	if messages, _ := said["messages"].([]any); status != http.StatusOK || len(messages) != 6 {
		t.Errorf("in the end: status %d, %v", status, said)
	}
}

// TestHeldWhileNobodyIsActive: what comes while the store is away for all, so that
// nobody is active, is held and answered afterwards.
func TestHeldWhileNobodyIsActive(t *testing.T) {
	store := fakeS3(t)
	a := newProcess(t, store.URL())
	a.becomes("ready")
	b := newProcess(t, store.URL())
	b.becomes("standby")
	store.Cut()
	for status := http.StatusOK; status == http.StatusOK; status, _ = b.ask("/readyz", "") {
	}
	answered := make(chan int)
	go func() { status, _ := b.ask("/v1/models", ""); answered <- status }()
	store.Heal()
	if status := <-answered; status != http.StatusOK {
		t.Errorf("a request that was held: status %d", status)
	}
}

func TestAddressOthersReach(t *testing.T) {
	cfg := config.Default()
	for listen, ok := range map[string]bool{"127.0.0.1:80": true, "10.0.0.1:80": true, "0.0.0.0:80": false, ":80": false, "[::]:80": false} {
		cfg.Listen = listen
		s := &Server{cfg: cfg, site: &Site{}}
		if err := s.checkAddress(); (err == nil) != ok {
			t.Errorf("%s: %v", listen, err)
		}
	}
	cfg.Listen, cfg.Cluster.Advertise = "0.0.0.0:80", "h:80"
	s := &Server{cfg: cfg, site: &Site{}}
	if err := s.checkAddress(); err != nil {
		t.Error(err)
	}
}

// TestErrorsOfATerm: whoever finds another owner, or its term over, while it opens its
// partitions stands by again; whatever else is wrong ends it.
func TestErrorsOfATerm(t *testing.T) {
	lease, err := cluster.Hold(t.Context(), cluster.LeaseConfig{Store: mem.New(mem.Options{}), Env: env.Real(), Node: "n", TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	term, err := cluster.Elect(t.Context(), lease, nil)
	if err != nil {
		t.Fatal(err)
	}
	fenced, full := fmt.Errorf("take partition 1: %w", cluster.ErrFenced), errors.New("no space left on device")
	check := func(when string, s *Server, err error, over bool) {
		t.Helper()
		if got := s.ofTerm(err); errors.Is(got, ErrTermOver) != over || !errors.Is(got, err) {
			t.Errorf("%s: %v became %v", when, err, got)
		}
	}
	active := &Server{objects: &objects{term: term}}
	check("on local disk", &Server{}, full, false)
	check("not elected", &Server{objects: &objects{}}, full, false)
	check("active", active, full, false)
	check("active", active, fenced, true)
	if err := term.Resign(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("resigned", active, full, true)
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
