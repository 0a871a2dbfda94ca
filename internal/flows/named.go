package flows

import (
	"slices"

	"github.com/perdure-dev/perdure/internal/wire"
)

// What names blobs. Those of a flow itself are named by its attributes, by the
// inputs of its live steps, by messages that wait in its channels, and by those
// that its live steps have taken. Those of other flows are named by the sends and
// the starts of sub-flows that are to bring them there.

// blobsOfFlow gives the blobs of its own that a flow names.
func blobsOfFlow(refs []string, f *wire.Flow) []string {
	refs = blobsOfAttributes(refs, f.Attributes)
	for _, ch := range f.Channels {
		refs = blobsOfMessages(refs, ch.Pending)
	}
	for _, st := range f.Steps {
		refs = blobsOfSpecs(refs, []*wire.StepSpec{st.Spec})
		refs = blobsOfMessages(refs, st.Matched)
	}
	return blobsOfSpecs(refs, []*wire.StepSpec{f.Closing.GetOtherwise()})
}

func blobsOfStart(refs []string, cmd *wire.StartFlow) []string {
	return blobsOfPublishes(blobsOfSpecs(blobsOfAttributes(refs, cmd.GetAttributes()), cmd.GetSteps()), cmd.GetPublish())
}

func blobsOfAttributes(refs []string, as []*wire.Attribute) []string {
	for _, a := range as {
		if a.GetBlob() != "" {
			refs = append(refs, a.Blob)
		}
	}
	return refs
}

func blobsOfMessages(refs []string, ms []*wire.Message) []string {
	for _, m := range ms {
		if m.Blob != "" {
			refs = append(refs, m.Blob)
		}
	}
	return refs
}

func blobsOfPublishes(refs []string, ps []*wire.Publish) []string {
	for _, p := range ps {
		if p.GetBlob() != "" {
			refs = append(refs, p.Blob)
		}
	}
	return refs
}

// blobsOfSpecs gives the inputs of steps and of those that recover them. Inputs
// of child flows are blobs of these.
func blobsOfSpecs(refs []string, specs []*wire.StepSpec) []string {
	for _, spec := range specs {
		for ; spec != nil; spec = spec.Recover {
			if spec.InputBlob != "" {
				refs = append(refs, spec.InputBlob)
			}
		}
	}
	return refs
}

// blobsCarried gives the blobs of other flows that f is to bring them.
func blobsCarried(refs []string, f *wire.Flow) []string {
	for _, out := range f.Outbox {
		refs = blobsOfSend(refs, out.Send)
	}
	for _, st := range f.Steps {
		eachChild(st.Spec, func(on *wire.OnFlow) { refs = blobsOfStart(refs, on.Start) })
	}
	eachChild(f.Closing.GetOtherwise(), func(on *wire.OnFlow) { refs = blobsOfStart(refs, on.Start) })
	return refs
}

func blobsOfSend(refs []string, s *wire.Send) []string {
	refs = blobsOfStart(refs, s.GetStart())
	if p := s.GetPublish(); p != nil {
		refs = blobsOfPublishes(refs, []*wire.Publish{p})
	}
	return refs
}

// eachChild calls fn with each flow that a step, or one that recovers it, is to
// start for its wait.
func eachChild(spec *wire.StepSpec, fn func(*wire.OnFlow)) {
	for ; spec != nil; spec = spec.Recover {
		for _, c := range spec.Wait.GetConditions() {
			if on := c.GetFlow(); on.GetStart() != nil {
				fn(on)
			}
		}
	}
}

// carriesFurther reports whether a flow that is started is to bring blobs to
// others: nobody would keep those until it is there itself.
func carriesFurther(cmd *wire.StartFlow) bool {
	return slices.ContainsFunc(cmd.Steps, func(spec *wire.StepSpec) bool {
		found := false
		eachChild(spec, func(on *wire.OnFlow) { found = found || len(blobsOfStart(nil, on.Start)) > 0 })
		return found
	})
}
