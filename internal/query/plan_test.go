package query

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// show writes a plan so that a test can be read.
func show(p Plan) string {
	var s string
	switch p.Kind {
	case PlanAll:
		s = "all"
	case PlanNone:
		return "none"
	case PlanWindow:
		at := func(us int64) string {
			if us == math.MinInt64 || us == math.MaxInt64 {
				return ""
			}
			return time.UnixMicro(us).UTC().Format("01-02T15:04:05.000000")
		}
		s = "created[" + at(p.From) + " " + at(p.To) + "]"
	case PlanScan:
		s = showScan(p.Scan)
	case PlanAnd, PlanOr:
		var kids []string
		for _, k := range p.Kids {
			kids = append(kids, show(k))
		}
		s = "(" + strings.Join(kids, map[PlanKind]string{PlanAnd: " & ", PlanOr: " | "}[p.Kind]) + ")"
	}
	if p.Exact {
		s += "!"
	}
	return s
}

func showScan(s Scan) string {
	name := s.Name
	if s.Field != Attribute {
		name = fieldNames[s.Field]
	}
	bound := func(v *Value) string {
		switch {
		case v == nil:
			return ""
		case v.Kind == Text:
			return v.Text
		case v.Kind == Instant:
			return v.At.UTC().Format("01-02")
		case v.IsFloat:
			return fmt.Sprint(v.Float)
		}
		return fmt.Sprint(v.Int)
	}
	if s.Prefix {
		return name + "^" + bound(s.Low)
	}
	if s.Equal() {
		return name + "=" + bound(s.Low)
	}
	return name + [...]string{"", "b", "n", "t", "i"}[s.Kind] + "[" + bound(s.Low) + " " + bound(s.High) + "]"
}

func TestPlan(t *testing.T) {
	for text, want := range map[string]string{
		``:                                `all!`,
		`type = "a"`:                      `type=a!`,
		`type = "a" and status = running`: `(type=a! & status=0!)!`,
		`status in (running, failed)`:     `(status=0! | status=2!)!`,
		`type = "a" and type ^= "b"`:      `(type=a!)`,
		`type = "` + strings.Repeat("x", 70) + `"`: `type=` + strings.Repeat("x", 70),
		`a = "x"`:                          `a=x`,
		`a = "x" or b = 5`:                 `(a=x | b=5)`,
		`a = "x" or b != 5`:                `all`,
		`a = "x" and b != 5`:               `a=x`,
		`a ~ "x"`:                          `all`,
		`not a = "x"`:                      `all`,
		`not not a = "x"`:                  `a=x`,
		`a ^= "x" and a > "b"`:             `a^x`,
		`a > 5 and a <= 7.5 and a < 100`:   `an[5 7.5]`,
		`a > 7 and a < 5`:                  `none`,
		`a > 7 and a = "x"`:                `none`,
		`a > "m" and a < "c"`:              `at[m ]`, // an array may have both
		`a > "2026-12-01"`:                 `(at[2026-12-01 ] | ai[12-01 ])`,
		`a > "2026-12-01" and a < +2d`:     `ai[12-01 12-03]`,
		`a in ("x", 5, true)`:              `(a=x | a=5 | a=1)`,
		`exists(a)`:                        `(ab[ ] | an[ ] | at[ ] | ai[ ])`,
		`exists(a) and a = "x"`:            `a=x`,
		`id = "x" and id ^= "y"`:           `id=x`,
		`id > "x" or run = "y"`:            `all`,
		`closed > -1d`:                     `closedi[11-30 ]`,
		`created >= -1h and created < now`: `created[12-01T11:00:00.000000 12-01T11:59:59.999999]!`,
		`created > "2026-12-01T11:00:00.0000005Z" and created < "2026-12-01T12:00:00.0000005Z"`: `created[12-01T11:00:00.000001 12-01T12:00:00.000000]!`,
		`created = "2026-12-01T11:00:00.0000005Z"`:                                              `none`,
		`created < -2h and created > -1h`:                                                       `none`,
		`created > -1h and a = 5 and (b = 6 or c = 7)`:                                          `((b=6 | c=7) & a=5 & created[12-01T11:00:00.000001 ]!)`,
		`(type = "a" and created > now) or status = failed`:                                     `((type=a! & created[12-01T12:00:00.000001 ]!)! | status=2!)!`,
	} {
		q, err := Parse(text, now)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := show(q.Plan()); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// covers says whether a plan gives a flow.
func covers(p Plan, id string, f *wire.Flow) bool {
	switch p.Kind {
	case PlanAll:
		return true
	case PlanWindow:
		return p.From <= f.CreatedUs && f.CreatedUs <= p.To
	case PlanScan:
		found := false
		(&expr{field: p.Scan.Field, name: p.Scan.Name}).each(id, f, func(v Value) bool {
			s := p.Scan
			found = found || v.Kind == s.Kind && (s.Low == nil || Compare(v, *s.Low) >= 0) &&
				(s.High == nil || Compare(v, *s.High) <= 0) && (!s.Prefix || strings.HasPrefix(v.Text, s.Low.Text))
			return true
		})
		return found
	case PlanAnd:
		for _, k := range p.Kids {
			if !covers(k, id, f) {
				return false
			}
		}
		return true
	case PlanOr:
		for _, k := range p.Kids {
			if covers(k, id, f) {
				return true
			}
		}
	}
	return false
}

// dice makes queries and flows of bytes; it gives 0 when they are used up.
type dice struct{ b []byte }

func (d *dice) roll(n int) int {
	if len(d.b) == 0 {
		return 0
	}
	v := int(d.b[0]) % n
	d.b = d.b[1:]
	return v
}

func pick[T any](d *dice, from ...T) T { return from[d.roll(len(from))] }

var someTexts = []string{`"a"`, `"ab"`, `"b"`, `"2026-12-01"`, `"2026-12-01T12:00:00.0000015Z"`, `"ü"`, `""`}

func (d *dice) query(depth int) string {
	if depth > 0 {
		switch d.roll(5) {
		case 0:
			return "not (" + d.query(depth-1) + ")"
		case 1:
			return "(" + d.query(depth-1) + " or " + d.query(depth-1) + ")"
		case 2, 3:
			return d.query(depth-1) + " and " + d.query(depth-1)
		}
	}
	order := pick(d, "=", "!=", "<", "<=", ">", ">=")
	switch d.roll(8) {
	case 0:
		return "status " + pick(d, "=", "!=") + " " + pick(d, "running", "failed")
	case 1:
		return "type " + pick(d, order, "^=", "~") + " " + pick(d, someTexts...)
	case 2:
		return pick(d, "created", "closed", "updated") + " " + order + " " + pick(d, "now", "-1h", someTexts[3], someTexts[4])
	case 3:
		return "id " + pick(d, order, "^=") + " " + pick(d, someTexts...)
	case 4:
		return "exists(" + pick(d, "x", "y", "closed") + ")"
	case 5:
		return pick(d, "x", "y") + " in (" + pick(d, someTexts...) + ", " + pick(d, "5", "1.5", "true", "now") + ")"
	case 6:
		return pick(d, "x", "y") + " " + pick(d, order, "^=", "~") + " " + pick(d, someTexts...)
	}
	return pick(d, "x", "y") + " " + order + " " + pick(d, "5", "-1", "1.5", "true", "false", "now", "-1h")
}

func (d *dice) flow() *wire.Flow {
	at := func() int64 { return now.UnixMicro() + pick(d, int64(0), 1, 2, -3600e6, -1) }
	f := &wire.Flow{Type: strings.Trim(pick(d, someTexts...), `"`), Status: pick(d, wire.Status_RUNNING, wire.Status_FAILED), CreatedUs: at(), UpdatedUs: at()}
	if d.roll(2) == 1 {
		f.ClosedUs = at()
	}
	for _, name := range []string{"x", "y"} {
		a := &wire.Attribute{Name: name, Index: wire.Attribute_Index(d.roll(6))}
		switch d.roll(4) {
		case 0:
			a.Value = []byte(pick(d, someTexts...))
		case 1:
			a.Value = []byte("[" + pick(d, someTexts...) + "," + pick(d, someTexts...) + ",5]")
		case 2:
			a.Value = []byte(pick(d, "5", "1.5", "-1", "true", "false", "null", "{}", "5.0"))
		case 3:
			continue
		}
		f.Attributes = append(f.Attributes, a)
	}
	return f
}

func checkPlan(t *testing.T, d *dice) {
	text := d.query(3)
	q, err := Parse(text, now)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	again, err := Parse(q.String(), now)
	if err != nil || again.String() != q.String() {
		t.Fatalf("%s: printed as %s, then %v %v", text, q, again, err)
	}
	p := q.Plan()
	for range 4 {
		f, id := d.flow(), pick(d, "a", "b", "ab")
		match, there := q.Match(id, f), covers(p, id, f)
		if match != again.Match(id, f) {
			t.Fatalf("%s: printed as %s finds others", text, q)
		}
		if match && !there || p.Exact && there != match {
			t.Fatalf("%s finds %v, its plan %s gives %v: %v", text, match, show(p), there, f)
		}
	}
}

func TestPlanCoversWhatMatches(t *testing.T) {
	state := uint64(1)
	for range 30_000 {
		var b [96]byte
		for i := range b {
			state = state*6364136223846793005 + 1442695040888963407
			b[i] = byte(state >> 56)
		}
		checkPlan(t, &dice{b[:]})
	}
}

func FuzzPlan(f *testing.F) {
	f.Add([]byte("0123456789abcdef"))
	f.Fuzz(func(t *testing.T, b []byte) { checkPlan(t, &dice{b}) })
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`type = "order" and status in (running, failed) and not tag = 'x'`, "`a b` >= -2h or exists(x)", `a ~ "\u00fc\n" and (b != 1.5e-3)`,
		`created > "2026-12-01 10:00" and x in ("a", 5, true, now)`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		q, err := Parse(text, now)
		if err != nil {
			if e, ok := err.(*Error); !ok || e.Pos < 0 || e.Pos > len(text) {
				t.Fatalf("%v", err)
			}
			return
		}
		again, err := Parse(q.String(), now)
		if err != nil && len(q.String()) <= MaxLength {
			t.Fatalf("%q printed as %q: %v", text, q, err)
		}
		if err == nil && again.String() != q.String() {
			t.Fatalf("%q printed as %q, then as %q", text, q, again)
		}
		q.Match("ord-17", order())
		q.Plan()
	})
}

func FuzzValues(f *testing.F) {
	f.Add([]byte(`["a", "b"]`), int32(1))
	f.Add([]byte(`"2026-12-01T12:00:00Z"`), int32(5))
	f.Fuzz(func(t *testing.T, raw []byte, index int32) {
		kind := None
		Values(&wire.Attribute{Value: raw, Index: wire.Attribute_Index(index)}, func(v Value) bool {
			if v.Kind == None || kind != None && v.Kind != kind {
				t.Fatalf("%q has a %d beside a %d", raw, v.Kind, kind)
			}
			kind = v.Kind
			return true
		})
	})
}
