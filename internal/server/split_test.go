package server

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/mux"
)

// TestOneAddressTwoProtocols gives each half the connections that are its, whole.
func TestOneAddressTwoProtocols(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := split(l, time.Minute, time.Now)
	ran := make(chan error, 1)
	go func() { ran <- s.run() }()
	hs := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello ", r.URL.Path) })}
	served := make(chan error, 1)
	go func() { served <- hs.Serve(s.http) }()
	got := make(chan string, 1)
	go func() {
		c, err := s.grpc.Accept()
		if err != nil {
			got <- err.Error()
			return
		}
		line, _ := bufio.NewReader(c).ReadString('\n')
		got <- line
	}()
	res, err := http.Get("http://" + l.Addr().String() + "/x")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	_ = res.Body.Close()
	if string(body) != "hello /x" {
		t.Errorf("HTTP got %q", body)
	}
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	// The preface in two parts, as a network may cut it.
	for _, part := range []string{"PR", "I * HTTP/2.0\r\n"} {
		if _, err := c.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	if line := <-got; line != "PRI * HTTP/2.0\r\n" {
		t.Errorf("gRPC got %q", line)
	}
	_ = s.grpc.Close()
	if _, err := s.grpc.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed half accepts: %v", err)
	}
	s.close()
	if err := <-ran; !errors.Is(err, net.ErrClosed) {
		t.Errorf("run ends with %v", err)
	}
	if err := <-served; !errors.Is(err, net.ErrClosed) {
		t.Errorf("HTTP ends with %v", err)
	}
}

// TestFramesAreSorted: by the first line alone, however it is cut.
func TestFramesAreSorted(t *testing.T) {
	line := mux.FramesLine
	for first, want := range map[string][2]bool{ // gRPC's, and whether more is needed
		"":                          {false, true},
		"G":                         {false, true},
		line[:len(line)-1]:          {false, true},
		line:                        {true, false},
		line + "HTTP/1.1\r\n":       {true, false},
		"GET /perdure.v1.Flows/Fx ": {false, false},
		"GET / HTTP/1.1\r\n":        {false, false},
		"PRI":                       {false, true},
		"PRI * HTTP/2.0\r\n":        {true, false},
		"POST ":                     {false, false},
	} {
		if grpc, open := belongs([]byte(first)); grpc != want[0] || open != want[1] {
			t.Errorf("%q: gRPC's %t, more %t, want %v", first, grpc, open, want)
		}
	}
}

// TestLimitedConnectionsAreWrittenTo: what wraps a connection keeps nobody from
// writing to it by parts.
func TestLimitedConnectionsAreWrittenTo(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	var c net.Conn = &peeked{Conn: &limitConn{Conn: a, slots: make(chan struct{}, 1)}}
	for {
		w, ok := c.(interface{ Under() net.Conn })
		if !ok {
			break
		}
		c = w.Under()
	}
	if c != a {
		t.Errorf("found a %T", c)
	}
}

func TestSilentConnectionIsClosed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := split(l, time.Millisecond, time.Now)
	go func() { _ = s.run() }()
	defer s.close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read gives %v, want the end", err)
	}
}

// TestBadAddressOfFlowsIsSaidAtTheStart: before the server calls itself ready, and
// nothing is left taken.
func TestBadAddressOfFlowsIsSaidAtTheStart(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := t.TempDir()
	for want, change := range map[string]func(*config.Config){
		"grpc_listen":     func(c *config.Config) { c.GRPCListen = taken.Addr().String() },
		"flows.cert_file": func(c *config.Config) { c.Flows.CertFile = dir + "/none" },
	} {
		cfg := config.Default()
		cfg.Data = dir
		change(cfg)
		if _, err := Open(cfg, env.Real(), "test", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
	openServer(t, dir)
}
