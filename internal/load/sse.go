package load

import "bytes"

// Bounds of an event's parts that are kept; the rest is skipped, not refused.
const (
	maxEventName = 64
	maxEventData = 4096
)

// events parses server-sent events as their bytes come in, in pieces cut
// anywhere. It keeps only the beginning of each event.
type events struct {
	name, data []byte
	line       []byte // an unfinished line
	skip       bool   // the unfinished line is beyond its bound
	any        bool   // the event has a field
	cr         bool   // the last line ended with CR: a LF next belongs to it
	over       bool   // the event was reported: the next call begins a new one
}

func (e *events) reset() { *e = events{name: e.name[:0], data: e.data[:0], line: e.line[:0]} }

// next consumes bytes of p up to the end of one event and reports it; ok is
// false when p holds no further end. After ok, e.name and e.data are valid
// until the next call.
func (e *events) next(p []byte) (rest []byte, ok bool) {
	if e.over {
		e.name, e.data, e.any, e.over = e.name[:0], e.data[:0], false, false
	}
	for len(p) > 0 {
		if e.cr {
			e.cr = false
			if p[0] == '\n' {
				p = p[1:]
				continue
			}
		}
		i := bytes.IndexByte(p, '\n')
		if j := bytes.IndexByte(p, '\r'); j >= 0 && (i < 0 || j < i) {
			i, e.cr = j, true
		}
		if i < 0 {
			e.keep(p)
			return nil, false
		}
		line := p[:i]
		if len(e.line) > 0 || e.skip {
			e.keep(line)
			line = e.line
		}
		p = p[i+1:]
		end := len(line) == 0
		if !end {
			e.field(line)
		}
		e.line, e.skip = e.line[:0], false
		if end && e.any {
			e.over = true
			return p, true
		}
	}
	return nil, false
}

func (e *events) keep(p []byte) {
	if room := maxEventData + maxEventName - len(e.line); len(p) > room {
		p, e.skip = p[:room], true
	}
	e.line = append(e.line, p...)
}

func (e *events) field(line []byte) {
	name, value, _ := bytes.Cut(line, []byte(":"))
	if len(name) == 0 {
		return // a comment: the server's heartbeat
	}
	value = bytes.TrimPrefix(value, []byte(" "))
	e.any = true
	switch string(name) {
	case "event":
		e.name = append(e.name[:0], value[:min(len(value), maxEventName)]...)
	case "data":
		if len(e.data) > 0 && len(e.data) < maxEventData {
			e.data = append(e.data, '\n')
		}
		e.data = append(e.data, value[:min(len(value), maxEventData-len(e.data))]...)
	}
}
