package flows

import (
	"context"
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// getAttributes reads attributes from the live flow: the answer shares their
// values, which are never changed.
func (c *call) getAttributes(req *wire.GetAttributesRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil && len(req.Names) > core.MaxAttributes {
		err = refuse(Invalid, "%d names, at most %d", len(req.Names), core.MaxAttributes)
	}
	for _, name := range req.Names {
		if err == nil {
			err = checkName("attribute name", name)
		}
	}
	if err != nil {
		c.fail(err)
		return
	}
	c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) {
		return attributesReply(f.RunId, chosen(f.Attributes, req.Names)), nil
	})
}

func attributesReply(run string, as []*wire.Attribute) *wire.Answer {
	return &wire.Answer{Result: &wire.Answer_Attributes{Attributes: &wire.AttributesReply{RunId: run, Attributes: as}}}
}

// chosen gives the attributes of the names, each once, in order of name.
func chosen(all []*wire.Attribute, names []string) []*wire.Attribute {
	if len(names) == 0 {
		return all
	}
	if len(names) == 1 && !strings.HasSuffix(names[0], "*") {
		for i, a := range all {
			if a.Name == names[0] {
				return all[i : i+1 : i+1]
			}
		}
		return nil
	}
	var out []*wire.Attribute
	for _, a := range all {
		if slices.ContainsFunc(names, func(n string) bool { return matches(n, a.Name) }) {
			out = append(out, a)
		}
	}
	return out
}

// setAttributes writes attributes in one commit and answers with them.
func (c *call) setAttributes(req *wire.SetAttributesRequest) {
	flowID, err := c.flow(req.FlowId)
	if err == nil && len(req.Attributes) == 0 {
		err = refuse(Invalid, "there are no attributes to set")
	}
	if err != nil {
		c.fail(err)
		return
	}
	refs := blobsOfAttributes(nil, req.Attributes)
	if len(refs) == 0 {
		c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) { return nil, c.writeAttributes(flowID, f, req.Attributes) })
		return
	}
	c.read(func(ctx context.Context) (*wire.Answer, error) {
		if err := c.s.verifyNamed(ctx, flowID, refs); err != nil {
			return nil, err
		}
		c.look(flowID, func(f *wire.Flow) (*wire.Answer, error) { return nil, c.writeAttributes(flowID, f, req.Attributes) })
		return nil, nil
	})
}

func (c *call) writeAttributes(flowID string, f *wire.Flow, set []*wire.Attribute) error {
	if err := c.s.attributes(c.s.declared(c.tenant, f.Type), set, f.Attributes); err != nil {
		return err
	}
	e := &wire.Entry{FlowId: flowID, Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: set}}}
	return c.submit(e, func(rep core.Reply) *wire.Answer {
		out := make([]*wire.Attribute, len(set)) // the command's list is the journal's
		for i, a := range set {
			out[i] = &wire.Attribute{Name: a.Name, Value: a.Value, Index: a.Index, Blob: a.Blob, Size: a.Size, Lsn: e.Lsn}
		}
		return attributesReply(rep.RunID, out)
	})
}
