// Package client talks to a Perdure server about flows: it starts, watches,
// changes and finds them, and calls their RPCs.
//
// A Client holds one connection (a few when very many calls are open) and
// multiplexes all calls over it, so one Client serves a whole process. It is
// safe for concurrent use, connects again by itself, and sends again what can
// be sent again without doing anything twice: reads, and starts, publishes and
// RPCs, which carry an idempotency key. Whatever else was on its way when a
// connection broke fails with an error for which errors.Is(err, ErrUnknown)
// holds: it may have taken effect.
//
// Methods of Client are the untyped half: names are strings and values are
// anything encoding/json takes. The functions Start, Result, Get, Set, Publish
// and Call are the typed half, on top of the declarations of package flow.
package client
