// Command restate puts Restate under the load of Perdure's benchmark. The
// services it calls run in this process, too. See README.md.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	bench "github.com/perdure-dev/perdure/bench/peers/drive"
	restate "github.com/restatedev/sdk-go"
	"github.com/restatedev/sdk-go/server"
)

// wakesPerInvocation bounds the journal of one waiting invocation; the next one
// goes on in its place.
const wakesPerInvocation = 50

// peer is the server under test and the services it calls.
type peer struct {
	ingress, admin, listen string
	http                   *http.Client

	mu    sync.Mutex
	slots []*slot
}

// slot is where a client of channel-wake meets its waiting invocation.
type slot struct {
	wakes int            // of one invocation
	id    chan string    // of the awakeable that it waits for
	woke  chan time.Time // when the handler went on
	quit  <-chan struct{}
}

func main() {
	p := &peer{}
	flag.StringVar(&p.ingress, "ingress", "http://127.0.0.1:8080", "base URL of the ingress")
	flag.StringVar(&p.admin, "admin", "http://127.0.0.1:9070", "base URL of the admin API")
	flag.StringVar(&p.listen, "listen", "127.0.0.1:9080", "where the services listen")
	(&bench.Command{
		Peer: "restate", Open: p.open,
		Scenarios: []bench.Scenario{
			{Name: "flow-start", Prepare: p.flow(1)},
			{Name: "sequential-steps", Units: bench.Steps, Prepare: p.flow(bench.Steps)},
			{Name: "rpc-read", Prepare: p.object("Get", nil)},
			{Name: "rpc-locked-update", Prepare: p.object("Add", 1)},
			{Name: "channel-wake", Prepare: p.wake(wakesPerInvocation)},
			{Name: "channel-wake-once", Prepare: p.wake(1)},
		},
	}).Main()
}

// open serves the services and tells the server about them.
func (p *peer) open(ctx context.Context) (func(), error) {
	p.http = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 1 << 14, DisableCompression: true,
	}}
	quiet := slog.NewTextHandler(io.Discard, nil)
	ctx, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() {
		served <- server.NewRestate().WithLogger(quiet, true).
			Bind(restate.Reflect(flows{})).Bind(restate.Reflect(object{})).Bind(restate.Reflect(&waiter{p})).
			Start(ctx, p.listen)
	}()
	for try := 0; ; try++ {
		_, err := p.post(ctx, p.admin+"/deployments", map[string]string{"uri": "http://" + p.listen})
		if err == nil {
			return stop, nil
		}
		select {
		case err := <-served:
			stop()
			return nil, fmt.Errorf("serve on %s: %w", p.listen, err)
		case <-ctx.Done():
			stop()
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		if try == 50 {
			stop()
			return nil, fmt.Errorf("register at %s: %w", p.admin, err)
		}
	}
}

// post sends body as JSON, or nothing when it is nil, and returns the body of a
// 2xx.
func (p *peer) post(ctx context.Context, url string, body any) ([]byte, error) {
	var text io.Reader = http.NoBody
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		text = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, text)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := p.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	out, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err == nil && res.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s: %.200s", url, res.Status, out)
	}
	return out, err
}

// flows is a service of durable handlers: what an invocation does is journaled,
// each Run durable before the next.
type flows struct{}

// Run takes n steps one after the other.
func (flows) Run(ctx restate.Context, n int) (int, error) {
	sum := 0
	for range n {
		v, err := restate.Run(ctx, func(restate.RunContext) (int, error) { return sum + 1, nil })
		if err != nil {
			return 0, err
		}
		sum = v
	}
	return sum, nil
}

func (p *peer) flow(steps int) func(context.Context, int) (bench.Op, error) {
	return func(context.Context, int) (bench.Op, error) {
		url, want := p.ingress+"/flows/Run", strconv.Itoa(steps)
		return func(ctx context.Context, _ int, _ time.Time) (time.Time, error) {
			out, err := p.post(ctx, url, steps)
			if err == nil && string(out) != want {
				err = fmt.Errorf("a flow of %d steps gave %s", steps, out)
			}
			return time.Time{}, err
		}, nil
	}
}

// object is a virtual object that holds one number.
type object struct{}

// Get is a shared handler: it reads beside others.
func (object) Get(ctx restate.ObjectSharedContext) (int, error) {
	return restate.Get[int](ctx, "n")
}

// Add is exclusive: alone on its key.
func (object) Add(ctx restate.ObjectContext, by int) (int, error) {
	n, err := restate.Get[int](ctx, "n")
	if err != nil {
		return 0, err
	}
	restate.Set(ctx, "n", n+by)
	return n + by, nil
}

// object spreads calls of a handler over all objects; each client walks over
// them from a place of its own. body is its input, nil for none.
func (p *peer) object(handler string, body any) func(context.Context, int) (bench.Op, error) {
	return func(ctx context.Context, clients int) (bench.Op, error) {
		for i := range bench.Objects {
			if _, err := p.post(ctx, p.objectURL(i, "Add"), 1); err != nil {
				return nil, err
			}
		}
		turn := make([]int, clients)
		return func(ctx context.Context, client int, _ time.Time) (time.Time, error) {
			turn[client]++
			i := (turn[client] + client*bench.Objects/clients) % bench.Objects
			_, err := p.post(ctx, p.objectURL(i, handler), body)
			return time.Time{}, err
		}, nil
	}
}

func (p *peer) objectURL(i int, handler string) string {
	return p.ingress + "/object/o" + strconv.Itoa(i) + "/" + handler
}

// waiter is a service whose handlers wait for awakeables.
type waiter struct{ p *peer }

// Wait waits again and again, and goes on in a new invocation at the end.
func (w *waiter) Wait(ctx restate.Context, number int) (restate.Void, error) {
	w.p.mu.Lock()
	s := w.p.slots[number]
	w.p.mu.Unlock()
	for range s.wakes {
		a := restate.Awakeable[int](ctx)
		select {
		case s.id <- a.Id():
		case <-s.quit: // the point is over
			return restate.Void{}, nil
		}
		if _, err := a.Result(); err != nil {
			return restate.Void{}, err
		}
		now := time.Now()
		select {
		case s.woke <- now:
		case <-s.quit:
			return restate.Void{}, nil
		}
	}
	restate.ServiceSend(ctx, "waiter", "Wait").Send(number)
	return restate.Void{}, nil
}

// wake keeps a waiting invocation for each client, which wakes it so many times
// before the next takes its place.
func (p *peer) wake(wakes int) func(context.Context, int) (bench.Op, error) {
	return func(ctx context.Context, clients int) (bench.Op, error) {
		p.mu.Lock()
		first := len(p.slots)
		for range clients {
			p.slots = append(p.slots, &slot{wakes: wakes, id: make(chan string, 1), woke: make(chan time.Time), quit: ctx.Done()})
		}
		mine := p.slots[first:]
		p.mu.Unlock()
		for i := range mine {
			if _, err := p.post(ctx, p.ingress+"/waiter/Wait/send", first+i); err != nil {
				return nil, err
			}
		}
		return func(ctx context.Context, client int, _ time.Time) (time.Time, error) {
			s := mine[client]
			var id string
			select {
			case id = <-s.id:
			case <-ctx.Done():
				return time.Time{}, ctx.Err()
			}
			if _, err := p.post(ctx, p.ingress+"/restate/awakeables/"+id+"/resolve", 1); err != nil {
				return time.Time{}, err
			}
			select {
			case t := <-s.woke:
				return t, nil
			case <-ctx.Done():
				return time.Time{}, ctx.Err()
			}
		}, nil
	}
}
