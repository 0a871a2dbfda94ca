package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

const (
	maxFrame     = 1 << 20   // bytes of calls in one frame, but for one larger call
	maxUnsent    = 256 << 20 // bytes of calls that wait for the network on one link
	followBuffer = 64        // answers of one stream that wait for its reader
	firstBackoff = 20 * time.Millisecond
	maxBackoff   = time.Second
)

// result is what becomes of a call: an answer, or why there is none.
type result struct {
	answer *wire.Answer
	err    error
}

// call is one call that is open on a session.
type call struct {
	id uint64
	ch chan result // capacity 1, and never closed; of a stream followBuffer, and closed at its end
	// Of a stream, set before ch is closed: why it ended early; nil = it did not.
	err    error
	stream bool
}

var calls = sync.Pool{New: func() any { return &call{ch: make(chan result, 1)} }}

// errSlow ends a stream whose reader is slower than the server. It is opened
// again where the reader is.
var errSlow = errors.New("the reader is slower than the server")

// link keeps one connection to the server usable. It connects when somebody
// asks, and again when the last connection is lost and somebody asks again.
type link struct {
	conn   *grpc.ClientConn
	frames *framesDialer   // nil = gRPC alone
	ctx    context.Context // ends with the client

	cur  atomic.Pointer[session] // nil = not connected
	open atomic.Int64            // calls that are open, for spreading them

	mu      sync.Mutex
	dialing *attempt // guarded by mu; the one under way; nil = none
	err     error    // guarded by mu; of the last attempt
	fails   int      // guarded by mu; attempts since the last answer
}

// get gives a session that was usable a moment ago. It waits for one until ctx
// ends or patience is used up; patience below zero waits for one attempt only.
func (l *link) get(ctx context.Context, patience time.Duration) (*session, error) {
	if s := l.cur.Load(); s != nil {
		return s, nil
	}
	var giveUp <-chan time.Time
	if patience > 0 {
		t := time.NewTimer(patience)
		defer t.Stop()
		giveUp = t.C
	}
	for {
		a := l.connect()
		select {
		case <-a.done:
		case <-ctx.Done():
			return nil, l.notInTime(ctx)
		case <-giveUp:
			return nil, l.unavailable()
		}
		if a.session != nil {
			return a.session, nil // it tells who uses it if it has ended already
		}
		if err := l.ctx.Err(); err != nil {
			return nil, &Error{Code: ErrClientClosed.Code, Message: "the client is closed", Position: -1}
		}
		if patience < 0 {
			return nil, l.unavailable()
		}
	}
}

func (l *link) unavailable() *Error {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &Error{Code: ErrUnavailable.Code, Message: "no connection to " + l.conn.Target(), Position: -1, cause: l.err,
		Hint: "Is the server running there, with its gRPC address open?"}
	if l.err != nil {
		e.Message += ": " + plainCause(l.err)
	}
	return e
}

// notInTime is the error of a call whose context ended before there was a connection.
func (l *link) notInTime(ctx context.Context) *Error {
	e := contextError(ctx, false)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil && e.Code == ErrDeadline.Code {
		e.Message = "no connection to " + l.conn.Target() + " before the deadline: " + plainCause(l.err)
	}
	return e
}

// plainCause is what gRPC says of a failed connection, without its wrapping.
func plainCause(err error) string {
	msg := status.Convert(err).Message()
	if _, rest, ok := strings.Cut(msg, `desc = "transport: `); ok {
		msg = strings.TrimSuffix(rest, `"`)
	}
	return strings.TrimPrefix(msg, "Error while dialing: ")
}

// attempt is a connection that is being opened.
type attempt struct {
	done    chan struct{} // closed at its end
	session *session      // set before done is closed; nil = it failed
}

// connect has an attempt under way.
func (l *link) connect() *attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dialing == nil {
		l.dialing = &attempt{done: make(chan struct{})}
		go l.run(l.dialing, backoff(l.fails))
	}
	return l.dialing
}

// run opens one connection, after pausing for what failed before.
func (l *link) run(a *attempt, pause time.Duration) {
	var s *session
	var err error
	if sleep(l.ctx, pause) {
		s, err = openSession(l)
	} else {
		err = l.ctx.Err()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fails++ // until an answer comes
	l.err = err
	if err == nil {
		a.session = s
		l.cur.Store(s)
		go s.receive()
	}
	close(a.done)
	l.dialing = nil
}

// works says that the server answers.
func (l *link) works(s *session) {
	if s.instead {
		l.frames.noFrames()
	}
	l.mu.Lock()
	l.fails = 0
	l.mu.Unlock()
}

// lost says that a session has ended; the next one who asks gets another.
func (l *link) lost(s *session, err error) {
	l.mu.Lock()
	l.err = err
	l.cur.CompareAndSwap(s, nil)
	l.mu.Unlock()
}

// frame is calls that go out together.
type frame struct {
	wire.Calls
	bytes int
}

// callStream carries calls and their answers: a stream of gRPC, or frames.
type callStream interface {
	Send(*wire.Calls) error
	Recv(*wire.Answers) error // into one that is empty
}

// grpcStream is the one of gRPC.
type grpcStream struct {
	grpc.BidiStreamingClient[wire.Calls, wire.Answers]
}

// Recv implements callStream.
func (s grpcStream) Recv(m *wire.Answers) error { return s.RecvMsg(m) }

// session is one stream. Its calls end with it.
type session struct {
	link    *link
	stream  callStream
	cancel  context.CancelFunc
	sender  *mux.Sender[frame]
	instead bool // it is gRPC's since there were no frames

	mu      sync.Mutex
	last    uint64           // guarded by mu; ID of the newest call
	pending map[uint64]*call // guarded by mu; nil = the session has ended
	err     error            // guarded by mu; why
}

func openSession(l *link) (*session, error) {
	s := &session{link: l, pending: map[uint64]*call{}}
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(l.ctx)
	if err := s.open(ctx); err != nil {
		s.cancel()
		return nil, err
	}
	s.sender = mux.NewSender(maxUnsent, s.send)
	return s, nil
}

// open connects: with frames if the server has them.
func (s *session) open(ctx context.Context) error {
	if s.link.frames.worthTrying() {
		frames, err := s.link.frames.open(ctx)
		if err == nil {
			s.stream = frames
			return nil
		}
		s.instead = true // whatever it was: gRPC can tell what is wrong, if it meets it, too
	}
	stream, err := wire.NewFlowsClient(s.link.conn).Stream(ctx)
	s.stream = grpcStream{stream}
	return err
}

// send writes a frame; one that is too large for a frame goes as several.
func (s *session) send(f *frame) error {
	if f.bytes <= maxFrame {
		return s.stream.Send(&f.Calls)
	}
	var part wire.Calls
	bytes := 0
	for _, c := range f.Calls.Calls {
		n := c.SizeVT()
		if bytes > 0 && bytes+n > maxFrame {
			if err := s.stream.Send(&part); err != nil {
				return err
			}
			part, bytes = wire.Calls{}, 0
		}
		part.Calls = append(part.Calls, c)
		bytes += n
	}
	part.Cancels = f.Cancels // behind the calls that they cancel
	return s.stream.Send(&part)
}

// start sends a call and registers who waits for its answers. An error says
// that it was not sent.
func (s *session) start(c *call, w *wire.Call, bytes int) error {
	s.mu.Lock()
	if s.pending == nil {
		err := s.err
		s.mu.Unlock()
		return err
	}
	s.last++
	c.id, w.Id = s.last, s.last
	s.pending[c.id] = c
	s.mu.Unlock()
	err := s.sender.Put(bytes, func(f *frame) {
		f.Calls.Calls = append(f.Calls.Calls, w)
		f.bytes += bytes
	})
	if err != nil && s.take(c) {
		return err
	}
	return nil // when somebody took it before, its channel says what became of it
}

// take removes an open call; false: it has been answered meanwhile.
func (s *session) take(c *call) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[c.id] != c {
		return false
	}
	delete(s.pending, c.id)
	return true
}

// forget removes a call whose caller has given up, and tells the server.
func (s *session) forget(c *call) bool {
	if !s.take(c) {
		return false
	}
	s.abandon(c.id)
	return true
}

func (s *session) abandon(id uint64) {
	// A server that is not told answers in vain; so a failure here is no harm.
	_ = s.sender.Put(8, func(f *frame) { f.Cancels = append(f.Cancels, id) })
}

// receive hands answers to their callers until the stream ends.
func (s *session) receive() {
	var in wire.Answers
	for first := true; ; first = false {
		clear(in.Answers)
		in.Answers = in.Answers[:0]
		if err := s.stream.Recv(&in); err != nil {
			s.end(err, first)
			return
		}
		if first {
			s.link.works(s)
		}
		s.deliver(in.Answers)
	}
}

func (s *session) deliver(answers []*wire.Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range answers {
		c := s.pending[a.Id]
		switch {
		case c == nil: // its caller has given up
		case !c.stream:
			delete(s.pending, a.Id)
			c.ch <- result{answer: a} // has room: a call is answered once
		case len(c.ch) == cap(c.ch):
			delete(s.pending, a.Id)
			c.err = errSlow
			close(c.ch)
			s.abandon(a.Id)
		default:
			c.ch <- result{answer: a}
			if !a.More {
				delete(s.pending, a.Id)
				close(c.ch)
			}
		}
	}
}

// end fails all that is open. A server that ends a stream because it stops has
// answered all that it took, and one that has too many streams took nothing: what
// has no answer can go to the next session. Of everything else the fate is
// unknown.
func (s *session) end(err error, unheard bool) {
	fate := error(&errLost{err})
	code, _, said := serverSaid(err)
	if refused := refusal(s.link, err); refused != nil {
		fate = refused
	} else if said && (code == ErrUnavailable.Code || unheard && code == ErrOverloaded.Code) {
		fate = &errUnsent{err}
	}
	s.link.lost(s, err)
	s.mu.Lock()
	open := s.pending
	s.pending, s.err = nil, fate
	s.mu.Unlock()
	s.cancel() // a sender that is blocked on the network ends by it
	s.sender.Close(fate, false)
	for _, c := range open {
		if c.stream {
			c.err = fate
			close(c.ch)
		} else {
			c.ch <- result{err: fate}
		}
	}
}

// refusal tells a stream's end that no further try can change.
func refusal(l *link, err error) error {
	if l.ctx.Err() != nil {
		return &Error{Code: ErrClientClosed.Code, Message: "the client was closed", Unknown: true, Position: -1, cause: err}
	}
	e := fromStatus(err)
	switch status.Code(err) {
	case codes.Unauthenticated, codes.PermissionDenied:
		e.Code, e.Hint = ErrUnauthenticated.Code, "Give the client a key that the server knows."
	case codes.Unimplemented:
		e.Code, e.Message = ErrUnavailable.Code, l.conn.Target()+" does not serve flows: "+e.Message
		e.Hint = "Is this the gRPC address of a Perdure server of this version?"
	default:
		return nil
	}
	return e
}

// statusCodes is the codes of Error for errors of gRPC itself.
var statusCodes = map[codes.Code]string{
	codes.NotFound:          ErrNotFound.Code,
	codes.InvalidArgument:   ErrInvalid.Code,
	codes.OutOfRange:        ErrTooLarge.Code,
	codes.ResourceExhausted: ErrOverloaded.Code,
	codes.DeadlineExceeded:  ErrDeadline.Code,
	codes.Canceled:          ErrCanceled.Code,
	codes.Unavailable:       ErrUnavailable.Code,
}

// fromStatus takes over an error that ended a stream. A server's own begin with
// their code, as "blob_missing: flow …".
func fromStatus(err error) *Error {
	st := status.Convert(err)
	e := &Error{Code: statusCodes[st.Code()], Message: st.Message(), Position: -1, cause: err}
	if code, rest, ok := serverSaid(err); ok {
		e.Code, e.Message = code, rest
	}
	if e.Code == "" {
		e.Code = codeInternal
	}
	return e
}

// serverSaid takes an error of the server's own apart; other ones, those of the
// transport among them, have no code in front.
func serverSaid(err error) (code, rest string, ok bool) {
	code, rest, ok = strings.Cut(status.Convert(err).Message(), ": ")
	return code, rest, ok && code != "" && strings.Trim(code, "abcdefghijklmnopqrstuvwxyz_") == ""
}

// backoff is how long to pause after so many failures; about half of it is
// random, so that clients do not come back together.
func backoff(fails int) time.Duration {
	if fails == 0 {
		return 0
	}
	d := min(firstBackoff<<min(fails-1, 10), maxBackoff)
	return d/2 + rand.N(d/2+1)
}

// sleep pauses; false: ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
