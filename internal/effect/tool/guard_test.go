package tool

import (
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestAddressKind(t *testing.T) {
	kinds := map[string][]string{
		"":                  {"93.184.216.34", "8.8.8.8", "172.15.255.255", "172.32.0.0", "100.63.255.255", "100.128.0.0", "2606:4700::1111", "::ffff:8.8.8.8"},
		"loopback":          {"127.0.0.1", "127.255.255.255", "::1", "::ffff:127.0.0.1"},
		"unspecified":       {"0.0.0.0", "0.1.2.3", "::", "::ffff:0.0.0.0"},
		"private":           {"10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12::1", "fec0::1", "::ffff:10.0.0.1"},
		"link-local":        {"169.254.0.1", "fe80::1", "fe80::1%eth0", "febf::1"},
		"carrier-grade NAT": {"100.64.0.1", "100.127.255.255"},
		"multicast":         {"224.0.0.1", "239.1.1.1", "ff02::1"},
		"reserved":          {"192.0.0.1", "198.18.0.1", "198.19.255.255", "240.0.0.1", "255.255.255.255", "2001::1", "100::1", "4000::1", "1::1"},
		"documentation":     {"192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"},
		"IPv4-translating":  {"64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "::127.0.0.1"},
		"metadata service":  {"169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16"},
	}
	for kind, addrs := range kinds {
		for _, a := range addrs {
			if got := addressKind(netip.MustParseAddr(a)); got != kind {
				t.Errorf("%s is %q, want %q", a, got, kind)
			}
		}
	}
	if got := addressKind(netip.Addr{}); got != "invalid" {
		t.Errorf("the zero address is %q", got)
	}
}

func TestPolicies(t *testing.T) {
	tests := []struct {
		host, addr string
		ok         [policies]bool // publicOnly, privateToo, namedHost
	}{
		{"example.com", "8.8.8.8", [policies]bool{true, true, true}},
		{"example.com", "10.0.0.1", [policies]bool{false, true, false}},
		{"example.com", "127.0.0.1", [policies]bool{false, true, false}},
		{"example.com", "169.254.169.254", [policies]bool{false, false, false}},
		{"localhost", "127.0.0.1", [policies]bool{false, true, true}},
		{"localhost", "::1", [policies]bool{false, true, true}},
		{"localhost", "10.0.0.1", [policies]bool{false, true, false}},
		{"10.0.0.1", "10.0.0.1", [policies]bool{false, true, true}},
		{"10.0.0.1", "10.0.0.2", [policies]bool{false, true, false}},
		{"169.254.169.254", "169.254.169.254", [policies]bool{false, false, true}},
		{"::ffff:10.0.0.1", "10.0.0.1", [policies]bool{false, true, true}},
	}
	for _, tt := range tests {
		for p := range policies {
			if err := p.check(tt.host, netip.MustParseAddr(tt.addr)); (err == nil) != tt.ok[p] {
				t.Errorf("policy %d, %s at %s: %v, want allowed %v", p, tt.host, tt.addr, err, tt.ok[p])
			}
		}
	}
}

// refused makes a call that must end in a refusal and no retry.
func refused(t *testing.T, tool *Tool, says string) {
	t.Helper()
	r := tool.Call(t.Context(), Call{})
	if !r.IsError || r.Retryable || !strings.Contains(r.Content, "refused: ") || !strings.Contains(r.Content, says) {
		t.Errorf("got %+v, want a refusal with %q", r, says)
	}
}

func TestNameOfPrivateAddress(t *testing.T) {
	w := newWorld()
	w.name("inside.example", []string{"10.0.0.1"})
	w.name("mixed.example", []string{"127.0.0.1", "::ffff:10.0.0.1", public})
	w.name("meta.example", []string{"169.254.169.254"})
	ok := func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "hello") }
	w.serve(t, "10.0.0.1:80", ok)
	w.serve(t, "169.254.169.254:80", ok)
	w.serve(t, public+":80", ok)
	c := w.client(t, newHandClock())

	inside := definition("GET", "http://inside.example/")
	refused(t, mustCompile(t, inside, c), "10.0.0.1, a private address")
	if d := w.dials(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
	inside.HTTP.AllowPrivate = true
	if r := mustCompile(t, inside, c).Call(t.Context(), Call{}); r.Content != "hello" {
		t.Errorf("with allow_private: %+v", r)
	}
	// The connection that is now kept must not serve a tool that may not.
	inside.HTTP.AllowPrivate = false
	refused(t, mustCompile(t, inside, c), "10.0.0.1, a private address")

	meta := definition("GET", "http://meta.example/")
	meta.HTTP.AllowPrivate = true
	refused(t, mustCompile(t, meta, c), "metadata service")

	// Of several addresses only the public ones are tried.
	if r := mustCompile(t, definition("GET", "http://mixed.example/"), c).Call(t.Context(), Call{}); r.Content != "hello" {
		t.Errorf("mixed addresses: %+v", r)
	}
	if d := w.dials(); !slices.Equal(d, []string{"10.0.0.1:80", public + ":80"}) {
		t.Errorf("dialled %v", d)
	}
}

// The name gives a public address to the first look-up and loopback to the
// next: each connection dials an address that was itself checked.
func TestRebinding(t *testing.T) {
	w := newWorld()
	w.name("rebind.example", []string{public}, []string{"127.0.0.1"})
	for _, at := range []string{public + ":80", "127.0.0.1:80"} {
		w.serve(t, at, func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Connection", "close")
			io.WriteString(rw, at)
		})
	}
	tool := mustCompile(t, definition("GET", "http://rebind.example/"), w.client(t, newHandClock()))
	if r := tool.Call(t.Context(), Call{}); r.Content != public+":80" {
		t.Fatalf("got %+v", r)
	}
	refused(t, tool, "127.0.0.1, a loopback address")
	if d := w.dials(); !slices.Equal(d, []string{public + ":80"}) {
		t.Errorf("dialled %v", d)
	}
}

// Whatever was dialled, the peer that the connection reports decides.
func TestPeerIsChecked(t *testing.T) {
	for peer, says := range map[string]string{"127.0.0.1:80": "a loopback address", "[::ffff:10.1.1.1]:80": "a private address", "pipe": "does not say which address"} {
		asked := false
		w := publicWorld(t, func(http.ResponseWriter, *http.Request) { asked = true })
		w.remote = func(string) string { return peer }
		refused(t, mustCompile(t, definition("GET", "http://example.com/"), w.client(t, newHandClock())), says)
		if asked {
			t.Errorf("peer %s got a request", peer)
		}
	}
}

func TestOperatorNamesHost(t *testing.T) {
	w := newWorld()
	w.name("localhost", []string{"127.0.0.1"})
	ok := func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "hello") }
	for _, at := range []string{"127.0.0.1:8080", "[::1]:8080", "10.0.0.1:80", "169.254.169.254:80"} {
		w.serve(t, at, ok)
	}
	c := w.client(t, newHandClock())
	for _, u := range []string{"http://localhost:8080/", "http://LocalHost.:8080/", "http://127.0.0.1:8080/", "http://[::1]:8080/", "http://[::ffff:127.0.0.1]:8080/", "http://10.0.0.1/", "http://169.254.169.254/"} {
		if r := mustCompile(t, definition("GET", u), c).Call(t.Context(), Call{}); r.Content != "hello" {
			t.Errorf("%s: %+v", u, r)
		}
	}
	// localhost is loopback and nothing else.
	w.name("localhost", []string{"10.0.0.1"})
	c.Close()
	refused(t, mustCompile(t, definition("GET", "http://localhost/"), c), "10.0.0.1, a private address")
}

// redirects is a server at example.com:80 that sends every request to to.
func redirects(t *testing.T, status int, to string) *world {
	return publicWorld(t, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Location", to)
		rw.WriteHeader(status)
	})
}

func TestRedirectRefused(t *testing.T) {
	tests := []struct{ name, to, says string }{
		{"to loopback that is not listed", "http://127.0.0.1:80/", "127.0.0.1:80 is not one"},
		{"to listed loopback", "http://127.0.0.1:81/", "a loopback address"},
		{"to listed localhost", "http://localhost:81/", "a loopback address"},
		{"to a listed name of a private address", "http://inside.example/", "a private address"},
		{"to a listed mapped address", "http://[::ffff:10.0.0.1]/", "a private address"},
		{"to another host", "http://other.example/", "other.example:80 is not one"},
		{"to another port", "http://example.com:81/", "example.com:81 is not one"},
		{"to another scheme", "file:///etc/passwd", "the scheme \"file\""},
		{"without end", "http://example.com/", "more than 5 redirects"},
		{"to a strange host", "http://exa_mple.com%2f/", ""},
		{"to a number that is an address", "http://2130706433/", "2130706433:80 is not one"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := redirects(t, 302, tt.to)
			w.name("inside.example", []string{"10.0.0.1"})
			w.name("localhost", []string{"127.0.0.1"})
			def := definition("GET", "http://example.com/")
			def.HTTP.AllowHosts = []string{"example.com", "127.0.0.1:81", "localhost:81", "inside.example", "10.0.0.1"}
			tool := mustCompile(t, def, w.client(t, newHandClock()))
			if tt.says == "" {
				if r := tool.Call(t.Context(), Call{}); !r.IsError || r.Retryable {
					t.Errorf("got %+v", r)
				}
			} else {
				refused(t, tool, tt.says)
			}
			if d := w.dials(); !slices.Equal(d, []string{public + ":80"}) {
				t.Errorf("dialled %v", d)
			}
		})
	}
}

// A tool whose own URL is loopback does not get the rest of loopback.
func TestRedirectFromNamedHost(t *testing.T) {
	w := newWorld()
	w.serve(t, "127.0.0.1:8080", func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, "http://127.0.0.1:9090/admin", http.StatusFound)
	})
	def := definition("GET", "http://127.0.0.1:8080/")
	refused(t, mustCompile(t, def, w.client(t, newHandClock())), "127.0.0.1:9090 is not one")
	def.HTTP.AllowHosts = []string{"127.0.0.1:8080", "127.0.0.1:9090"}
	refused(t, mustCompile(t, def, w.client(t, newHandClock())), "a loopback address")
}

func TestRedirectFollowed(t *testing.T) {
	type seen struct{ at, method, body, auth, custom, accept, key, referer string }
	var got []seen
	w := newWorld()
	w.name("example.com", []string{public})
	w.name("other.example", []string{"8.8.8.8"})
	record := func(at, to string, status int) http.HandlerFunc {
		return func(rw http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			h := r.Header
			got = append(got, seen{at + r.URL.Path, r.Method, string(body), h.Get("Authorization"), h.Get("X-Custom"), h.Get("Accept"), h.Get("Idempotency-Key"), h.Get("Referer")})
			if to != "" && r.URL.Path != "/last" {
				if at == "example" && r.URL.Path == "/" {
					http.Redirect(rw, r, "/second", status)
					return
				}
				http.Redirect(rw, r, to, status)
				return
			}
			io.WriteString(rw, "there")
		}
	}
	w.serve(t, public+":80", record("example", "http://user:pass@other.example/third", http.StatusTemporaryRedirect))
	w.serve(t, "8.8.8.8:80", record("other", "http://example.com/last", http.StatusTemporaryRedirect))
	def := definition("POST", "http://example.com/")
	def.HTTP.AllowHosts = []string{"example.com", "other.example"}
	def.HTTP.Headers = map[string]string{"Authorization": "Bearer ${TOKEN}", "X-Custom": "c", "Accept": "text/plain"}
	r := mustCompile(t, def, w.client(t, newHandClock())).Call(t.Context(), Call{Arguments: `{"a":1}`, IdempotencyKey: "k"})
	if r.Content != "there" {
		t.Fatalf("got %+v", r)
	}
	want := []seen{
		{"example/", "POST", `{"a":1}`, "Bearer s3cr3t-t0ken", "c", "text/plain", "k", ""},
		{"example/second", "POST", `{"a":1}`, "Bearer s3cr3t-t0ken", "c", "text/plain", "k", ""},
		{"other/third", "POST", `{"a":1}`, "", "", "text/plain", "k", ""},
		{"example/last", "POST", `{"a":1}`, "", "", "text/plain", "k", ""}, // once away, never again
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%v, want\n%v", got, want)
	}
}

func TestRedirectsAreCounted(t *testing.T) {
	requests := 0
	for last, want := range map[int]string{5: "there", 6: "more than 5 redirects"} {
		requests = 0
		w := publicWorld(t, func(rw http.ResponseWriter, r *http.Request) {
			if requests == last {
				io.WriteString(rw, "there")
				return
			}
			requests++
			http.Redirect(rw, r, "/", http.StatusFound)
		})
		r := mustCompile(t, definition("GET", "http://example.com/"), w.client(t, newHandClock())).Call(t.Context(), Call{})
		if !strings.Contains(r.Content, want) || r.IsError != (last > MaxRedirects) {
			t.Errorf("%d redirects: %+v", last, r)
		}
	}
}

// tlsWorld is a world with an https server at example.com:443 whose
// certificate is trusted.
func tlsWorld(t *testing.T, h http.HandlerFunc) (*world, *Client) {
	srv := httptest.NewTLSServer(h)
	t.Cleanup(srv.Close)
	w := newWorld()
	w.name("example.com", []string{public})
	w.servers[public+":443"] = strings.TrimPrefix(srv.URL, "https://")
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())
	c, err := NewClient(Options{Clock: newHandClock(), Dialer: w, Resolver: w, Secrets: secrets, RootCAs: roots})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return w, c
}

func TestHTTPS(t *testing.T) {
	w, c := tlsWorld(t, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/down" {
			http.Redirect(rw, r, "http://example.com/", http.StatusFound)
			return
		}
		io.WriteString(rw, r.Proto+" "+r.Header.Get("X-A"))
	})
	w.serve(t, public+":80", func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, "https://example.com/", http.StatusFound)
	})
	def := definition("GET", "https://example.com/")
	def.HTTP.Headers = map[string]string{"X-A": "kept"}
	if r := mustCompile(t, def, c).Call(t.Context(), Call{}); r.Content != "HTTP/1.1 kept" {
		t.Errorf("https: %+v", r)
	}
	def.HTTP.URL = "https://example.com/down"
	refused(t, mustCompile(t, def, c), "from https to http")
	// The upgrade of the same host is no change of host.
	def.HTTP.URL = "http://example.com/"
	if r := mustCompile(t, def, c).Call(t.Context(), Call{}); r.Content != "HTTP/1.1 kept" {
		t.Errorf("upgrade: %+v", r)
	}
	// A server that is not trusted is not worth a retry.
	strict := w.client(t, newHandClock())
	def.HTTP.URL = "https://example.com/"
	if r := mustCompile(t, def, strict).Call(t.Context(), Call{}); !r.IsError || r.Retryable || !strings.Contains(r.Content, "certificate") {
		t.Errorf("unknown authority: %+v", r)
	}
}

// The real dialer and resolver, against a real server on loopback.
func TestRealNetwork(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "hello") }))
	t.Cleanup(srv.Close)
	c, err := NewClient(Options{Clock: newHandClock(), Dialer: &net.Dialer{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	for _, u := range []string{srv.URL, strings.Replace(srv.URL, "127.0.0.1", "localhost", 1)} {
		if r := mustCompile(t, definition("GET", u), c).Call(t.Context(), Call{}); r.Content != "hello" {
			t.Errorf("%s: %+v", u, r)
		}
	}
}

func TestNewClientNeedsItsWorld(t *testing.T) {
	if _, err := NewClient(Options{Dialer: newWorld()}); err == nil {
		t.Error("made without a clock")
	}
	if _, err := NewClient(Options{Clock: newHandClock()}); err == nil {
		t.Error("made without a dialer")
	}
	if _, err := Compile(Definition{Name: "n"}, nil, FromAPI); err == nil {
		t.Error("compiled without a client")
	}
}
