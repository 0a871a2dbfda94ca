package flow_test

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/flow"
)

type generic[T any] struct{}

func (generic[T]) Execute(*flow.Context, T) (flow.Decision, error) { return flow.DeadEnd(), nil }

type wrongWait struct{}

func (wrongWait) Execute(*flow.Context, int) (flow.Decision, error) { return flow.DeadEnd(), nil }
func (wrongWait) WaitFor(*flow.Context, string) (flow.Wait, error)  { return flow.Wait{}, nil }

func TestDefinitionMistakes(t *testing.T) {
	intStep := func(*flow.Context, int) (flow.Decision, error) { return flow.DeadEnd(), nil }
	step := func(name string, opts ...flow.StepOption) flow.Part {
		return flow.Step(flow.StepFunc(name, intStep), opts...)
	}
	to := func(name string) flow.StepOption { return flow.OnFailure(flow.Ref[int](name)) }
	read := func(*flow.ReadContext, int) (int, error) { return 0, nil }
	tests := []struct {
		want  string
		parts []flow.Part
	}{
		{"two steps have the name", []flow.Part{step("a"), step("a")}},
		{"a step has no name", []flow.Part{step("")}},
		{"stand for the keys of maps", []flow.Part{step("a/b")}},
		{"stand for the keys of maps", []flow.Part{flow.NewChannel[int]("a*")}},
		{"control characters", []flow.Part{flow.NewAttribute[int]("a\x00")}},
		{"at most 256", []flow.Part{step(strings.Repeat("x", 257))}},
		{"two attributes", []flow.Part{flow.NewAttribute[int]("a"), flow.NewAttribute[string]("a")}},
		{"two attributes", []flow.Part{flow.NewAttributeMap[int, int]("a"), flow.NewAttributeMap[int, int]("a")}},
		{"two channels", []flow.Part{flow.NewChannel[int]("a"), flow.NewChannel[string]("a")}},
		{"two RPCs", []flow.Part{flow.NewRPC("a", read), flow.NewRPC("a", read)}},
		{"a RPC has no name", []flow.Part{flow.NewRPC("", read)}},
		{"cannot be indexed", []flow.Part{flow.NewAttribute[struct{}]("a", flow.Indexed())}},
		{"is one of a map", []flow.Part{flow.NewAttributeMap[int, int]("a").At(1)}},
		{"is one of a map", []flow.Part{flow.NewChannelMap[int, int]("a").At(1)}},
		{"part 1 is nil", []flow.Part{step("a"), nil}},
		{`the recovery step "b", which is not part`, []flow.Part{step("a", to("b"))}},
		{"its own recovery step", []flow.Part{step("a", to("a"))}},
		{"more than 2 deep", []flow.Part{step("a", to("b")), step("b", to("a"))}},
		{"more than 2 deep", []flow.Part{step("a", to("b")), step("b", to("c")), step("c", to("d")), step("d")}},
		{"they must take the same", []flow.Part{step("a", flow.OnFailure(flow.Ref[string]("b")))}},
		{"recovery step \"refund\" takes a string", []flow.Part{step("a", to("refund")), flow.Step(refund{})}},
		{"concurrency key of step", []flow.Part{step("a", flow.Concurrency(1, func(string) string { return "" }))}},
		{"concurrency limit is 0", []flow.Part{step("a", flow.Concurrency(0, func(int) string { return "" }))}},
		{"its timeout is", []flow.Part{step("a", flow.Timeout(-1))}},
		{"its heartbeat is", []flow.Part{step("a", flow.Heartbeat(math.MaxInt64))}},
		{"allows -1 attempts", []flow.Part{step("a", flow.Retry(flow.RetryPolicy{MaxAttempts: -1}))}},
		{"the factor", []flow.Part{step("a", flow.Retry(flow.RetryPolicy{Factor: 0.5}))}},
		{"is negative", []flow.Part{step("a", flow.Retry(flow.RetryPolicy{Initial: -time.Second}))}},
		{"Ref only names a step", []flow.Part{flow.Step(flow.Ref[int]("a"))}},
		{"its WaitFor is a", []flow.Part{flow.Step(wrongWait{})}},
		{"its type is generic", []flow.Part{flow.Step(generic[int]{})}},
	}
	for _, tt := range tests {
		f, err := flow.New("f", tt.parts...)
		if err == nil || f != nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), `definition of "f"`) {
			t.Errorf("got %v, want an error with %q", err, tt.want)
		}
	}
	if _, err := flow.New(""); err == nil {
		t.Error("a flow without a name was taken")
	}
	defer func() {
		if p := recover(); p == nil {
			t.Error("Define did not panic")
		}
	}()
	flow.Define("f", step("a"), step("a"))
}

func TestRuntimeMistakes(t *testing.T) {
	f := flow.Define("f")
	for want, flows := range map[string][]*flow.Flow{
		"is nil":                 {f, nil},
		"two definitions":        {f, flow.Define("f")},
		"only its own program":   {flow.External("f")},
		"":                       {f, flow.Define("g")},
		"flow: two definitions ": {f, f},
	} {
		_, err := flow.NewRuntime(flows...)
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestPartsAreShared: one step, with its recovery, in two flows.
func TestPartsAreShared(t *testing.T) {
	intStep := func(*flow.Context, int) (flow.Decision, error) { return flow.DeadEnd(), nil }
	part := flow.Step(flow.StepFunc("a", intStep), flow.OnFailure(flow.Ref[int]("b")))
	for range 2 {
		f := flow.Define("f", part, flow.Step(flow.StepFunc("b", intStep)))
		s, err := f.StartRecord(flow.To(flow.Ref[int]("a"), 1))
		if err != nil || s.Steps[0].Recover.GetName() != "b" {
			t.Errorf("got %v, %v", s, err)
		}
	}
}

func TestStartMistakes(t *testing.T) {
	f := flow.Define("f", status, balance)
	for want, o := range map[string]flow.StartOption{
		"must be 0 to 9":            flow.Priority(10),
		"the delay is":              flow.Delay(-1),
		"no reuse policy 7":         flow.Reuse(7),
		`no channel "paid"`:         flow.WithMessage(paid, payment{}),
		`no attribute "x"`:          flow.With(flow.NewAttribute[int]("x"), 1),
		"cannot be stored":          flow.With(flow.NewAttribute[func()]("status"), func() {}),
		"the run timeout is":        flow.RunTimeout(math.MaxInt64),
		`no attribute "inventory/a`: flow.With(flow.NewAttributeMap[string, int]("inventory").At("a"), 1),
		"the retention is":          flow.Retention(-time.Second),
	} {
		if _, err := f.StartRecord(flow.NoStep, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if _, err := f.StartRecord(flow.NoStep, flow.With(balance.At("a"), 1)); err != nil {
		t.Error(err)
	}
}

func roundTrip[T any](t *testing.T, v T) {
	t.Helper()
	b, err := flow.Encode(v)
	if err != nil || !json.Valid(b) {
		t.Fatalf("%#v is %q, %v", v, b, err)
	}
	got, err := flow.Decode[T](b)
	if err != nil || !reflect.DeepEqual(got, v) {
		t.Errorf("%#v came back as %#v, %v", v, got, err)
	}
	// The short way is what encoding/json would do.
	plain, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := flow.Decode[T](plain); err != nil || !reflect.DeepEqual(again, v) {
		t.Errorf("%s was read as %#v, %v", plain, again, err)
	}
	var std T
	if err := json.Unmarshal(b, &std); err != nil || !reflect.DeepEqual(std, v) {
		t.Errorf("encoding/json reads %s as %#v, %v", b, std, err)
	}
}

func TestValues(t *testing.T) {
	for _, s := range []string{"", "plain", "ü€😀", `quote " back \ slash /`, "\n\t\x01", "<html>&"} {
		roundTrip(t, s)
		roundTrip(t, []byte(s))
	}
	for _, n := range []int64{0, 1, -1, 123456789012345678, math.MaxInt64, math.MinInt64} {
		roundTrip(t, n)
		roundTrip(t, int(n))
		roundTrip(t, int32(n))
		roundTrip(t, uint64(n))
	}
	roundTrip(t, true)
	roundTrip(t, false)
	roundTrip(t, 1.5)
	roundTrip(t, []byte(nil))
	roundTrip(t, json.RawMessage(`{"a":[1,2]}`))
	roundTrip(t, map[string]any{"a": "b"})
	roundTrip(t, time.Unix(1, 0).UTC())
	roundTrip(t, flow.None{})
	roundTrip(t, order{ID: "x", Amount: 3})
	if _, err := flow.Encode(json.RawMessage("{")); err == nil {
		t.Error("half a JSON text was taken")
	}
	for _, bad := range []string{`"a`, "x", "1.5", "01", "-", `{"a":1}`, `"\x"`, "99999999999999999999"} {
		if v, err := flow.Decode[int]([]byte(bad)); err == nil {
			t.Errorf("%q was read as %d", bad, v)
		}
	}
	if v, err := flow.Decode[order](nil); err != nil || v != (order{}) {
		t.Errorf("nothing is %v, %v", v, err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{`"a"`, "1", "-0", "true", `"YQ=="`, "null", "\"\x80\"", " 1", "0123"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 {
			return
		}
		same[string](t, b)
		same[int](t, b)
		same[int64](t, b)
		same[bool](t, b)
		same[[]byte](t, b)
	})
}

// same holds Decode to encoding/json.
func same[T any](t *testing.T, b []byte) {
	t.Helper()
	got, err := flow.Decode[T](b)
	var want T
	if wantErr := json.Unmarshal(b, &want); (err == nil) != (wantErr == nil) {
		t.Errorf("%q as %T: %v, encoding/json says %v", b, want, err, wantErr)
	} else if err == nil && !reflect.DeepEqual(got, want) {
		t.Errorf("%q as %T is %#v, encoding/json says %#v", b, want, got, want)
	}
}
