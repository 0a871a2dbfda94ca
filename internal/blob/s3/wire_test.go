package s3_test

import (
	"context"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/s3"
)

// TestLostAnswersAreOpen: after a request was sent, a write without an answer
// has an open outcome, and is never sent again by itself.
func TestLostAnswersAreOpen(t *testing.T) {
	for name, lose := range map[string]http.HandlerFunc{
		"reset before reading": func(w http.ResponseWriter, _ *http.Request) { reset(w) },
		"reset after reading": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			reset(w)
		},
		"closed": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			panic(http.ErrAbortHandler)
		},
		"no HTTP": func(w http.ResponseWriter, _ *http.Request) {
			c, _, _ := http.NewResponseController(w).Hijack()
			_, _ = c.Write([]byte("SSH-2.0-OpenSSH\r\n\r\n"))
			_ = c.Close()
		},
	} {
		for _, warm := range []bool{false, true} {
			var good atomic.Bool
			good.Store(warm)
			endpoint, requests := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if good.Load() {
					_, _ = io.Copy(io.Discard, r.Body)
					w.Header().Set("Etag", `"e"`)
					return
				}
				lose(w, r)
			})
			s := open(t, config(endpoint, ""))
			for _, c := range calls {
				if c.kind != blob.KindPut && c.kind != blob.KindDelete {
					continue
				}
				if warm { // a connection that has worked before
					good.Store(true)
					if _, err := s.Put(t.Context(), "k", nil, blob.PutOptions{}); err != nil {
						t.Fatal(err)
					}
					good.Store(false)
				}
				before := requests.Load()
				wantOnly(t, c.name+" "+name, c.do(t.Context(), s), blob.ErrAmbiguous)
				if n := requests.Load() - before; n != 1 {
					t.Errorf("%s %s: sent %d times", c.name, name, n)
				}
			}
		}
	}
}

// TestReadsAreTriedAgain: and then found.
func TestReadsAreTriedAgain(t *testing.T) {
	var n atomic.Int32
	endpoint, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch n.Add(1) {
		case 1:
			reset(w)
		case 2:
			refuse(w, 503, "SlowDown", "")
		case 3: // ends early
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("part"))
		default:
			w.Header().Set("Etag", `"e"`)
			_, _ = w.Write([]byte("whole"))
		}
	})
	s := open(t, with(config(endpoint, ""), patient))
	o, err := s.Get(t.Context(), "k")
	if err != nil || string(o.Data) != "whole" || o.Token != "e" {
		t.Fatalf("%q %q %v", o.Data, o.Token, err)
	}
	get := s.Stats()[blob.KindGet]
	if get.Requests() != 4 || get.Results[blob.ResultOK] != 1 || get.Results[blob.ResultUnavailable] != 3 || get.BytesIn != 5 {
		t.Errorf("%+v", get)
	}
}

func TestNothingListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	endpoint := "http://" + l.Addr().String()
	_ = l.Close()
	s := open(t, with(config(endpoint, ""), patient))
	for _, c := range calls {
		wantOnly(t, c.name, c.do(t.Context(), s), blob.ErrUnavailable)
	}
}

// TestTimeout: a server that takes requests and never answers.
func TestTimeout(t *testing.T) {
	var clock fuse
	over := make(chan struct{})
	endpoint, requests := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		clock.burn()
		<-over
	})
	defer close(over)
	s := open(t, with(config(endpoint, ""), func(c *s3.Config) { c.Clock = &clock }))
	for _, c := range calls {
		want := blob.ErrAmbiguous
		if c.kind == blob.KindGet || c.kind == blob.KindList {
			want = blob.ErrUnavailable
		}
		before := requests.Load()
		err := c.do(t.Context(), s)
		wantOnly(t, c.name, err, want)
		if !strings.Contains(err.Error(), "no answer in time") || requests.Load()-before != 1 {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	s = open(t, with(config(endpoint, ""), patient))
	err := blob.Prove(t.Context(), s, with(proof(s), func(p *blob.Proof) { p.Clock = hasty{factor: 100} }))
	wantOnly(t, "prove", err, blob.ErrUnavailable)
}

// TestSilenceEndsIdleConnections: after a timeout, the next request does not
// take its chances with another old connection.
func TestSilenceEndsIdleConnections(t *testing.T) {
	var clock fuse
	var made atomic.Int32
	warm, over := make(chan struct{}), make(chan struct{})
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		switch r.URL.Path {
		case "/perdure-test/warm": // two at a time
			select {
			case warm <- struct{}{}:
			case <-warm:
			}
		case "/perdure-test/silent":
			clock.burn()
			<-over
		}
		w.Header().Set("Etag", `"e"`)
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			made.Add(1)
		}
	}
	server.Start()
	defer server.Close()
	defer close(over)
	s := open(t, with(config(server.URL, ""), func(c *s3.Config) { c.Clock = &clock }))
	put := func(key string) error {
		_, err := s.Put(t.Context(), key, nil, blob.PutOptions{})
		return err
	}
	var two sync.WaitGroup
	for range 2 {
		two.Go(func() {
			if err := put("warm"); err != nil {
				t.Error(err)
			}
		})
	}
	two.Wait()
	if err := put("silent"); !errors.Is(err, blob.ErrAmbiguous) || made.Load() != 2 {
		t.Errorf("%v, %d connections", err, made.Load())
	}
	if err := put("k"); err != nil || made.Load() != 3 {
		t.Errorf("%v, %d connections", err, made.Load())
	}
}

// TestContextEndsDuringACall: the outcome of a write is open, and the
// context's error shows.
func TestContextEndsDuringACall(t *testing.T) {
	arrived, over := make(chan struct{}), make(chan struct{})
	endpoint, _ := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		arrived <- struct{}{}
		<-over
	})
	defer close(over)
	s := open(t, config(endpoint, ""))
	for _, c := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-arrived
			cancel()
		}()
		err := c.do(ctx, s)
		write := c.kind == blob.KindPut || c.kind == blob.KindDelete
		if !errors.Is(err, context.Canceled) || errors.Is(err, blob.ErrAmbiguous) != write || errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestContextEndsBeforeSending: what was never sent is not open.
func TestContextEndsBeforeSending(t *testing.T) {
	for _, c := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		s := open(t, with(config("http://127.0.0.1:1", ""), func(c *s3.Config) { c.Dialer = deaf(cancel) }))
		err := c.do(ctx, s)
		if !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrAmbiguous) || !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", c.name, err)
		}
		s = open(t, with(config("http://127.0.0.1:1", ""), func(c *s3.Config) {
			c.Dialer, c.Clock = deaf(func() {}), hasty{factor: 1000}
		}))
		err = c.do(t.Context(), s)
		wantOnly(t, c.name, err, blob.ErrUnavailable)
		if !strings.Contains(err.Error(), "no answer in time") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// deaf is called when somebody dials; nobody answers.
type deaf func()

func (called deaf) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	called()
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestStrangeSuccesses(t *testing.T) {
	endpoint, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && !r.URL.Query().Has("list-type") {
			w.Header().Set("Content-Length", strconv.Itoa(blob.MaxObjectSize+1))
		}
	})
	s := open(t, with(config(endpoint, ""), patient))
	_, err := s.Put(t.Context(), "k", nil, blob.PutOptions{})
	wantOnly(t, "put without an ETag", err, blob.ErrAmbiguous)
	_, err = s.Get(t.Context(), "k")
	wantOnly(t, "object over the bound", err, blob.ErrCorrupt)
	_, err = s.List(t.Context(), "", "", 1)
	wantOnly(t, "empty list page", err, blob.ErrUnavailable)
	for _, bad := range []blob.Token{"a\"b", "a\r\nX-Evil: 1", "é", " "} {
		_, err = s.Put(t.Context(), "k", nil, blob.PutOptions{IfMatch: bad})
		wantOnly(t, "token", err, blob.ErrInvalid)
		wantOnly(t, "token", s.Delete(t.Context(), "k", blob.DeleteOptions{IfMatch: bad}), blob.ErrInvalid)
	}
}

// TestWhatIsSent looks at the requests' form, in both styles of addresses.
func TestWhatIsSent(t *testing.T) {
	var got *http.Request
	var body string
	endpoint, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got, body = r, string(b)
		w.Header().Set("Etag", `"e"`)
	})
	for _, style := range []struct {
		path       bool
		host, root string
	}{{true, "s3.example.com", "/perdure-test/"}, {false, "perdure-test.s3.example.com", "/"}} {
		s := open(t, with(config("http://s3.example.com", "a+b"), func(c *s3.Config) {
			c.PathStyle, c.Dialer = style.path, dialTo(strings.TrimPrefix(endpoint, "http://"))
		}))
		if _, err := s.Put(t.Context(), "x=@+/y", []byte("body"), blob.PutOptions{IfNoneMatch: true}); err != nil {
			t.Fatal(err)
		}
		if got.Host != style.host || got.RequestURI != style.root+"a%2Bb/x%3D%40%2B/y" || body != "body" || got.ContentLength != 4 {
			t.Errorf("%s %s %q", got.Host, got.RequestURI, body)
		}
		h := got.Header
		if h.Get("If-None-Match") != "*" || h.Get("If-Match") != "" ||
			h.Get("X-Amz-Content-Sha256") != "230d8358dc8e8890b4c58deeb62912ee2f20357ae92a5cc861b98e68fe31acb5" ||
			!strings.Contains(h.Get("Authorization"), "/us-east-1/s3/aws4_request") || !strings.Contains(h.Get("Authorization"), "if-none-match") {
			t.Errorf("%v", h)
		}
		if _, err := s.Put(t.Context(), "k", nil, blob.PutOptions{IfMatch: "tag"}); err != nil {
			t.Fatal(err)
		}
		if got.Header.Get("If-Match") != `"tag"` || got.ContentLength != 0 || got.Header.Get("Transfer-Encoding") != "" {
			t.Errorf("%v, %d bytes", got.Header, got.ContentLength)
		}
	}
}

func TestTLS(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Etag", `"e"`) }))
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // handshakes that fail on purpose
	server.StartTLS()
	defer server.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	put := func(change func(*s3.Config)) error {
		s := open(t, with(config(server.URL, ""), change))
		_, err := s.Put(t.Context(), "k", []byte("x"), blob.PutOptions{})
		return err
	}
	if err := put(func(c *s3.Config) { c.CA = ca }); err != nil {
		t.Error(err)
	}
	err := put(func(*s3.Config) {})
	wantOnly(t, "unknown authority", err, blob.ErrDenied)
	if err == nil || !strings.Contains(err.Error(), "certificate of its authority") {
		t.Error(err)
	}
	wantOnly(t, "http to https", put(func(c *s3.Config) { c.Endpoint = strings.Replace(server.URL, "https", "http", 1) }), blob.ErrAmbiguous)

	plain, _ := serve(t, func(http.ResponseWriter, *http.Request) {})
	err = put(func(c *s3.Config) { c.Endpoint = strings.Replace(plain, "http", "https", 1) })
	wantOnly(t, "https to http", err, blob.ErrDenied)
	if err == nil || !strings.Contains(err.Error(), "http://") {
		t.Error(err)
	}
	for _, bad := range []s3.Config{
		with(config("https://host", ""), func(c *s3.Config) { c.CA = []byte("no PEM") }),
		with(config("http://host", ""), func(c *s3.Config) { c.CA = ca }),
	} {
		if _, err := s3.Open(bad); !errors.Is(err, blob.ErrInvalid) {
			t.Errorf("%v", err)
		}
	}
}

// TestProveRefusesUnfitServers: by the way of HTTP, what conditions are for.
func TestProveRefusesUnfitServers(t *testing.T) {
	for _, c := range []struct {
		name    string
		refuses func(r *http.Request, object []byte, exists bool) bool
		want    string
	}{
		{"knows no conditions", func(*http.Request, []byte, bool) bool { return false }, "If-None-Match replaced"},
		{"knows If-None-Match only", func(r *http.Request, _ []byte, exists bool) bool {
			return r.Header.Get("If-None-Match") != "" && exists
		}, "If-Match of another object's ETag replaced"},
		{"refuses all conditions", func(r *http.Request, _ []byte, _ bool) bool {
			return r.Header.Get("If-None-Match") != "" || r.Header.Get("If-Match") != ""
		}, "new key"},
	} {
		u := &unfit{objects: map[string][]byte{}, refuses: c.refuses}
		endpoint, _ := serve(t, u.ServeHTTP)
		s := open(t, config(endpoint, "one"))
		err := blob.Prove(t.Context(), s, proof(s))
		wantOnly(t, c.name, err, blob.ErrUnfit)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "s3://perdure-test/one at http://127.0.0.1") {
			t.Errorf("%s: %v", c.name, err)
		}
		if len(u.objects) != 0 {
			t.Errorf("%s: left behind %d", c.name, len(u.objects))
		}
	}
}
