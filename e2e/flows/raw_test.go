//go:build e2e

package flows

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/perdure-dev/perdure/client"
	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/internal/wire"
)

// The tenants of a town, and their keys.
const (
	keyAlpha = "alpha-0123456789abcdef"
	keyBeta  = "beta-0123456789abcdef"
)

// town is a server with two tenants, an honest worker of the first, and a life
// that goes on there while the test does its worst.
type town struct {
	t *testing.T
	*target
	alpha *client.Client
	beta  *client.Client
	calm  atomic.Bool // the life is to end
	life  chan string
}

func newTown(t *testing.T) *town {
	s := newTarget(t, fmt.Sprintf("flows: {worker_heartbeat: %s}\nauth:\n  keys:\n"+
		"    - {name: a, tenant: alpha, key_env: KEY_ALPHA}\n    - {name: b, tenant: beta, key_env: KEY_BETA}\n", heartbeat),
		"KEY_ALPHA="+keyAlpha, "KEY_BETA="+keyBeta)
	s.start()
	w := &town{t: t, target: s, life: make(chan string, 1),
		alpha: s.client(client.Options{Key: keyAlpha}), beta: s.client(client.Options{Key: keyBeta})}
	pool := newWorkers(t, s)
	pool.key = keyAlpha
	pool.start()
	eventually(t, "the honest worker", func() bool {
		all, err := w.alpha.Workers(t.Context())
		return err == nil && len(all) == 1
	})
	go w.live()
	t.Cleanup(w.unharmed)
	return w
}

// live runs small flows all the time.
func (w *town) live() {
	n, longest := 0, time.Duration(0)
	for ; !w.calm.Load(); n++ {
		began := time.Now()
		id := fmt.Sprintf("life-%d", n)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		_, err := client.Start(ctx, w.alpha, pipeline, id, flow.To(Seq{}, Job{Left: 3}))
		if err == nil {
			_, err = client.Result[int](ctx, w.alpha, id)
		}
		cancel()
		if err != nil {
			w.t.Errorf("the life of others was disturbed: %s: %v", id, err)
			break
		}
		longest = max(longest, time.Since(began))
		time.Sleep(2 * time.Millisecond)
	}
	w.life <- fmt.Sprintf("%d flows of others were finished meanwhile, the slowest in %v", n, longest.Round(time.Millisecond))
}

// maxResident bounds the server's memory at its highest.
const maxResident = 512 << 20

// unharmed ends the life, and looks whether the server is what it was.
func (w *town) unharmed() {
	w.calm.Store(true)
	w.t.Log(<-w.life)
	if w.over() {
		w.t.Errorf("the server has ended; its log ends:\n%s", w.log)
		return
	}
	if !w.isReady() {
		w.t.Error("the server is not ready any more")
	}
	if said := w.log.String(); strings.Contains(said, "panic") {
		w.t.Errorf("something panicked in the server:\n%s", said)
	}
	peak := w.peak()
	w.t.Logf("the server's memory was %d MiB at its highest", peak>>20)
	if peak > maxResident {
		w.t.Errorf("that is more than %d MiB", maxResident>>20)
	}
}

// peak is the largest resident memory of the process so far, in bytes.
func (p *process) peak() int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			return kib << 10
		}
	}
	return 0
}

// raw speaks the protocol without the SDK.
type raw struct {
	t    *testing.T
	conn *grpc.ClientConn
	ctx  context.Context
}

func (s *target) raw(t *testing.T, key string, opts ...grpc.DialOption) *raw {
	t.Helper()
	opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(256<<20), grpc.MaxCallRecvMsgSize(256<<20)))
	conn, err := grpc.NewClient(s.addr, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ctx := within(t, 2*patience)
	if key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	return &raw{t: t, conn: conn, ctx: ctx}
}

func (r *raw) do(c *wire.Call) *wire.Answer {
	r.t.Helper()
	a, err := wire.NewFlowsClient(r.conn).Do(r.ctx, c)
	if err != nil {
		r.t.Fatalf("%v: %v", c, err)
	}
	return a
}

// refused is a status with this code that says what happened.
func refusedWith(t *testing.T, what string, err error, code codes.Code, says string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), says) {
		t.Errorf("%s: %v; want %s with %q", what, err, code, says)
	}
}

// rogue is a worker made by hand.
type rogue struct {
	*raw
	stream wire.Workers_WorkClient
	mu     sync.Mutex // one at a time may send
	still  chan struct{}
	once   sync.Once
	early  []*wire.Task // that came with others, or with the Welcome
}

// typeOf declares a flow type with steps Do and Then, and an RPC ask.
func typeOf(name string) *wire.FlowType {
	return &wire.FlowType{Name: name, Steps: []*wire.StepType{{Name: "Do"}, {Name: "Then"}}, Rpcs: []*wire.RpcType{{Name: "ask"}},
		Attributes: []*wire.AttributeType{{Name: "sum", Type: "int", Index: 2}, {Name: "text"}}, Channels: []string{"mail"}}
}

func helloOf(types ...string) *wire.Hello {
	h := &wire.Hello{Protocol: 1, WorkerId: "rogue", Build: "1", Sdk: "none"}
	for _, name := range types {
		h.FlowTypes = append(h.FlowTypes, typeOf(name))
	}
	return h
}

// open opens a stream with a first frame.
func (r *raw) open(first *wire.WorkerFrame) *rogue {
	r.t.Helper()
	stream, err := wire.NewWorkersClient(r.conn).Work(r.ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	k := &rogue{raw: r, stream: stream, still: make(chan struct{})}
	k.send(first)
	return k
}

// hush ends the worker's signs of life.
func (k *rogue) hush() { k.once.Do(func() { close(k.still) }) }

// join opens a stream, is welcomed, and gives signs of life. Credits come with it.
func (r *raw) join(credits uint32, types ...string) *rogue {
	r.t.Helper()
	k := r.open(&wire.WorkerFrame{Hello: helloOf(types...), TaskCredits: credits, RpcCredits: credits})
	if f, err := k.stream.Recv(); err != nil || f.Welcome.GetProtocol() != 1 {
		r.t.Fatalf("instead of a welcome: %v, %v", f, err)
	} else {
		k.early = f.Tasks
	}
	go k.beat()
	return k
}

// beat keeps the server from taking the worker for lost.
func (k *rogue) beat() {
	tick := time.NewTicker(heartbeat / 2)
	defer tick.Stop()
	for {
		select {
		case <-k.still:
			return
		case <-tick.C:
		}
		if k.put(&wire.WorkerFrame{}) != nil {
			return
		}
	}
}

func (k *rogue) send(f *wire.WorkerFrame) { _ = k.put(f) } // what became of it is what Recv says

func (k *rogue) put(f *wire.WorkerFrame) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.stream.Send(f)
}

// task waits for the next task.
func (k *rogue) task() *wire.Task {
	k.t.Helper()
	if len(k.early) > 0 {
		t := k.early[0]
		k.early = k.early[1:]
		return t
	}
	for {
		f, err := k.stream.Recv()
		if err != nil {
			k.t.Fatalf("instead of a task: %v\n%s", err, k.state())
		}
		if len(f.Tasks) > 0 {
			k.early = f.Tasks[1:]
			return f.Tasks[0]
		}
	}
}

// state is what the server knows of queues and workers, for who waits in vain.
func (r *raw) state() string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), patience)
	defer cancel()
	var b strings.Builder
	for _, c := range []*wire.Call{
		{Verb: &wire.Call_Queues{Queues: &wire.QueuesRequest{}}},
		{Verb: &wire.Call_Workers{Workers: &wire.WorkersRequest{}}},
	} {
		a, err := wire.NewFlowsClient(r.conn).Do(ctx, c)
		fmt.Fprintln(&b, a, err)
	}
	return b.String()
}

// end reads until the stream ends, and gives why.
func (k *rogue) end() error {
	for {
		if _, err := k.stream.Recv(); err != nil {
			return err
		}
	}
}

// completing answers a task: the flow is completed with this output.
func completing(t *wire.Task, output string) *wire.TaskResult {
	return &wire.TaskResult{FlowId: t.FlowId, Result: &wire.StepResult{Exec: t.Exec, Attempt: t.Attempt,
		Close: &wire.Close{How: wire.Close_GRACEFUL, Output: []byte(output)}}}
}

// start starts a flow at step Do.
func (r *raw) start(flowType, id string, spec *wire.StepSpec) {
	r.t.Helper()
	a := r.do(&wire.Call{Verb: &wire.Call_Start{Start: &wire.StartRequest{FlowId: id, FlowType: flowType, Step: "Do", Spec: spec}}})
	if a.Error != nil {
		r.t.Fatalf("start %s: %v", id, a.Error)
	}
}

// ends waits for the end of a flow.
func (r *raw) ends(id string) *wire.FlowInfo {
	r.t.Helper()
	a := r.do(&wire.Call{Verb: &wire.Call_Wait{Wait: &wire.WaitRequest{FlowId: id}}})
	if a.Error != nil {
		r.t.Fatalf("wait for %s: %v", id, a.Error)
	}
	return a.GetFlow()
}
