package sse

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// decode feeds p in pieces of at most step bytes (0: all at once).
func decode(d *Decoder, p []byte, step int) (events []string, err error) {
	for len(p) > 0 {
		n := len(p)
		if step > 0 {
			n = min(n, step)
		}
		piece := append([]byte(nil), p[:n]...)
		p = p[n:]
		for len(piece) > 0 {
			event, used, ok, err := d.Next(piece)
			if err != nil {
				return events, err
			}
			if ok {
				events = append(events, string(event))
			} else if used != len(piece) {
				return events, errors.New("not all bytes were consumed")
			}
			clear(piece[:used:used]) // an event must have been copied out by now
			piece = piece[used:]
		}
	}
	if event, ok := d.Last(); ok {
		events = append(events, string(event))
	}
	return events, nil
}

func TestDecode(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     []string
	}{
		{"nothing", "", nil},
		{"events", "data: a\n\ndata: b\n\n", []string{"a", "b"}},
		{"ends", "data: a\r\n\r\ndata: b\r\rdata: c\n\r\n", []string{"a", "b", "c"}},
		{"lines", "data: a\ndata:  b\ndata\ndata:c\n\n", []string{"a\n b\n\nc"}},
		{"other fields", ": c\nevent: e\nid: 1\ndatax: y\ndata : z\n\ndata: a\n\n", []string{"a"}},
		{"empty", "data:\n\n\n\ndata\n\n", []string{"", ""}},
		{"byte-order mark", "\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", []string{"a"}},
		{"no blank line at the end", "data: a\n\ndata: b\n", []string{"a", "b"}},
		{"no line end at the end", "data: a\n\ndata: b", []string{"a", "b"}},
		{"field after data", "data: a\nid: 7\n\n", []string{"a"}},
	} {
		for step := range 5 {
			got, err := decode(new(Decoder), []byte(c.in), step)
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s in steps of %d: %q, %v, want %q", c.name, step, got, err, c.want)
			}
		}
	}
}

func TestBound(t *testing.T) {
	for _, in := range []string{"data: " + strings.Repeat("x", 200), strings.Repeat("data: xxxxxxxx\n", 20), strings.Repeat("x", 200)} {
		if _, err := decode(&Decoder{Max: 100}, []byte(in), 10); !errors.Is(err, ErrTooLarge) {
			t.Errorf("%.20q: %v", in, err)
		}
	}
	many := strings.Repeat("data: xxxxxxxxxxxxxxxxxxxx\ndata: y\n\n", 20)
	if got, err := decode(&Decoder{Max: 100}, []byte(many), 3); err != nil || len(got) != 20 {
		t.Errorf("events within the bound: %d, %v", len(got), err)
	}
}

func TestReset(t *testing.T) {
	var d Decoder
	_, _ = decode(&d, []byte("data: half\ndata: ha"), 3)
	d.Reset()
	if got, err := decode(&d, []byte("data: a\n\n"), 0); err != nil || !reflect.DeepEqual(got, []string{"a"}) {
		t.Errorf("%q, %v", got, err)
	}
}

// FuzzDecode compares with a plain reading of the specification, for any cut
// of the input into pieces.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{"data: a\n\n", "data:a\r\ndata: b\r\n\r\n", ":c\rdata\r\r\r", "\xef\xbb\xbfdata: x\n\n", "data: a\n\ndata: b", "event: e\ndata: {\"a\":1}\n\n"} {
		f.Add([]byte(s), 1)
		f.Add([]byte(s), 0)
	}
	f.Fuzz(func(t *testing.T, in []byte, step int) {
		want := reference(string(in))
		for _, s := range []int{0, 1, step & 15} {
			got, err := decode(new(Decoder), in, s)
			if err != nil || strings.Join(got, "\x00|") != strings.Join(want, "\x00|") || len(got) != len(want) {
				t.Fatalf("in steps of %d: %q, %v, want %q", s, got, err, want)
			}
		}
	})
}

func reference(in string) (events []string) {
	in = strings.TrimPrefix(in, "\xef\xbb\xbf")
	in = strings.ReplaceAll(strings.ReplaceAll(in, "\r\n", "\n"), "\r", "\n")
	var data []string
	lines := strings.Split(in, "\n")
	for i, line := range lines {
		name, value, _ := strings.Cut(line, ":")
		switch {
		case line == "" && i < len(lines)-1:
			if data != nil {
				events = append(events, strings.Join(data, "\n"))
			}
			data = nil
		case name == "data":
			data = append(data, strings.TrimPrefix(value, " "))
		}
	}
	if data != nil {
		events = append(events, strings.Join(data, "\n"))
	}
	return events
}
