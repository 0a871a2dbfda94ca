package model

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The benchmark's server is another process (this binary again), so that the
// figures are the client's alone.
const benchServerVar = "MODEL_BENCH_SERVER"

func TestMain(m *testing.M) {
	if spec := os.Getenv(benchServerVar); spec != "" {
		benchServer(spec)
		return
	}
	os.Exit(m.Run())
}

// benchServer answers every request with tokens chunks, delay apart, one
// write each. spec is "tokens delay".
func benchServer(spec string) {
	var tokens int
	var pause string
	if _, err := fmt.Sscan(spec, &tokens, &pause); err != nil {
		panic(err)
	}
	delay, err := time.ParseDuration(pause)
	if err != nil {
		panic(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr())
	go func() { // ends with the benchmark
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go benchConn(c, tokens, delay)
	}
}

func benchConn(c net.Conn, tokens int, delay time.Duration) {
	r := bufio.NewReader(c)
	event := func(s string) string { s = "data: " + s + "\n\n"; return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }
	chunk := event(textChunk("token "))
	end := event(stopChunk) + event(`{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":9}}`) + event("[DONE]") + "0\r\n\r\n"
	for {
		length := 0
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if v, ok := strings.CutPrefix(line, "Content-Length: "); ok {
				length, _ = strconv.Atoi(strings.TrimSpace(v))
			}
			if line == "\r\n" {
				break
			}
		}
		_, _ = r.Discard(length)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nDate: Thu, 01 Jan 2026 00:00:00 GMT\r\nTransfer-Encoding: chunked\r\n\r\n")
		for range tokens {
			if delay > 0 {
				time.Sleep(delay)
			}
			_, _ = io.WriteString(c, chunk)
		}
		_, _ = io.WriteString(c, end)
	}
}

func startBenchServer(b *testing.B, tokens int, delay time.Duration) string {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", benchServerVar, tokens, delay))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return "http://" + strings.TrimSpace(addr)
}

// cpu is the processor time of this process, user and system.
func cpu() (user, sys time.Duration) {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano()), time.Duration(r.Stime.Nano())
}

// BenchmarkGenerate is one call after the other, the answer as fast as the
// server can write it.
func BenchmarkGenerate(b *testing.B) {
	for _, tokens := range []int{1, 100} {
		b.Run(strconv.Itoa(tokens), func(b *testing.B) {
			p := newProvider(b, startBenchServer(b, tokens, 0), nil)
			sink := SinkFunc(func([]byte) error { return nil })
			req := simpleRequest()
			b.ReportAllocs()
			u0, s0 := cpu()
			for b.Loop() {
				if _, err := p.Generate(context.Background(), req, sink); err != nil {
					b.Fatal(err)
				}
			}
			u1, s1 := cpu()
			b.ReportMetric(float64((u1-u0).Microseconds())/float64(b.N), "user-µs/op")
			b.ReportMetric(float64((s1-s0).Microseconds())/float64(b.N), "sys-µs/op")
		})
	}
}

// BenchmarkConcurrent runs 1,000 calls of 100 tokens, 20 ms apart, at a time
// and reports processor time and memory for each. The bare variant only writes
// a request and reads to the end of the answer over a kept connection: what
// the system calls and the scheduler cost by themselves. Memory is heap and
// stacks in use, connections included, over what was there before.
func BenchmarkConcurrent(b *testing.B) {
	base := startBenchServer(b, 100, 20*time.Millisecond)
	req := simpleRequest()
	req.Messages = append(req.Messages, json.RawMessage(`{"role":"user","content":"`+strings.Repeat("x", 2000)+`"}`))
	b.Run("client", func(b *testing.B) {
		p := newProvider(b, base, nil)
		concurrent(b, func(_ int, tick func()) error {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			_, err := p.Generate(ctx, req, SinkFunc(func([]byte) error { tick(); return nil }))
			return err
		})
	})
	b.Run("bare", func(b *testing.B) {
		conns := make([]net.Conn, benchCalls)
		request := fmt.Sprintf("POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n%2000d", 1)
		concurrent(b, func(i int, tick func()) (err error) {
			if conns[i] == nil {
				if conns[i], err = net.Dial("tcp", strings.TrimPrefix(base, "http://")); err != nil {
					return err
				}
			}
			if _, err := io.WriteString(conns[i], request); err != nil {
				return err
			}
			buf := make([]byte, 2048)
			for {
				n, err := conns[i].Read(buf)
				if err != nil || strings.HasSuffix(string(buf[:n]), "0\r\n\r\n") {
					return err
				}
				tick()
			}
		})
		for _, c := range conns {
			_ = c.Close()
		}
	})
}

const benchCalls = 1000

// concurrent runs rounds of benchCalls calls at a time. call calls tick for
// each piece.
func concurrent(b *testing.B, call func(i int, tick func()) error) {
	round := func(measure func()) {
		var all, started sync.WaitGroup
		started.Add(benchCalls)
		for i := range benchCalls {
			all.Go(func() {
				seen := 0
				if err := call(i, func() {
					if seen++; seen == 10 {
						started.Done()
					}
				}); err != nil {
					b.Error(err)
				}
			})
		}
		started.Wait()
		measure()
		all.Wait()
	}
	mem := func() (m runtime.MemStats) {
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m
	}
	b.ReportAllocs()
	before := mem()
	var during runtime.MemStats
	var user, sys time.Duration
	rounds := 0
	for b.Loop() {
		u0, s0 := cpu()
		round(func() {
			if rounds <= 1 { // the second round finds its connections made
				during = mem()
			}
		})
		u1, s1 := cpu()
		user, sys, rounds = user+u1-u0, sys+s1-s0, rounds+1
	}
	n := float64(rounds * benchCalls)
	b.ReportMetric(float64(user.Microseconds())/n, "user-µs/call")
	b.ReportMetric(float64(sys.Microseconds())/n, "sys-µs/call")
	b.ReportMetric((float64(during.HeapInuse)-float64(before.HeapInuse))/benchCalls, "heap-B/call")
	b.ReportMetric((float64(during.StackInuse)-float64(before.StackInuse))/benchCalls, "stack-B/call")
}
