package httpapi

import (
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
)

// discard is a ResponseWriter that keeps nothing.
type discard struct{ h http.Header }

func (d *discard) Header() http.Header         { return d.h }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(int)             {}
func (d *discard) Flush()                      {}

func benchTurn(b *testing.B, path, body string) {
	w := newWorld(b, func(c *Config) { c.AccessLog = func(AccessRecord) {} })
	path = strings.ReplaceAll(path, "ID", w.session())
	b.ReportAllocs()
	for b.Loop() {
		req, err := http.NewRequest("POST", path, strings.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		req.Header["Content-Type"] = typeJSON
		w.api.ServeHTTP(&discard{http.Header{}}, req)
		if b.N%1000 == 0 { // the script keeps what it saw
			w.script.mu.Lock()
			w.script.seen = nil
			w.script.mu.Unlock()
		}
	}
}

// The whole way of a turn in memory, journal and tables included.
func BenchmarkChatStream(b *testing.B) { benchTurn(b, chatPath, chat("hello", `,"stream":true`)) }
func BenchmarkChatWait(b *testing.B)   { benchTurn(b, chatPath, chat("hello", "")) }

// BenchmarkRoute is the part before the handler.
func BenchmarkRoute(b *testing.B) {
	w := newWorld(b, keys, func(c *Config) { c.AccessLog = func(AccessRecord) {} })
	req, err := http.NewRequest("GET", "/healthz", http.NoBody)
	if err != nil {
		b.Fatal(err)
	}
	out := &discard{http.Header{}}
	b.ReportAllocs()
	for b.Loop() {
		w.api.ServeHTTP(out, req)
	}
}

// BenchmarkOpenStream tells the server's memory for a stream that waits. The
// clients are bare connections, which cost next to nothing here.
func BenchmarkOpenStream(b *testing.B) {
	w := newWorld(b)
	req := "GET /v1/sessions/" + w.session() + "/events HTTP/1.1\r\nHost: x\r\n\r\n"
	const streams = 500
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.GC()
		runtime.ReadMemStats(&before)
		open := make([]net.Conn, 0, streams)
		for range streams {
			conn, err := net.Dial("tcp", w.srv.Listener.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			if _, err := conn.Write([]byte(req)); err != nil {
				b.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 512)); err != nil {
				b.Fatal(err)
			}
			open = append(open, conn)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapInuse+after.StackInuse-before.HeapInuse-before.StackInuse)/streams, "B/stream")
		for _, c := range open {
			_ = c.Close()
		}
		for range streams {
			w.awaitRecord("/v1/sessions/{session_id}/events")
		}
	}
}
