package mockllm

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// BenchmarkMock measures the mock against the obvious alternative, net/http
// with a flush per frame; both pay for the same client. cpu-us/op is of the
// whole process.
func BenchmarkMock(b *testing.B) {
	for _, c := range []struct {
		name  string
		cfg   Config
		conns int
	}{
		{"unpaced/c=64", Config{Tokens: 8}, 64},
		{"paced/c=256", Config{TTFT: 100 * time.Millisecond, TPS: 200, Tokens: 8}, 256},
	} {
		b.Run(c.name+"/own", func(b *testing.B) {
			_, url := start(b, c.cfg)
			drive(b, strings.TrimPrefix(url, "http://"), c.conns)
		})
		b.Run(c.name+"/net-http", func(b *testing.B) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			srv := &http.Server{Handler: plain(c.cfg), ReadHeaderTimeout: time.Minute}
			go func() { _ = srv.Serve(l) }()
			defer func() { _ = srv.Close() }()
			drive(b, l.Addr().String(), c.conns)
		})
	}
}

// plain is the mock as one would write it on net/http.
func plain(cfg Config) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		arrived := time.Now()
		body, _ := io.ReadAll(req.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		r := reply{cfg: &cfg, n: 1, model: "mock", bodyBytes: len(body)}
		var buf []byte
		for i := range r.frames() {
			time.Sleep(r.due(i) - time.Since(arrived))
			_, _ = w.Write(r.appendFrame(buf[:0], i))
			if cfg.TPS > 0 || i == 0 { // one flush keeps even a short reply chunked
				w.(http.Flusher).Flush()
			}
		}
	})
}

// drive sends b.N requests over n connections and reads each reply to its end.
func drive(b *testing.B, addr string, n int) {
	body := `{"stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("x", 1000) + `"}]}`
	req := []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
	jobs := make(chan struct{}, b.N)
	for range b.N {
		jobs <- struct{}{}
	}
	close(jobs)
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime()
	var wg sync.WaitGroup
	for range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, err := net.Dial("tcp", addr)
			if err != nil {
				b.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			buf := make([]byte, 16<<10)
			for range jobs {
				if _, err := c.Write(req); err != nil {
					b.Error(err)
					return
				}
				for at := 0; !bytes.HasSuffix(buf[:at], []byte("\r\n0\r\n\r\n")); {
					k, err := c.Read(buf[at:])
					if err != nil {
						b.Error(err)
						return
					}
					at += k
				}
			}
		}()
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64((cpuTime()-cpu).Microseconds())/float64(b.N), "cpu-us/op")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
