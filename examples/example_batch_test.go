package examples

import (
	"fmt"

	"github.com/perdure-dev/perdure/flow"
	"github.com/perdure-dev/perdure/perduretest"
)

// Resize is the child flow: one image.
type Resize struct{}

// Execute gives the image's new size.
func (Resize) Execute(ctx *flow.Context, image int) (flow.Decision, error) {
	return flow.Complete(image % 7), nil
}

var resizes = flow.Define("resize", flow.Step(Resize{}))

// Album is a batch under way: images up to Next are done, and their sum is Sum.
type Album struct{ Images, Next, Sum int }

// window is how many children run at a time: at most flow.MaxConditions.
const window = 100

func (a Album) children() (ids []string) {
	for i := a.Next; i < min(a.Next+window, a.Images); i++ {
		ids = append(ids, fmt.Sprintf("image-%d", i))
	}
	return ids
}

// ResizeAll waits for a window of children, and goes on with the next.
type ResizeAll struct{}

// WaitFor starts the children of this window.
func (ResizeAll) WaitFor(ctx *flow.Context, a Album) (flow.Wait, error) {
	var all []flow.Condition
	for i, id := range a.children() {
		all = append(all, flow.Child(resizes, id, flow.To(Resize{}, a.Next+i)))
	}
	return flow.AllOf(all...), nil
}

// Execute adds up their results.
func (ResizeAll) Execute(ctx *flow.Context, a Album) (flow.Decision, error) {
	ids := a.children()
	for _, id := range ids {
		n, _, err := flow.ChildResult[int](ctx, id)
		if err != nil {
			return flow.Decision{}, err
		}
		a.Sum += n
	}
	if a.Next += len(ids); a.Next < a.Images {
		return flow.GoTo(ResizeAll{}, a), nil
	}
	return flow.Complete(a.Sum), nil
}

var albums = flow.Define("album", flow.Step(ResizeAll{}))

// A large batch runs as child flows, a window of them at a time.
func Example_batch() {
	env := perduretest.Open(resizes, albums)
	defer env.Close()

	env.Start(albums, "holiday", flow.To(ResizeAll{}, Album{Images: 250}))
	fmt.Println(perduretest.Result[int](env, "holiday"))
	fmt.Println(len(env.Search(`type = "resize" and status = completed`)), "children")

	// Output:
	// 745
	// 250 children
}
