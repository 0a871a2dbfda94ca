package flow

import (
	"fmt"

	"github.com/perdure-dev/perdure/internal/wire"
)

// RPC is a handler on the state of a flow that clients call: In and Out are
// stored and sent as JSON. It runs at any time while the flow is there, beside
// its steps. Declare it as a package variable, and make it a part of each flow
// that has it.
type RPC[In, Out any] struct {
	name string
	def  rpcDef
}

// rpcDef is an RPC as its flow knows it. Exactly one of read and update is set.
type rpcDef struct {
	read   func(*ReadContext, []byte) ([]byte, error)
	update func(*UpdateContext, []byte) ([]byte, error)
}

// NewRPC declares an RPC that only reads: its context cannot write.
func NewRPC[In, Out any](name string, fn func(ctx *ReadContext, in In) (Out, error)) RPC[In, Out] {
	return RPC[In, Out]{name: name, def: rpcDef{read: func(ctx *ReadContext, in []byte) ([]byte, error) {
		v, err := Decode[In](in)
		if err != nil {
			return nil, rpcInputError(name, err)
		}
		out, err := fn(ctx, v)
		if err != nil {
			return nil, err
		}
		return encodeInput(out)
	}}}
}

// NewLockedRPC declares an RPC that may write: attributes, messages, steps, and
// the end of the run. It is a transaction: alone on its flow among locked RPCs,
// and committed as a whole with its reply. It may be called again before it is
// committed, so it should do nothing outside.
func NewLockedRPC[In, Out any](name string, fn func(ctx *UpdateContext, in In) (Out, error)) RPC[In, Out] {
	return RPC[In, Out]{name: name, def: rpcDef{update: func(ctx *UpdateContext, in []byte) ([]byte, error) {
		v, err := Decode[In](in)
		if err != nil {
			return nil, rpcInputError(name, err)
		}
		out, err := fn(ctx, v)
		if err != nil {
			return nil, err
		}
		return encodeInput(out)
	}}}
}

func rpcInputError(name string, err error) error {
	return WithKind(fmt.Errorf("the input of RPC %q: %w", name, err), "bad_input")
}

// Name is the stored name.
func (r RPC[In, Out]) Name() string { return r.name }

// Locked says whether the RPC may write.
func (r RPC[In, Out]) Locked() bool { return r.def.update != nil }

func (r RPC[In, Out]) addTo(f *Flow) error {
	if err := checkName("RPC", r.name); err != nil {
		return err
	}
	if f.rpcs[r.name] != nil {
		return fmt.Errorf("two RPCs have the name %q", r.name)
	}
	f.rpcs[r.name] = &r.def
	f.typ.Rpcs = append(f.typ.Rpcs, &wire.RpcType{Name: r.name, Locked: r.Locked()})
	return nil
}
