package examples

import (
	"bytes"
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

var (
	scans = flow.NewChannel[[]byte]("scans")
	texts = flow.NewChannel[string]("texts")
	text  = flow.NewAttribute[string]("text")

	// Inputs and outputs of RPCs may be as large as messages.
	fullText = flow.NewRPC("full-text", func(ctx *flow.ReadContext, _ flow.None) (string, error) {
		return text.Get(ctx)
	})
)

// Collect waits for a scan, and has it read by a flow of its own.
type Collect struct{}

// WaitFor takes one scan. It may be up to 64 MiB: what is large travels beside
// the record that names it, and is fetched when the handler asks for it.
func (Collect) WaitFor(ctx *flow.Context, _ flow.None) (flow.Wait, error) {
	return flow.AllOf(scans.ForOne()), nil
}

// Execute hands the scan on.
func (Collect) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	scan, _, err := scans.Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	flow.StartFlow(ctx, reader, ctx.FlowID()+"/reader", flow.To(Read{}, Page{For: ctx.FlowID(), Image: scan}))
	return flow.GoTo(Keep{}, flow.None{}), nil
}

// Page is a scan to read.
type Page struct {
	For   string
	Image []byte
}

// Read reads a scan, and sends the text back.
type Read struct{}

// Execute recognizes letters, in a way.
func (Read) Execute(ctx *flow.Context, p Page) (flow.Decision, error) {
	texts.PublishTo(ctx, p.For, string(bytes.ReplaceAll(p.Image, []byte{0}, []byte("a"))))
	return flow.Complete(nil), nil
}

// Keep keeps the text.
type Keep struct{}

// WaitFor takes the text.
func (Keep) WaitFor(ctx *flow.Context, _ flow.None) (flow.Wait, error) {
	return flow.AllOf(texts.ForOne()), nil
}

// Execute keeps it as an attribute.
func (Keep) Execute(ctx *flow.Context, _ flow.None) (flow.Decision, error) {
	got, _, err := texts.Message(ctx)
	if err != nil {
		return flow.Decision{}, err
	}
	text.Set(ctx, got)
	return flow.Complete(len(got)), nil
}

var (
	reader    = flow.Define("reader", flow.Step(Read{}))
	documents = flow.Define("documents", scans, texts, text, fullText, flow.Step(Collect{}), flow.Step(Keep{}))
)

// Values of megabytes go wherever small ones go.
func Example_documents() {
	env := perduretest.Open(reader, documents)
	defer env.Close()

	env.Start(documents, "contract", flow.To(Collect{}, flow.None{}))
	perduretest.Publish(env, "contract", scans, make([]byte, 3<<20))
	fmt.Println(perduretest.Result[int](env, "contract"), "letters")
	all, err := perduretest.Call(env, "contract", fullText, flow.None{})
	fmt.Println(len(all), all[:5], err)

	// Output:
	// 3145728 letters
	// 3145728 aaaaa <nil>
}
