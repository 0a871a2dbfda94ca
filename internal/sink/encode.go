package sink

import (
	"bytes"
	"encoding/json"
	"github.com/perdure-dev/perdure/internal/jsontext"
	"strconv"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

// subject is whose event a line tells of.
type subject struct {
	part            int
	tenant, session string
}

// appendEvent writes one line of the events log, without its end.
func appendEvent(b []byte, s subject, ev *wire.Event, name string, data []byte) []byte {
	b = append(b, `{"cursor":"`...)
	b = appendCursor(b, s.part, ev.Lsn, ev.N)
	b = appendSubject(append(b, '"'), s, ev)
	b = appendField(b, `,"event":`, name)
	b = append(b, `,"data":`...)
	b = appendJSON(b, data)
	return append(b, '}')
}

// appendMessage writes one line of the transcripts, without its end.
func appendMessage(b []byte, s subject, ev *wire.Event, item int, partial bool) []byte {
	b = append(b, `{"cursor":"`...)
	b = appendCursor(b, s.part, ev.Lsn, ev.N)
	b = append(b, `","item":`...)
	b = strconv.AppendInt(b, int64(item), 10)
	b = appendSubject(b, s, ev)
	if partial {
		b = append(b, `,"partial":true`...)
	}
	b = append(b, `,"message":`...)
	b = appendJSON(b, ev.Items[item])
	return append(b, '}')
}

func appendSubject(b []byte, s subject, ev *wire.Event) []byte {
	b = appendField(b, `,"tenant":`, s.tenant)
	b = appendField(b, `,"session":`, s.session)
	b = appendField(b, `,"turn_id":`, ev.Scope)
	return appendTime(append(b, `,"at":`...), time.UnixMicro(ev.AtUs))
}

// appendRecord writes one line of the access log, without its end. Texts of
// clients are cut, so that a line is bounded.
func appendRecord(b []byte, r *Record) []byte {
	b = appendTime(append(b, `{"at":`...), r.Time)
	b = appendField(b, `,"tenant":`, clip(r.Tenant))
	b = appendField(b, `,"method":`, clip(r.Method))
	b = appendField(b, `,"route":`, clip(r.Route))
	b = strconv.AppendInt(append(b, `,"status":`...), int64(r.Status), 10)
	b = strconv.AppendInt(append(b, `,"bytes_in":`...), r.BytesIn, 10)
	b = strconv.AppendInt(append(b, `,"bytes_out":`...), r.BytesOut, 10)
	b = appendMillis(append(b, `,"duration_ms":`...), r.Duration)
	if r.TTFB > 0 {
		b = appendMillis(append(b, `,"ttfb_ms":`...), r.TTFB)
	}
	for _, f := range [...]struct{ name, value string }{
		{`,"session":`, r.Session}, {`,"turn_id":`, r.Turn}, {`,"remote":`, r.Remote}, {`,"request_id":`, r.RequestID},
	} {
		if f.value != "" {
			b = appendField(b, f.name, clip(f.value))
		}
	}
	return append(b, '}')
}

func clip(s string) string {
	if len(s) > maxRecordText {
		return s[:maxRecordText]
	}
	return s
}

func appendTime(b []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(b, `"2006-01-02T15:04:05.000Z"`)
}

// appendMillis writes a duration in milliseconds with three digits behind the point.
func appendMillis(b []byte, d time.Duration) []byte {
	us := max(d.Microseconds(), 0)
	b = strconv.AppendInt(b, us/1000, 10)
	frac := us % 1000
	return append(b, '.', byte('0'+frac/100), byte('0'+frac/10%10), byte('0'+frac%10))
}

func appendField(b []byte, name, value string) []byte {
	return jsontext.AppendString(append(b, name...), value)
}

// appendJSON writes a JSON value on one line: clients may have sent it on
// several. What is no JSON then becomes a string, never a broken line.
func appendJSON(b, raw []byte) []byte {
	if len(raw) == 0 {
		return append(b, "null"...)
	}
	if !hasControl(raw) {
		return append(b, raw...)
	}
	var line bytes.Buffer
	if err := json.Compact(&line, raw); err != nil {
		return jsontext.AppendString(b, string(raw[:min(len(raw), maxLine/8)]))
	}
	return append(b, line.Bytes()...)
}

func hasControl(raw []byte) bool {
	return bytes.IndexByte(raw, '\n') >= 0 || bytes.IndexByte(raw, '\r') >= 0 || bytes.IndexByte(raw, 0) >= 0
}
