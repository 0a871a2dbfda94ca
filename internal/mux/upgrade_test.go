package mux

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/perdure-dev/perdure/internal/wire"
)

// asked is what a client writes to upgrade.
func asked(t *testing.T, host, authorization string) string {
	t.Helper()
	var out strings.Builder
	f := NewFrames(FramesConfig{Conn: ends{strings.NewReader(switching), &out}})
	if err := f.Ask(host, authorization); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestUpgrade(t *testing.T) {
	for _, key := range []string{"", "Bearer sesame"} {
		request := asked(t, "host:1", key)
		if !strings.HasPrefix(request, FramesLine) {
			t.Errorf("the request is %q", request)
		}
		// A frame may come with the request.
		frame := written(t, false, func(f *Frames) error { return f.Send(payload(100)) })
		var out bytes.Buffer
		f := NewFrames(FramesConfig{Conn: ends{iotest.HalfReader(strings.NewReader(request + string(frame))), &out}, Max: 1000})
		got, err := f.Accept()
		if err != nil || got != key || out.String() != switching {
			t.Errorf("%q, %v, answered with %q", got, err, out.String())
		}
		if err := f.Recv(&wire.Answers{}); err != nil {
			t.Errorf("the frame behind the request: %v", err)
		}
	}
}

func TestForeignRequests(t *testing.T) {
	const good = "Host: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: PERDURE-frames/1\r\n"
	line := framesLine + "\r\n"
	for what, c := range map[string]struct{ in, status string }{
		"as it is to be":        {line + good + "\r\n", "101"},
		"without returns":       {strings.ReplaceAll(line+good+"\r\n", "\r", ""), "101"},
		"no body":               {line + good + "Content-Length: 0\r\n\r\n", "101"},
		"another path":          {"GET / HTTP/1.1\r\n" + good + "\r\n", "404"},
		"another method":        {"POST /perdure.v1.Flows/Frames HTTP/1.1\r\n" + good + "\r\n", "404"},
		"another version":       {FramesLine + "HTTP/1.0\r\n" + good + "\r\n", "404"},
		"no upgrade":            {line + "Host: x\r\n\r\n", "426"},
		"another upgrade":       {line + "Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", "426"},
		"a body":                {line + good + "Content-Length: 9\r\n\r\n123456789", "400"},
		"a body of parts":       {line + good + "Transfer-Encoding: chunked\r\n\r\n", "400"},
		"a header without name": {line + ": x\r\n\r\n", "400"},
		"a header without end":  {line + "x\r\n\r\n", "400"},
		"an empty line":         {"\r\n", "400"},
		"a long line":           {strings.Repeat("x", maxHead+2), "400"},
		"many headers":          {line + strings.Repeat("a: b\r\n", maxHead), "400"},
		"the end":               {line + "Host", ""},
		"nothing":               {"", ""},
	} {
		var out bytes.Buffer
		_, err := NewFrames(FramesConfig{Conn: ends{strings.NewReader(c.in), &out}}).Accept()
		if got := out.String(); c.status == "" && got != "" || !strings.HasPrefix(got, "HTTP/1.1 "[:min(9, len(got))]+c.status) {
			t.Errorf("%s: answered with %q", what, got)
		}
		if good := c.status == "101"; good != (err == nil) || !good && !errors.Is(err, ErrForeign) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestTwoKeysAreNone, as with gRPC.
func TestTwoKeysAreNone(t *testing.T) {
	in := strings.Replace(asked(t, "x", "Bearer a"), "Authorization", "Authorization: Bearer b\r\nAuthorization", 1)
	got, err := NewFrames(FramesConfig{Conn: ends{strings.NewReader(in), io.Discard}}).Accept()
	if err != nil || got != "" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestRefusedUpgrades(t *testing.T) {
	for _, answer := range []string{
		"HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n", "HTTP/1.1 401 Unauthorized\r\n\r\n",
	} {
		err := NewFrames(FramesConfig{Conn: ends{strings.NewReader(answer), io.Discard}}).Ask("x", "")
		if !errors.Is(err, ErrRefused) {
			t.Errorf("%q: %v", answer, err)
		}
	}
	for _, answer := range []string{"", "HTTP/1.1 1", "HTTP/1.1 503 Service Unavailable\r\n\r\n", strings.Repeat("x", 2*maxHead)} {
		if err := NewFrames(FramesConfig{Conn: ends{strings.NewReader(answer), io.Discard}}).Ask("x", ""); err == nil || errors.Is(err, ErrRefused) {
			t.Errorf("%.20q: %v", answer, err)
		}
	}
	// Nothing gets into the request through a name or a key.
	for _, v := range []string{"a\r\nX: y", "ä", "\x00"} {
		if NewFrames(FramesConfig{Conn: ends{}}).Ask(v, "") == nil || NewFrames(FramesConfig{Conn: ends{}}).Ask("x", v) == nil {
			t.Errorf("%q is sent", v)
		}
	}
}

// FuzzAccept reads what may come as a request.
func FuzzAccept(f *testing.F) {
	f.Add([]byte(framesLine + "\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: perdure-frames/1\r\nAuthorization: Bearer a\r\n\r\n"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		fr := NewFrames(FramesConfig{Conn: ends{iotest.OneByteReader(bytes.NewReader(b)), io.Discard}})
		if key, err := fr.Accept(); err == nil && strings.ContainsAny(key, "\r\n") {
			t.Errorf("a key of two lines: %q", key)
		}
	})
}
