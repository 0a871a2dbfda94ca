package sink

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

func FuzzLinePlace(f *testing.F) {
	ev := &wire.Event{Lsn: 12, N: 3, Items: [][]byte{[]byte(`{}`), []byte(`{}`)}}
	f.Add(appendEvent(nil, subject{7, "a", "s"}, ev, "x", []byte(`{}`)))
	f.Add(appendMessage(nil, subject{7, "a", "s"}, ev, 1, true))
	f.Add([]byte(`{"cursor":"p0-18446744073709551615.4294967295"}`))
	f.Add([]byte(`{"cursor":"p0-1.0","item":}`))
	f.Add([]byte(`{"cursor":"p`))
	f.Fuzz(func(t *testing.T, line []byte) {
		part, p, ok := linePlace(line)
		if !ok {
			return
		}
		head := append(appendCursor([]byte(`{"cursor":"`), part, p.lsn, p.n), '"')
		if !bytes.HasPrefix(line, head) && !bytes.Contains(line[:min(len(line), 80)], []byte("0")) { // leading zeroes
			t.Errorf("%q is read as p%d %v", line, part, p)
		}
		if bytes.IndexByte(line, 0) >= 0 || line[len(line)-1] != '}' {
			t.Errorf("%q passes for whole", line)
		}
	})
}

func TestLinePlace(t *testing.T) {
	for line, want := range map[string]string{
		`{"cursor":"p3-12.4","tenant":"a"}`:            "3 12.4.0",
		`{"cursor":"p0-1.0","item":7,"tenant":"a"}`:    "0 1.0.7",
		`{"cursor":"p3-12.4","tenant":"a"`:             "",
		`{"cursor":"p3-12","tenant":"a"}`:              "",
		`{"cursor":"p3.12-4","tenant":"a"}`:            "",
		`{"cursor":"p-1-1.1"}`:                         "",
		`{"cursor":"p0-1.4294967296"}`:                 "",
		`{"cursor":"p0-1.0","item":"x","tenant":""}`:   "",
		"{\"cursor\":\"p3-12.4\",\"tenant\":\"\x00\"}": "",
		``:   "",
		`{}`: "",
	} {
		got := ""
		if part, p, ok := linePlace([]byte(line)); ok {
			got = string(rune('0'+part)) + " " + p.String()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

func FuzzMark(f *testing.F) {
	for _, s := range []string{"", "0:0", "3:1024", "x", "-1:2", "1:99999999999999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		m, err := parseMark(s)
		if err != nil {
			return
		}
		if m.offset < 0 {
			t.Errorf("%q: offset %d", s, m.offset)
		}
		if again, err := parseMark(m.String()); err != nil || again != m {
			t.Errorf("%q: %v, then %v, %v", s, m, again, err)
		}
	})
}

func FuzzSegmentName(f *testing.F) {
	f.Add(segmentName(Events, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), 12))
	f.Add("events-20260102T030405-00000000.jsonl")
	f.Add("events-20260102T030405-12.jsonl")
	f.Add("access-20260102T030405-00000012.jsonl")
	f.Fuzz(func(t *testing.T, name string) {
		if start, seq, ok := parseSegmentName(Events, name); ok && segmentName(Events, start, seq) != name {
			t.Errorf("%q is read as %v %d", name, start, seq)
		}
	})
}

func FuzzPlaces(f *testing.F) {
	raw, _ := encodePlaces("s1", []place{{1, 2, 3}, {}})
	f.Add(raw)
	f.Add([]byte(`{"format":2,"store":"s","places":[]}`))
	f.Add([]byte(`{"format":1,"store":"s","places":["1.2"]}`))
	f.Add([]byte(`{"format":1,"places":[]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		store, places, err := decodePlaces(raw)
		if err != nil {
			return
		}
		again, err := encodePlaces(store, places)
		if err != nil {
			t.Fatal(err)
		}
		store2, places2, err := decodePlaces(again)
		if err != nil || store2 != strings.ToValidUTF8(store, "\ufffd") && store2 != store || !slices.Equal(places, places2) {
			t.Errorf("%q: %q %v, then %q %v, %v", raw, store, places, store2, places2, err)
		}
	})
}

// FuzzLines: lines come whole and in order, however the reads are cut, and
// the offset is behind the last.
func FuzzLines(f *testing.F) {
	f.Add([]byte("a\nbc\n\nd"))
	f.Add([]byte("\n"))
	f.Add(append(bytes.Repeat([]byte("x"), 3*readChunk), '\n', 'y'))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := lineReader{r: iotest.HalfReader(bytes.NewReader(raw))}
		var got []byte
		for {
			line, err := r.next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = append(append(got, line...), '\n')
			if r.offset != int64(len(got)) {
				t.Fatalf("offset %d behind %d bytes", r.offset, len(got))
			}
		}
		if want := raw[:bytes.LastIndexByte(raw, '\n')+1]; !bytes.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

// FuzzEncode: whatever an event or a request carries, a line is one line of
// JSON that says whose it is.
func FuzzEncode(f *testing.F) {
	f.Add("acme", "s_1", []byte(`{"a":1}`))
	f.Add("a\"b", "\x00\xff", []byte("{\n\"a\":\r1}"))
	f.Add("", "", []byte("no\njson"))
	f.Fuzz(func(t *testing.T, tenant, text string, data []byte) {
		if !json.Valid(data) && !hasControl(data) && len(data) > 0 {
			return // data without control characters are taken as they are
		}
		ev := &wire.Event{Lsn: 1, Scope: text, Items: [][]byte{data}}
		sub := subject{1, tenant, text}
		for _, line := range [][]byte{
			appendEvent(nil, sub, ev, text, data),
			appendMessage(nil, sub, ev, 0, true),
			appendRecord(nil, &Record{Tenant: tenant, Session: text, Method: text, Route: text, Remote: text, RequestID: text}),
		} {
			if bytes.IndexByte(line, '\n') >= 0 || !json.Valid(line) {
				t.Errorf("%q", line)
			}
			p := page{tenant: tenantField(tenant), room: 1}
			if p.take(line); len(p.records) != 1 && len(tenant) <= maxRecordText {
				t.Errorf("tenant %q does not see %q", tenant, line)
			}
			p = page{tenant: tenantField(tenant + "x"), room: 1}
			if p.take(line); len(p.records) != 0 {
				t.Errorf("tenant %q sees %q", tenant+"x", line)
			}
		}
	})
}
