package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// The worker tells the client about handlers that have started over a Unix
// socket, beside the product: what it carries is no operation and no load on the
// server. A record is 16 bytes: the number of the waiter, and when.
const (
	wakeRecord = 16
	// wakeQueue is how many started handlers wait to be told; it is more than
	// can run at once.
	wakeQueue = 1 << 16
)

// monotonic is an instant of the machine's clock that does not jump, for two
// processes to compare: nanoseconds since an origin that both read alike.
type monotonic struct {
	base   time.Time
	origin int64
}

// newMonotonic takes the wall clock at the start as the origin and goes on
// monotonically from there. Both processes read the same wall clock within the
// same second, so that only a jump between these two reads could part them.
func newMonotonic() monotonic {
	now := time.Now()
	return monotonic{base: now, origin: now.UnixNano()}
}

func (m monotonic) of(t time.Time) int64      { return m.origin + int64(t.Sub(m.base)) }
func (m monotonic) instant(n int64) time.Time { return m.base.Add(time.Duration(n - m.origin)) }

// wakeSender is the worker's end.
type wakeSender struct {
	clock monotonic
	queue chan [wakeRecord]byte
}

// dialWakes connects to the client's socket, and sends until ctx ends.
func dialWakes(ctx context.Context, socket string) (*wakeSender, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("the client's socket: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	s := &wakeSender{clock: newMonotonic(), queue: make(chan [wakeRecord]byte, wakeQueue)}
	go s.send(ctx, conn)
	return s, nil
}

// woke tells that a handler has started now. It does not block.
func (s *wakeSender) woke(number int) {
	var b [wakeRecord]byte
	binary.LittleEndian.PutUint64(b[:], uint64(number))
	binary.LittleEndian.PutUint64(b[8:], uint64(s.clock.of(time.Now())))
	select {
	case s.queue <- b:
	default: // the client has gone
	}
}

// send gathers what is there into one write.
func (s *wakeSender) send(ctx context.Context, conn net.Conn) {
	w := bufio.NewWriterSize(conn, 64<<10)
	for {
		select {
		case b := <-s.queue:
			_, _ = w.Write(b[:])
		case <-ctx.Done():
			return
		}
		for more := true; more; {
			select {
			case b := <-s.queue:
				_, _ = w.Write(b[:])
			default:
				more = false
			}
		}
		if w.Flush() != nil {
			return
		}
	}
}

// wakeReceiver is the client's end: it hands each record to who waits for it.
type wakeReceiver struct {
	clock monotonic
	l     net.Listener

	mu    sync.Mutex
	slots []chan time.Time // by number; guarded by mu
}

// listenWakes opens the socket; close ends it.
func listenWakes(socket string) (*wakeReceiver, error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	r := &wakeReceiver{clock: newMonotonic(), l: l}
	go r.accept()
	return r, nil
}

func (r *wakeReceiver) close() { _ = r.l.Close() }

func (r *wakeReceiver) accept() {
	for {
		conn, err := r.l.Accept()
		if err != nil {
			return
		}
		go r.receive(conn)
	}
}

// slot makes a place for a waiter and gives its number. Its channel holds one
// instant; one that finds it full is dropped.
func (r *wakeReceiver) slot() (number int, woke <-chan time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ch := make(chan time.Time, 1)
	r.slots = append(r.slots, ch)
	return len(r.slots) - 1, ch
}

func (r *wakeReceiver) receive(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	in := bufio.NewReaderSize(conn, 64<<10)
	var b [wakeRecord]byte
	for {
		if _, err := io.ReadFull(in, b[:]); err != nil {
			return
		}
		number, at := binary.LittleEndian.Uint64(b[:]), int64(binary.LittleEndian.Uint64(b[8:]))
		r.mu.Lock()
		var ch chan time.Time
		if number < uint64(len(r.slots)) {
			ch = r.slots[number]
		}
		r.mu.Unlock()
		if ch == nil {
			continue
		}
		select {
		case ch <- r.clock.instant(at):
		default:
		}
	}
}
