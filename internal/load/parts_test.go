package load

import (
	"bytes"
	"context"
	"encoding/xml"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

func TestQuantilesAreExact(t *testing.T) {
	var ns []int64
	for i := 1000; i >= 1; i-- {
		ns = append(ns, int64(i)*1e6)
	}
	q := quantiles(ns)
	if q.P50 != 500 || q.P95 != 950 || q.P99 != 990 || *q.Max != 1000 {
		t.Errorf("%+v max %v", q, *q.Max)
	}
	if q = quantiles([]int64{7e6}); q.P50 != 7 || q.P99 != 7 {
		t.Errorf("one sample: %+v", q)
	}
	if q = quantiles(nil); q != (Quantiles{}) {
		t.Errorf("none: %+v", q)
	}
}

func TestWeightCountsShares(t *testing.T) {
	turns := []attempt{{start: 0, end: 100}, {start: 100, end: 200}, {start: 150, end: 350}, {start: 400, end: 500}}
	if got := weight(turns, 50, 250); got != 0.5+1+0.5 {
		t.Errorf("weight %v, want 2", got)
	}
	if got := len(within(turns, 100, 400)); got != 2 {
		t.Errorf("%d turns started in the window, want 2", got)
	}
}

func TestProcParsers(t *testing.T) {
	m, err := parseRollup([]byte("5500-7fff ---p 00000000 00:00 0 [rollup]\nRss: 100 kB\nPss: 80 kB\nPss_Dirty: 5 kB\nPrivate_Clean: 10 kB\nPrivate_Dirty: 30 kB\n"))
	if err != nil || m != (memory{100 << 10, 80 << 10, 40 << 10}) {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := parseRollup([]byte("Rss: 1 kB\n")); err == nil {
		t.Error("missing fields were taken")
	}
	cpu, err := parseStat([]byte("42 (a b) c) S 1 1 1 0 -1 4194560 100 0 0 0 150 50 0 0 20 0 1 0 5 1 1"))
	if err != nil || cpu != 2*time.Second {
		t.Errorf("%v, %v", cpu, err)
	}
	if _, err := parseStat([]byte("42 (x) S 1")); err == nil {
		t.Error("a short stat was taken")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if p, err := findListener(l.Addr().String()); err != nil || int(p) != os.Getpid() {
		t.Errorf("listener %v, %v, want this process %d", p, err, os.Getpid())
	}
	_ = l.Close()
	if p, err := findListener(l.Addr().String()); err == nil {
		t.Errorf("found %v on a closed port", p)
	}
	if _, err := findListener("192.0.2.1:80"); err == nil {
		t.Error("found a process of another machine")
	}
}

func TestEventsInPieces(t *testing.T) {
	stream := ": hi\n\nid: 1\r\nevent: a\r\ndata: one\r\ndata:two\r\n\r\nevent:b\n\n\n\ndata\n\nevent: " + strings.Repeat("x", 100) + "\ndata: " + strings.Repeat("y", 9000) + "\n\nevent: c\rdata: z\r\r\nevent: cut"
	want := []string{"a|one\ntwo", "b|", "|", strings.Repeat("x", maxEventName) + "|" + strings.Repeat("y", maxEventData), "c|z"}
	for _, size := range []int{1, 2, 3, 7, 64, 1 << 20} {
		got := feed([]byte(stream), size)
		for i := range got {
			if i == 3 && len(got[i]) < maxEventName+1+2048 {
				t.Errorf("size %d: only %d bytes kept of a long event", size, len(got[i]))
			}
			got[i] = got[i][:min(len(got[i]), 2048)]
		}
		short := append([]string(nil), want...)
		short[3] = short[3][:2048]
		if !reflect.DeepEqual(got, short) {
			t.Errorf("size %d: %.200q", size, got)
		}
	}
}

// feed parses b in pieces of the given size.
func feed(b []byte, size int) (out []string) {
	var e events
	for len(b) > 0 {
		n := min(size, len(b))
		p := append([]byte(nil), b[:n]...)
		b = b[n:]
		for ok := true; ; {
			if p, ok = e.next(p); !ok {
				break
			}
			out = append(out, string(e.name)+"|"+string(e.data))
		}
	}
	return out
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("event: a\ndata: b\n\n"), uint8(1))
	f.Add([]byte("data: b\r\n\r\n:c\r\rdata\n"), uint8(2))
	f.Fuzz(func(t *testing.T, b []byte, size uint8) {
		if len(b) > maxEventData {
			return // where a long line is cut depends on the pieces
		}
		whole, pieces := feed(b, len(b)+1), feed(b, int(size)+1)
		if !reflect.DeepEqual(whole, pieces) {
			t.Fatalf("%q in pieces of %d: %q, whole %q", b, int(size)+1, pieces, whole)
		}
	})
}

// canned is a connection that answers with fixed bytes.
type canned struct {
	net.Conn
	r io.Reader
}

func (c canned) Read(b []byte) (int, error) { return c.r.Read(b) }
func (canned) Write(b []byte) (int, error)  { return len(b), nil }
func (canned) Close() error                 { return nil }
func (canned) SetDeadline(time.Time) error  { return nil }
func (canned) LocalAddr() net.Addr          { return nil }
func (c canned) dial() (net.Conn, error)    { return c, nil }
func (c canned) String() string             { return "canned" }
func cannedEnv(reply []byte, oneByOne bool) env.Env {
	var r io.Reader = bytes.NewReader(reply)
	if oneByOne {
		r = iotestOneByte{r}
	}
	return env.Env{Clock: env.SystemClock{}, Dialer: dialer{canned{r: r}}}
}

type iotestOneByte struct{ r io.Reader }

func (o iotestOneByte) Read(b []byte) (int, error) { return o.r.Read(b[:min(len(b), 1)]) }

type dialer struct{ c canned }

func (d dialer) DialContext(context.Context, string, string) (net.Conn, error) { return d.c.dial() }

func exchange(reply []byte, oneByOne bool) (status, []byte, error) {
	c := newConn(cannedEnv(reply, oneByOne), base{addr: "x:1", host: "x"}, "")
	st, err := c.do(context.Background(), Request{Method: "GET", Path: "/"}, time.Time{})
	if err != nil {
		return st, nil, err
	}
	body, err := c.rest()
	return st, body, err
}

func TestReplies(t *testing.T) {
	cases := []struct {
		name, reply, body string
		code              int
		bad               bool
	}{
		{"length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "hi", 200, false},
		{"chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x\r\nhi\r\n0001\r\n!\r\n0\r\nT: v\r\n\r\n", "hi!", 200, false},
		{"to the end", "HTTP/1.0 200 OK\r\n\r\nhi", "hi", 200, false},
		{"no content", "HTTP/1.1 204 No Content\r\n\r\n", "", 204, false},
		{"continue first", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", "", 201, false},
		{"short", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "hi", 200, true},
		{"no status", "HTTP/1.1 abc\r\n\r\n", "", 0, true},
		{"negative length", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "", 200, true},
		{"endless line", "HTTP/1.1 200 " + strings.Repeat("a", 2*readBuffer), "", 0, true},
		{"endless head", "HTTP/1.1 200 OK\r\n" + strings.Repeat("a: b\r\n", 1000), "", 200, true},
		{"bad chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nhi\r\n", "h", 200, true},
	}
	for _, c := range cases {
		for _, slow := range []bool{false, true} {
			st, body, err := exchange([]byte(c.reply), slow)
			if (err != nil) != c.bad || st.code != c.code || string(body) != c.body {
				t.Errorf("%s (byte by byte %v): %d %q %v", c.name, slow, st.code, body, err)
			}
		}
	}
}

func FuzzReply(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"))
	f.Add([]byte("HTTP/1.1 429 X\r\nRetry-After: 0.5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, body, err := exchange(b, false)
		st2, body2, err2 := exchange(b, true)
		if st != st2 || !bytes.Equal(body, body2) || (err == nil) != (err2 == nil) {
			t.Fatalf("%q: whole %+v %q %v, byte by byte %+v %q %v", b, st, body, err, st2, body2, err2)
		}
		if st.retryAfter < 0 {
			t.Fatalf("Retry-After %v", st.retryAfter)
		}
	})
}

func point(c int, p95 float64, rss int64) Point {
	most := p95 * 2
	return Point{Concurrency: c, Turns: 10, TurnsPerS: float64(c), Turn: Quantiles{P50: p95 / 2, P95: p95, P99: p95, Max: &most}, Server: &ServerFigures{RSS: rss}}
}

func TestCompare(t *testing.T) {
	base := [][]Point{{point(1, 10, 100), point(8, 10, 100)}, {point(1, 11, 100), point(8, 10, 100)}, {point(1, 90, 100), point(8, 10, 100)}}
	head := [][]Point{{point(1, 13, 119), point(8, 12.1, 100)}, {point(1, 13, 119), point(8, 12.1, 121)}, {point(1, 1, 500), point(8, 12.1, 121)}}
	all, err := Compare(base, head, 0.2)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, g := range all {
		got = append(got, fmt.Sprint(g.Concurrency, g.Figure, g.Base, g.Head, g.Alarm))
	}
	want := []string{"1turn_p95_ms11 13false", "1rss_bytes100 119false", "8turn_p95_ms10 12.1true", "8rss_bytes100 121true"}
	for i := range got {
		got[i], want[i] = strings.ReplaceAll(got[i], " ", ""), strings.ReplaceAll(want[i], " ", "")
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	var out bytes.Buffer
	if alarm, err := WriteGrowth(&out, all); err != nil || !alarm || strings.Count(out.String(), "ALARM") != 2 {
		t.Errorf("%v, %v:\n%s", alarm, err, out.String())
	}
	head[0][0].Errors, head[1][0].Errors = 3, 3
	if all, err = Compare(base, head, 9); err != nil || !all[2].Alarm || all[2].Figure != "errors" {
		t.Errorf("new errors: %+v, %v", all, err)
	}
	if _, err := Compare(base, [][]Point{{point(2, 1, 1)}}, 0.2); err == nil {
		t.Error("nothing in common was taken")
	}
	head[0][0].Server = nil
	head[1][0].Server = nil
	if _, err := Compare(base, head, 0.2); err == nil {
		t.Error("missing memory was taken")
	}
}

func TestPlotIsXML(t *testing.T) {
	floor := 2.0
	one := point(64, 10, 1)
	one.FloorMS = &floor
	for name, all := range map[string][]Series{
		"none":   nil,
		"empty":  {{Name: "a", Points: []Point{{Concurrency: 1}}}},
		"single": {{Name: `<&">`, Points: []Point{one}}},
		"two":    {{Name: "a", Points: []Point{point(1, 5, 1), one}}, {Name: "b", Points: []Point{point(1, 50, 1), point(1000, 500, 1)}}},
	} {
		var out bytes.Buffer
		if err := WritePlot(&out, all); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(out.Bytes(), []byte("NaN")) || bytes.Contains(out.Bytes(), []byte("Inf")) {
			t.Errorf("%s: not a number in\n%s", name, out.String())
		}
		d := xml.NewDecoder(&out)
		for {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	if err := WritePlot(io.Discard, make([]Series, 7)); err == nil {
		t.Error("more series than colours were taken")
	}
}

func TestCommand(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	line := func(p95 float64, rss int64) string { return string(mustJSON(point(1, p95, rss))) + "\n" }
	a, b := file("a", line(10, 100)), file("b", line(20, 100))
	base := file("base.json", `{"settings": {}, "runs": [[`+line(9, 100)+`],[`+line(10, 100)+`]]}`)
	key := file("key", "k\n")
	f := newFake(t, &fake{total: time.Millisecond})
	cases := []struct {
		args string
		code int
		out  string
	}{
		{"", 2, ""},
		{"nonsense", 2, ""},
		{"turns -h", 0, ""},
		{"turns --target " + f.url + " --sweep 1,2 --duration 50ms --ramp 1ms --json --label a=b --api-key-file " + key, 0, `"a":"b"`},
		{"turns --target " + f.url + " --sweep x", 2, ""},
		{"turns --target " + f.url + " --protocol x", 2, ""},
		{"turns --target " + f.url + " extra", 2, ""},
		{"table " + a, 0, "turns/s"},
		{"table " + filepath.Join(dir, "none"), 2, ""},
		{"plot --out " + filepath.Join(dir, "p.svg") + " x=" + a + " y=" + b, 0, ""},
		{"plot --out " + filepath.Join(dir, "p.svg"), 2, ""},
		{"columns slow=" + b + " quick=" + a, 0, "2.00×"},
		{"columns", 2, ""},
		{"compare --base " + a + " --head " + a, 0, "+0.0 %"},
		{"compare --base " + a + " --head " + b, 1, "ALARM"},
		{"compare --limit 1.5 --base " + a + " --head " + b, 0, "+100.0 %"},
		{"compare --base " + base + " --head " + b, 1, "ALARM"},
		{"compare --base " + key + ".json --head " + b, 2, ""},
		{"compare --base " + a, 2, ""},
	}
	for _, c := range cases {
		var out, errs bytes.Buffer
		if code := Command(context.Background(), strings.Fields(c.args), &out, &errs); code != c.code || !strings.Contains(out.String(), c.out) {
			t.Errorf("%q: exit %d, want %d\n%s%s", c.args, code, c.code, out.String(), errs.String())
		}
	}
	if f.auth != "Bearer k" {
		t.Errorf("Authorization %q", f.auth)
	}
}

func FuzzReadPoints(f *testing.F) {
	f.Add([]byte(`{"concurrency":1}` + "\n\n" + `{"concurrency":2}`))
	f.Add([]byte("[]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		points, err := ReadPoints(bytes.NewReader(b))
		for _, p := range points {
			if err == nil && p.Concurrency < 1 {
				t.Fatalf("took %+v", p)
			}
		}
	})
}
