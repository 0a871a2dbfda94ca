package mux

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/perdure-dev/perdure/internal/wire"
)

// ends is what a test reads and writes as a connection.
type ends struct {
	io.Reader
	io.Writer
}

// from gives frames that read what b holds, in pieces as a network may cut it.
func from(b []byte, most int) *Frames {
	return NewFrames(FramesConfig{Conn: ends{iotest.HalfReader(bytes.NewReader(b)), io.Discard}, Max: most})
}

// written gives the frames that send writes; with vector, by parts.
func written(t testing.TB, vector bool, send func(*Frames) error) []byte {
	t.Helper()
	var out bytes.Buffer
	cfg := FramesConfig{Conn: ends{nil, &out}}
	if vector {
		cfg.Vector = func(parts [][]byte) error {
			for _, p := range parts {
				out.Write(p)
			}
			return nil
		}
	}
	if err := send(NewFrames(cfg)); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func payload(n int) *wire.Answers {
	return &wire.Answers{Answers: []*wire.Answer{{Id: 7, Result: &wire.Answer_Rpc{Rpc: &wire.RpcReply{Output: bytes.Repeat([]byte{'x'}, n)}}}}}
}

func TestFramesRoundTrip(t *testing.T) {
	sizes := []int{0, 1, 1000, readBytes - 20, readBytes, readBytes + 1, 3 * readBytes, trusted + 1, 5 * trusted}
	b := written(t, false, func(f *Frames) error {
		for _, n := range sizes {
			if err := f.Send(payload(n)); err != nil {
				return err
			}
			_ = f.Beat() // one that is due or not changes nothing
		}
		return f.End(14, "unavailable: the server stops")
	})
	for _, alias := range []bool{false, true} {
		f := NewFrames(FramesConfig{Conn: ends{iotest.HalfReader(bytes.NewReader(b)), nil}, Max: 6 * trusted, Alias: alias})
		for _, n := range sizes {
			var got wire.Answers
			if err := f.Recv(&got); err != nil || !got.EqualVT(payload(n)) {
				t.Fatalf("%d bytes: %v", n, err)
			}
		}
		var end *EndError
		if err := f.Recv(&wire.Answers{}); !errors.As(err, &end) || end.Code != 14 || end.Text != "unavailable: the server stops" {
			t.Errorf("the end: %v", err)
		}
	}
}

func TestWhatIsNoFrameIsRefused(t *testing.T) {
	frame := func(kind byte, n uint32, body string) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{kind}, n), body...)
	}
	for what, c := range map[string]struct {
		in   []byte
		want error
	}{
		"nothing":             {nil, io.ErrUnexpectedEOF},
		"half a head":         {[]byte{0, 0}, io.ErrUnexpectedEOF},
		"half a body":         {frame(0, 5, "ab"), io.ErrUnexpectedEOF},
		"a huge half":         {frame(0, 100<<20, strings.Repeat("x", 3*trusted)), io.ErrUnexpectedEOF},
		"too long":            {frame(0, 128<<20+1, ""), ErrFrame},
		"as long as there is": {frame(0, 1<<32-1, ""), ErrFrame},
		"another kind":        {frame(9, 0, ""), ErrFrame},
		"a beat with a body":  {frame(kindBeat, 1, "x"), ErrFrame},
		"a long end":          {frame(kindEnd, 2+maxEndBytes, ""), ErrFrame},
		"half an end":         {frame(kindEnd, 9, "x"), io.ErrUnexpectedEOF},
		"the end":             {frame(kindEnd, 0, ""), io.EOF},
		"an HTTP request":     {[]byte("GET / HTTP/1.1\r\n\r\n"), ErrFrame},
	} {
		if err := from(c.in, 128<<20).Recv(&wire.Answers{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	if err := from(frame(0, 1, "\xff"), 10).Recv(&wire.Answers{}); err == nil {
		t.Error("garbage is decoded")
	}
	deep := nested(16 << 20)
	if err := from(append(frame(0, uint32(len(deep)), ""), deep...), 128<<20).Recv(&wire.StepSpec{}); !errors.Is(err, errTooDeep) {
		t.Errorf("nested too deep: %v", err)
	}
}

// TestWhatWasLentStays: messages that share memory are not overwritten by what
// comes behind them, in whatever pieces it comes.
func TestWhatWasLentStays(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var sizes []int
	b := written(t, false, func(f *Frames) error {
		for range 200 {
			n := []int{10, 1000, 30_000, 40_000, 160_000, 300_000, trusted - 20}[rng.IntN(7)]
			sizes = append(sizes, n)
			if err := f.Send(payload(n)); err != nil {
				return err
			}
		}
		return nil
	})
	for name, read := range map[string]func(io.Reader) io.Reader{
		"all there is": func(r io.Reader) io.Reader { return r },
		"halves":       iotest.HalfReader,
		"some": func(r io.Reader) io.Reader {
			return readFunc(func(p []byte) (int, error) { return r.Read(p[:min(len(p), 1+rng.IntN(200_000))]) })
		},
	} {
		f := NewFrames(FramesConfig{Conn: ends{read(bytes.NewReader(b)), nil}, Max: 2 * trusted, Alias: true})
		var got []*wire.Answers
		for range sizes {
			m := &wire.Answers{}
			if err := f.Recv(m); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got = append(got, m)
		}
		for i, n := range sizes {
			if !got[i].EqualVT(payload(n)) {
				t.Fatalf("%s: message %d of %d bytes has changed", name, i, n)
			}
		}
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// TestSingleMessagesKeepLittle: a large message that comes alone is in memory of
// its own size, and those that come together share some.
func TestSingleMessagesKeepLittle(t *testing.T) {
	b := written(t, false, func(f *Frames) error { return f.Send(payload(100_000)) })
	for _, together := range []bool{false, true} {
		all := bytes.NewReader(bytes.Repeat(b, 20))
		left := len(b) // of the message that has come
		f := NewFrames(FramesConfig{Conn: ends{readFunc(func(p []byte) (int, error) {
			if !together {
				p = p[:min(len(p), left)]
			}
			n, err := all.Read(p)
			if left -= n; left <= 0 {
				left = len(b)
			}
			return n, err
		}), nil}, Max: trusted, Alias: true})
		most := 0
		for range 20 {
			if err := f.Recv(&wire.Answers{}); err != nil {
				t.Fatal(err)
			}
			most = max(most, cap(f.in.buf))
		}
		if shared := most > 2*len(b); shared != together {
			t.Errorf("together %t: memory of %d bytes for messages of %d", together, most, len(b))
		}
	}
}

// TestMemoryComesWithTheBytes: a length alone takes little.
func TestMemoryComesWithTheBytes(t *testing.T) {
	head := []byte{0, 0x07, 0xff, 0xff, 0xff}
	n := testing.AllocsPerRun(10, func() {
		if err := from(head, 128<<20).Recv(&wire.Answers{}); err == nil {
			t.Error("no error")
		}
	})
	var f reader
	b, err := f.whole(nil, 0)
	if err != nil || len(b) != 0 {
		t.Errorf("%v %v", b, err)
	}
	f.src = bytes.NewReader(make([]byte, 5*trusted))
	if b, err = f.whole(make([]byte, trusted), 5*trusted); err != nil || len(b) != 5*trusted {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	t.Logf("%v allocations", n)
}

// TestNothingFollowsHalfAFrame: after a failed write all fail.
func TestNothingFollowsHalfAFrame(t *testing.T) {
	broken := errors.New("broken")
	f := NewFrames(FramesConfig{Conn: ends{nil, iotest.TruncateWriter(failing{broken}, 3)}, Vector: func([][]byte) error { return broken }})
	if err := f.Send(attributes(2, 10_000)); !errors.Is(err, ErrClosed) || !errors.Is(err, broken) {
		t.Errorf("the first: %v", err)
	}
	if err := f.Send(payload(1)); !errors.Is(err, ErrClosed) {
		t.Errorf("the next: %v", err)
	}
	if err := f.End(1, "x"); !errors.Is(err, ErrClosed) {
		t.Errorf("the end: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// TestAfterTheEnd: nothing is sent, and what has come is not handed out.
func TestAfterTheEnd(t *testing.T) {
	b := written(t, false, func(f *Frames) error { return f.Send(payload(1)) })
	f := from(b, 1000)
	if err := f.End(0, strings.Repeat("x", 2*maxEndBytes)); err != nil {
		t.Fatal(err)
	}
	if err := f.Recv(&wire.Answers{}); !errors.Is(err, ErrClosed) {
		t.Errorf("received: %v", err)
	}
	if err := f.Send(payload(1)); !errors.Is(err, ErrClosed) {
		t.Errorf("sent: %v", err)
	}
	f = from(b, 1000)
	if err := f.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if err := f.Recv(&wire.Answers{}); err != nil {
		t.Errorf("after CloseSend: %v", err)
	}
}

// TestBeats: a side says that it lives when it says nothing else, and hears when
// the other does not.
func TestBeats(t *testing.T) {
	var out bytes.Buffer
	in := make(chan []byte, 1)
	f := NewFrames(FramesConfig{Conn: ends{chanReader(in), &out}, Max: 1000})
	beats := func(want int) {
		t.Helper()
		if out.Len() != want*headBytes {
			t.Errorf("%d bytes of beats, want %d beats", out.Len(), want)
		}
	}
	_ = f.Beat()
	beats(1)
	_ = f.Send(&wire.Answers{}) // as long as a beat
	_ = f.Beat()
	beats(2)
	if err := f.Beat(); !errors.Is(err, ErrSilent) {
		t.Errorf("silence: %v", err)
	}
	in <- out.Bytes()[:headBytes]
	close(in)
	if err := f.Recv(&wire.Answers{}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a beat is received: %v", err)
	}
	if err := f.Beat(); err != nil {
		t.Errorf("after a beat: %v", err)
	}
	f.mu.Lock() // a write is stuck
	defer f.mu.Unlock()
	_ = f.Beat()
	if err := f.Beat(); err != nil {
		t.Error(err)
	}
	if err := f.Beat(); !errors.Is(err, ErrSilent) {
		t.Errorf("silence while a write is stuck: %v", err)
	}
}

type chanReader chan []byte

func (c chanReader) Read(b []byte) (int, error) {
	p, ok := <-c
	if !ok {
		return 0, io.EOF
	}
	return copy(b, p), nil
}

// TestSendersDoNotMix: frames of several goroutines stay whole.
func TestSendersDoNotMix(t *testing.T) {
	b := written(t, true, func(f *Frames) error {
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 20 {
					_ = f.Send(attributes(3, i*1000))
					_ = f.Beat()
				}
			})
		}
		wg.Wait()
		return f.CloseSend()
	})
	f, n := from(b, 1<<20), 0
	for {
		err := f.Recv(&wire.Answers{})
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 160 {
		t.Errorf("%d frames", n)
	}
}

func attributes(n, size int) *wire.Answers {
	re := &wire.AttributesReply{RunId: "r"}
	for i := range n {
		re.Attributes = append(re.Attributes, &wire.Attribute{Name: "a", Value: bytes.Repeat([]byte{'0' + byte(i)}, size), Lsn: 9, Index: 1})
	}
	return &wire.Answers{Answers: []*wire.Answer{{Id: 1 << 20, Result: &wire.Answer_Attributes{Attributes: re}}}}
}

// FuzzSplice: what is sent by parts is what the generated encoder gives.
func FuzzSplice(f *testing.F) {
	for _, m := range []*wire.Answers{attributes(1, 10), attributes(3, 5000), attributes(10, 16<<10), payload(10_000), {Answers: []*wire.Answer{
		attributes(2, 5000).Answers[0], payload(5).Answers[0], {Id: 3, More: true, Error: &wire.Error{Code: "x"}, Result: attributes(1, 5000).Answers[0].Result},
		{Result: &wire.Answer_Attributes{}}, {Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{Attributes: []*wire.Attribute{{Blob: "b", Size: 9}, {Value: make([]byte, 5000), Index: -1}, {}}}}},
	}}} {
		b, err := m.MarshalVT()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(append(b, 0xa2, 0x06, 0x01, 'x')) // a field that is not known
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &wire.Answers{}
		if m.UnmarshalVT(b) != nil {
			return
		}
		plain := written(t, false, func(f *Frames) error { return f.Send(m) })
		spliced := written(t, true, func(f *Frames) error { return f.Send(m) })
		if !bytes.Equal(plain, spliced) {
			t.Errorf("by parts:\n%x\nwhole:\n%x", spliced, plain)
		}
	})
}

// TestLargeValuesAreNotCopied: they are parts of their own.
func TestLargeValuesAreNotCopied(t *testing.T) {
	m := attributes(10, 16<<10)
	values := m.Answers[0].GetAttributes().Attributes
	found := 0
	f := NewFrames(FramesConfig{Conn: ends{}, Vector: func(parts [][]byte) error {
		for _, p := range parts {
			if found < len(values) && &p[0] == &values[found].Value[0] {
				found++
			}
		}
		return nil
	}})
	if err := f.Send(m); err != nil || found != len(values) {
		t.Errorf("%d of %d values sent from where they are, %v", found, len(values), err)
	}
	for _, p := range f.parts[:cap(f.parts)] {
		if p != nil {
			t.Fatal("a value that was sent is kept")
		}
	}
}

// FuzzFrames reads what may come: it must end, with no more memory than bytes.
func FuzzFrames(f *testing.F) {
	f.Add(written(f, false, func(fr *Frames) error { return fr.Send(attributes(2, 9000)) }))
	f.Add(written(f, false, func(fr *Frames) error { return fr.End(14, "unavailable: x") }))
	f.Add(written(f, false, func(fr *Frames) error { return fr.Beat() }))
	f.Add([]byte{0, 0x07, 0xff, 0xff, 0xff, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, alias := range []bool{false, true} {
			fr := NewFrames(FramesConfig{Conn: ends{iotest.OneByteReader(bytes.NewReader(b)), io.Discard}, Max: 1 << 20, Alias: alias})
			for i := 0; ; i++ {
				if fr.Recv(&wire.Answers{}) != nil {
					break
				}
				if i > len(b) {
					t.Fatal("more frames than bytes")
				}
			}
		}
	})
}
