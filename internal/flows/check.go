package flows

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// flow checks the ID that a client gave and says where that flow lives.
func (c *call) flow(id string) (string, error) {
	if err := checkID(id); err != nil {
		return "", err
	}
	return FlowID(c.tenant, id), nil
}

func checkID(id string) error {
	if id == "" || len(id) > MaxFlowID {
		return refuse(Invalid, "a flow ID has 1 to %d bytes, not %d", MaxFlowID, len(id))
	}
	if err := checkText("flow ID", id); err != nil {
		return err
	}
	return nil
}

// checkText refuses what cannot be shown on one line.
func checkText(what, s string) error {
	if !utf8.ValidString(s) {
		return refuse(Invalid, "the %s %q is not UTF-8", what, s)
	}
	if i := strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }); i >= 0 {
		return refuse(Invalid, "the %s %q has a control character at byte %d", what, s, i)
	}
	return nil
}

func checkName(what, name string) error {
	if name == "" || len(name) > core.MaxName {
		return refuse(Invalid, "the %s has %d bytes, want 1 to %d", what, len(name), core.MaxName)
	}
	return checkText(what, name)
}

func checkRequestID(id string) error {
	if len(id) > core.MaxRequestID {
		return refuse(Invalid, "the request ID has %d bytes, at most %d", len(id), core.MaxRequestID)
	}
	return nil
}

// checkJSON refuses a payload that no handler could read.
func (s *Service) checkJSON(what string, v []byte) error {
	if len(v) > s.cfg.MaxPayload {
		return refuse(TooLarge, "%s has %d bytes, at most %d in line", what, len(v), s.cfg.MaxPayload)
	}
	if len(v) > 0 && !json.Valid(v) {
		return refuse(Invalid, "%s is not JSON text", what)
	}
	return nil
}

// declaration is what the workers of a flow's type declared. known is false
// when no worker of the type was seen since this server started; names of
// flows that are there already are not judged then.
type declaration struct {
	flowType string
	t        *wire.FlowType
	known    bool
}

func (s *Service) declared(tenant, flowType string) declaration {
	if flowType == stateType {
		return declaration{flowType: flowType}
	}
	t, ok := s.cfg.Workers.KnownType(tenant, flowType)
	return declaration{flowType: flowType, t: t, known: ok}
}

// unknownType is the refusal of a type that no worker declared.
func (s *Service) unknownType(tenant, flowType string) error {
	var have []string
	for _, w := range s.cfg.Workers.Workers(tenant) {
		have = append(have, w.FlowTypes...)
	}
	slices.Sort(have)
	return refuse(UnknownType, "no worker of the flow type %q has connected; %s", flowType, listed("types", slices.Compact(have)))
}

// listed shows the names there are, within a bound.
func listed(what string, names []string) string {
	const most = 20
	if len(names) == 0 {
		return "there are no known " + what
	}
	more := ""
	if len(names) > most {
		names, more = names[:most], fmt.Sprintf(" and %d more", len(names)-most)
	}
	return "known " + what + " are " + strings.Join(names, ", ") + more
}

func (d declaration) step(name string) (*wire.StepType, error) {
	for _, st := range d.t.GetSteps() {
		if st.Name == name {
			return st, nil
		}
	}
	return nil, refuse(UnknownStep, "flow type %q has no step %q; %s", d.flowType, name, listed("steps", names(d.t.GetSteps())))
}

func (d declaration) rpc(name string) (*wire.RpcType, error) {
	for _, r := range d.t.GetRpcs() {
		if r.Name == name {
			return r, nil
		}
	}
	return nil, refuse(UnknownRPC, "flow type %q has no RPC %q; %s", d.flowType, name, listed("RPCs", names(d.t.GetRpcs())))
}

func names[T interface{ GetName() string }](of []T) []string {
	out := make([]string, len(of))
	for i, v := range of {
		out[i] = v.GetName()
	}
	return out
}

// matches reports whether name is the declared one, or a key of a declared map.
func matches(declared, name string) bool {
	if prefix, ok := strings.CutSuffix(declared, "*"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return declared == name
}

func (d declaration) channel(name string) error {
	if err := checkName("channel name", name); err != nil {
		return err
	}
	if !d.known || slices.ContainsFunc(d.t.Channels, func(ch string) bool { return matches(ch, name) }) {
		return nil
	}
	return refuse(UnknownChannel, "flow type %q has no channel %q; %s", d.flowType, name, listed("channels", d.t.Channels))
}

// attributeType gives the declaration of an attribute; an exact name goes
// before a map. nil when nothing is known of the type.
func (d declaration) attributeType(name string) (*wire.AttributeType, error) {
	if !d.known {
		return nil, nil
	}
	var of *wire.AttributeType
	for _, a := range d.t.Attributes {
		if a.Name == name {
			return a, nil
		}
		if of == nil && matches(a.Name, name) {
			of = a
		}
	}
	if of == nil {
		return nil, refuse(UnknownAttribute, "flow type %q has no attribute %q; %s", d.flowType, name, listed("attributes", names(d.t.Attributes)))
	}
	return of, nil
}

// attributes checks values that are to be set, and gives each the index that
// was declared for it; without a declaration the one that the attribute has
// already, or else the caller's own. have is the attributes that there are.
func (s *Service) attributes(d declaration, set, have []*wire.Attribute) error {
	if len(set) > core.MaxAttributes {
		return refuse(core.LimitReached, "%d attributes, at most %d", len(set), core.MaxAttributes)
	}
	for _, a := range set {
		if a == nil {
			return refuse(Invalid, "an attribute is missing")
		}
		if err := checkName("attribute name", a.Name); err != nil {
			return err
		}
		t, err := d.attributeType(a.Name)
		if err != nil {
			return err
		}
		a.Lsn = 0
		switch {
		case t != nil:
			a.Index = t.Index
		default:
			if i := slices.IndexFunc(have, func(h *wire.Attribute) bool { return h.Name == a.Name }); i >= 0 {
				a.Index = have[i].Index
			}
		}
		if err := s.checkValue(a, t.GetType()); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) checkValue(a *wire.Attribute, declared string) error {
	switch {
	case a.Blob != "" && len(a.Value) > 0:
		return refuse(Invalid, "attribute %q has a value and a blob", a.Name)
	case a.Blob != "" && a.Index != wire.Attribute_NONE:
		return refuse(WrongType, "attribute %q is indexed, so its value cannot be a blob", a.Name)
	case a.Blob != "":
		b, err := parseBlobID(a.Blob)
		a.Size = b.size
		return err
	}
	a.Size = 0
	if len(a.Value) == 0 {
		return nil // removed
	}
	if len(a.Value) > s.cfg.MaxPayload {
		return refuse(TooLarge, "attribute %q has %d bytes, at most %d in line", a.Name, len(a.Value), s.cfg.MaxPayload)
	}
	if !json.Valid(a.Value) {
		return refuse(WrongType, "the value of attribute %q is not JSON text", a.Name)
	}
	if !isOfType(a.Value, declared) || !isIndexable(a.Value, a.Index) {
		want := declared
		if want == "" || want == "json" {
			want = "value that can be indexed as " + a.Index.String()
		}
		return refuse(WrongType, "attribute %q is declared as %s, and %s is not one", a.Name, want, excerpt(a.Value))
	}
	return nil
}

func excerpt(v []byte) string {
	const most = 80
	if len(v) > most {
		return strings.ToValidUTF8(string(v[:most]), "") + "…"
	}
	return string(v)
}

// isOfType reports whether valid JSON text is a value of a declared type.
func isOfType(v []byte, declared string) bool {
	v = bytes.TrimLeft(v, " \t\r\n")
	switch declared {
	case "string", "bytes":
		return v[0] == '"'
	case "bool":
		return v[0] == 't' || v[0] == 'f'
	case "int":
		return isInt(v)
	case "float":
		return isNumber(v)
	case "time":
		return isTime(v)
	}
	return true
}

func isIndexable(v []byte, as wire.Attribute_Index) bool {
	v = bytes.TrimLeft(v, " \t\r\n")
	switch as {
	case wire.Attribute_KEYWORD:
		if v[0] == '"' {
			return true
		}
		var list []*string
		return v[0] == '[' && json.Unmarshal(v, &list) == nil && !slices.Contains(list, nil)
	case wire.Attribute_INT:
		return isInt(v)
	case wire.Attribute_FLOAT:
		return isNumber(v)
	case wire.Attribute_BOOL:
		return v[0] == 't' || v[0] == 'f'
	case wire.Attribute_TIME:
		return isTime(v)
	}
	return true
}

func isNumber(v []byte) bool { return v[0] == '-' || v[0] >= '0' && v[0] <= '9' }

func isInt(v []byte) bool {
	text := string(bytes.TrimRight(v, " \t\r\n"))
	if _, err := strconv.ParseInt(text, 10, 64); err == nil {
		return true
	}
	_, err := strconv.ParseUint(text, 10, 64)
	return err == nil
}

func isTime(v []byte) bool {
	var s string
	if v[0] != '"' || json.Unmarshal(v, &s) != nil {
		return false
	}
	_, err := time.Parse(time.RFC3339Nano, s)
	return err == nil
}
