//go:build e2e

package flows

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
)

// latencies runs small flows until stop is set, and gives how long each took.
func latencies(t *testing.T, c *client.Client, prefix string, stop *atomic.Bool) []time.Duration {
	var took []time.Duration
	ctx := within(t, 2*patience)
	for n := 0; !stop.Load(); n++ {
		id := fmt.Sprintf("%s-%d", prefix, n)
		began := time.Now()
		if _, err := client.Start(ctx, c, pipeline, id, flow.To(Seq{}, Job{Left: 2})); err != nil {
			t.Errorf("%s: %v", id, err)
			break
		}
		if n, err := client.Result[int](ctx, c, id); err != nil || n != 2 {
			t.Errorf("%s: %d, %v", id, n, err)
			break
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took
}

func percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)*p/100, len(sorted)-1)]
}

// TestLargeValues: inputs and values of 64 MiB make the round trip while small
// flows go on beside them.
func TestLargeValues(t *testing.T) {
	s := newTarget(t, "")
	s.start()
	newWorkers(t, s).start()
	c, other := s.client(client.Options{}), s.client(client.Options{})
	eventually(t, "the worker", func() bool { w, err := c.Workers(t.Context()); return err == nil && len(w) == 1 })

	var stop atomic.Bool
	time.AfterFunc(1500*time.Millisecond, func() { stop.Store(true) })
	alone := latencies(t, other, "alone", &stop)

	stop.Store(false)
	beside := make(chan []time.Duration)
	go func() { beside <- latencies(t, other, "beside", &stop) }()
	ctx := within(t, 2*patience)
	began := time.Now()
	// With its two quotes the JSON text is just as large as a value may be.
	input := strings.Repeat("0123456789abcdef", 4<<20)[:64<<20-2]
	value := strings.Repeat("fedcba9876543210", 4<<20)[:64<<20-2]
	const id = "large"
	if _, err := client.Start(ctx, c, bulky, id, flow.To(Load{}, input), flow.With(bulk, value)); err != nil {
		t.Fatal(err)
	}
	got, err := client.Result[[]string](ctx, c, id)
	if want := []string{digest(input), digest(value)}; err != nil || !slices.Equal(got, want) {
		t.Fatalf("the handler read %v, %v; want %v", got, err, want)
	}
	if back, err := client.Get(ctx, c, id, bulk); err != nil || back != value {
		t.Errorf("the value that came back has %d bytes, %v", len(back), err)
	}
	if half, err := client.Get(ctx, c, id, halves); err != nil || half != input[:len(input)/2] {
		t.Errorf("what the handler wrote has %d bytes, %v", len(half), err)
	}
	took := time.Since(began)
	stop.Store(true)
	now := <-beside
	if len(now) == 0 || len(alone) == 0 {
		t.Fatal("no small flow was finished")
	}
	p, q := percentile(alone, 99), percentile(now, 99)
	t.Logf("a flow with 64 MiB in, 64 MiB kept and 32 MiB written took %v; small flows beside them: %d, p50 %v → %v, p99 %v → %v: %.1f times",
		took.Round(time.Millisecond), len(now), percentile(alone, 50), percentile(now, 50), p, q, float64(q)/float64(p))
	if peak := s.peak(); peak > maxResident {
		t.Errorf("the server's memory was %d MiB at its highest, more than %d", peak>>20, maxResident>>20)
	} else {
		t.Logf("the server's memory was %d MiB at its highest", peak>>20)
	}
	// What was large is there after a crash, too.
	s.kill()
	s.start()
	if back, err := client.Get(ctx, c, "large", bulk); err != nil || back != value {
		t.Errorf("after a crash the value has %d bytes, %v", len(back), err)
	}
}

// sample is what the server has used so far.
type sample struct{ cpu, journal, batches float64 }

func (s *target) sample() sample {
	return sample{s.metric("process_cpu_seconds_total"), s.metric("perdure_journal_bytes_total"), s.metric("perdure_journal_batches_total")}
}

// tableBytes is the size of the tables on disk.
func (s *target) tableBytes() (n int64) {
	files, err := filepath.Glob(filepath.Join(s.data, "p*", "tables", "*"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, name := range files {
		if i, err := os.Stat(name); err == nil { // a file may be gone by now
			n += i.Size()
		}
	}
	return n
}

// TestLongFlow: the ten-thousandth step of a flow costs what the tenth did, also
// after a restart in the middle.
func TestLongFlow(t *testing.T) {
	const steps, piece, most = 10_000, 1000, 1.1
	var half int64 // bytes of the tables in the middle
	s := newTarget(t, "kernel: {partitions: 1}\n")
	s.start()
	newWorkers(t, s).start()
	c := s.client(client.Options{Patience: patience})
	eventually(t, "the worker", func() bool { w, err := c.Workers(t.Context()); return err == nil && len(w) == 1 })
	ctx := within(t, 3*patience)
	if _, err := client.Start(ctx, c, long, "long", flow.To(Walk{}, steps)); err != nil {
		t.Fatal(err)
	}
	var bytes, cpu []float64
	for at := piece; at <= steps; at += piece {
		before := s.sample()
		if at == steps {
			if n, err := client.Result[int](ctx, c, "long"); err != nil || n != steps {
				t.Fatalf("the flow gives %d, %v", n, err)
			}
		} else if err := client.AwaitValue(ctx, c, "long", milestone, at); err != nil {
			t.Fatal(err)
		}
		after := s.sample()
		bytes = append(bytes, (after.journal-before.journal)/piece)
		cpu = append(cpu, (after.cpu-before.cpu)/piece*1e6)
		if at == steps/2 {
			s.stop()
			half = s.tableBytes()
			s.start()
		}
	}
	t.Logf("journal bytes a step, by thousands: %.0f", bytes)
	t.Logf("CPU of the server a step, µs, by thousands: %.0f", cpu)
	// A thousand is not cut exactly where the look is taken; the first and the one
	// after the restart are partly of other things.
	first, last := bytes[1], bytes[len(bytes)-2]
	if last > first*most {
		t.Errorf("a step costs %.0f bytes of journal in the end, %.0f in the beginning", last, first)
	}
	i, err := c.Describe(ctx, "long")
	if err != nil {
		t.Fatal(err)
	}
	// The begin and the end of each step and of the run, and what the restart has left.
	if over := int(i.Events) - (2*steps + 2); i.StepsDone != steps || over < 0 || over > 2 {
		t.Errorf("the flow has done %d steps, with %d events", i.StepsDone, i.Events)
	}
	n := uint64(0)
	for _, err := range c.History(ctx, "long", client.HistoryOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != i.Events {
		t.Errorf("the log gives %d events, the flow has %d", n, i.Events)
	}
	s.stop()
	whole := s.tableBytes()
	t.Logf("the tables have %d KiB after %d steps, %d KiB after %d", half>>10, steps/2, whole>>10, steps)
	if whole > 3*half { // files come and go with compactions
		t.Error("that is more than in proportion")
	}
}
