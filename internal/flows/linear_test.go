package flows

import (
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/perdure-dev/perdure/internal/wire"
)

// registerOp is one operation on the attribute total.
type registerOp struct {
	verb string // get, set, add or read
	arg  int
}

// register is a number that can be read, set and added to; add gives the sum.
var register = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(state, input, output any) (bool, any) {
		have, op, out := state.(int), input.(registerOp), output.(int)
		switch op.verb {
		case "set":
			return true, op.arg
		case "add":
			return out == have+op.arg, have + op.arg
		}
		return out == have, have
	},
}

// TestAttributesAndRPCsAreLinearizable: what many clients see of one attribute,
// by attribute verbs and by RPCs of both kinds, is what one after the other
// could have seen.
func TestAttributesAndRPCsAreLinearizable(t *testing.T) {
	w := newWorld(t)
	w.order("a")
	w.must(setAttr("a", attr("total", "0")))
	w.rpc("add", adder)
	w.rpc("total", func(k *wire.RpcTask) *wire.RpcResult {
		return &wire.RpcResult{Update: &wire.Update{Output: k.Attributes[0].Value}}
	})
	const clients, each = 8, 40
	var mu sync.Mutex
	var ops []porcupine.Operation
	begun := time.Now()
	var all sync.WaitGroup
	for id := range clients {
		all.Add(1)
		go func() {
			defer all.Done()
			r := rand.New(rand.NewPCG(uint64(id), 1))
			for range each {
				op := registerOp{verb: []string{"get", "set", "add", "read"}[r.IntN(4)], arg: r.IntN(100)}
				from := time.Since(begun)
				out, ok := w.register(op)
				to := time.Since(begun)
				if !ok {
					continue // refused, and so without effect
				}
				mu.Lock()
				ops = append(ops, porcupine.Operation{ClientId: id, Input: op, Call: int64(from), Output: out, Return: int64(to)})
				mu.Unlock()
			}
		}()
	}
	all.Wait()
	if got := porcupine.CheckOperationsTimeout(register, ops, 20*time.Second); got != porcupine.Ok {
		t.Errorf("%d operations are %v", len(ops), got)
	}
	if len(ops) < clients*each*9/10 {
		t.Errorf("only %d operations succeeded", len(ops))
	}
}

func (w *world) register(op registerOp) (out int, ok bool) {
	arg := strconv.Itoa(op.arg)
	var c *wire.Call
	switch op.verb {
	case "get":
		c = get("a", "total")
	case "set":
		c = setAttr("a", attr("total", arg))
	case "add":
		c = rpc("a", "add", arg)
	default:
		c = rpc("a", "total", "")
	}
	a := w.do(c)
	switch {
	case a.Error != nil:
		if a.Error.Code != string(Conflict) {
			w.t.Errorf("%s: %v", op.verb, a.Error)
		}
		return 0, false
	case op.verb == "set":
		return 0, true
	case op.verb == "get":
		out, _ = strconv.Atoi(value(w.t, a.GetAttributes().Attributes, "total"))
	default:
		out, _ = strconv.Atoi(string(a.GetRpc().Output))
	}
	return out, true
}
