package client

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

func FuzzCursor(f *testing.F) {
	for _, s := range []string{"", "1.2", "0.0", "18446744073709551615.4294967295", "1", "a.b", "1.99999999999", "-1.2", "+1.2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var c, again Cursor
		if err := c.UnmarshalText([]byte(s)); err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if err := again.UnmarshalText([]byte(c.String())); err != nil || again != c {
			t.Errorf("%q is %v, then %v, %v", s, c, again, err)
		}
	})
}

// FuzzOutputs: whatever parts come again, the text is given once and in order.
func FuzzOutputs(f *testing.F) {
	f.Add([]byte{0, 3, 3, 3, 0, 9, 1, 2})
	f.Fuzz(func(t *testing.T, parts []byte) {
		const text = "0123456789abcdefghijklmnopqrstuvwxyz"
		s, end := outputs{}, uint64(0)
		for i := 0; i+1 < len(parts); i += 2 {
			from := uint64(parts[i]) % uint64(len(text))
			to := min(from+uint64(parts[i+1]%16), uint64(len(text)))
			o := s.fresh(&wire.OutputPart{Exec: 1, Attempt: 1, Offset: from, Text: text[from:to]})
			if o == nil {
				if to > end && from < to {
					t.Fatalf("%d to %d is new after %d, and was not given", from, to, end)
				}
				continue
			}
			if o.Offset < end || o.Offset != max(from, end) || o.Text != text[o.Offset:to] {
				t.Fatalf("gave %q at %d after %d", o.Text, o.Offset, end)
			}
			end = to
		}
	})
}

// TestNames: every value has a name, and the name gives the value again.
func TestNames(t *testing.T) {
	for _, v := range []any{Running, TimedOut, Refuse, Attach, Skip, TerminateOther, NotIndexed, Time} {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		again := reflect.New(reflect.TypeOf(v))
		if err := json.Unmarshal(b, again.Interface()); err != nil || again.Elem().Interface() != v {
			t.Errorf("%v is %s, then %v, %v", v, b, again.Elem(), err)
		}
	}
	var r Reuse
	if err := r.UnmarshalText([]byte("if-closed")); err != nil || r != IfClosed {
		t.Errorf("%v, %v", r, err)
	}
	if Status(77).String() != "unknown(77)" {
		t.Error(Status(77))
	}
	// The numbers are those of the protocol.
	if int(TimedOut) != int(wire.Status_TIMED_OUT) || int(Attach) != int(wire.StartFlow_ATTACH) || int(FailFlow) != int(wire.StopFlow_FAIL) ||
		int(TerminateOther) != int(wire.Schedule_TERMINATE_OTHER) || int(Time) != int(wire.Attribute_TIME) {
		t.Error("names and protocol differ")
	}
}

func TestScheduleJSON(t *testing.T) {
	b, err := json.Marshal(&ScheduleInfo{ID: "s", Jitter: time.Minute, CatchUp: time.Hour})
	if want := `{"id":"s","cron":"","overlap":"skip","flow_type":"","started":0,"jitter":"1m0s","catch_up":"1h0m0s"}`; err != nil || string(b) != want {
		t.Errorf("%s, %v", b, err)
	}
}
