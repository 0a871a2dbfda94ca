// Package sse decodes server-sent events (the "data" field only) from bytes
// that arrive in pieces, without copying when an event lies in one piece.
package sse

import (
	"bytes"
	"errors"
)

// ErrTooLarge tells that one event passed the decoder's bound.
var ErrTooLarge = errors.New("sse: event too large")

// Decoder holds the unfinished part of a stream. The zero value is ready, with
// a bound of 1 MiB an event. It belongs to one goroutine.
type Decoder struct {
	Max int // bytes of one event, unfinished line included; 0 = 1 MiB

	line     []byte // start of a line whose end has not come
	lineDone bool   // line was handed out: empty it first
	data     []byte // data of the event so far
	has      bool   // a data field was seen
	dataDone bool   // data was handed out: empty it first
	skipLF   bool   // the last byte was CR: an LF now belongs to it
	begun    bool   // the first line is past
}

// Reset makes d ready for another stream and keeps small buffers.
func (d *Decoder) Reset() {
	line, data := d.line[:0], d.data[:0]
	if cap(line) > 4<<10 {
		line = nil
	}
	if cap(data) > 4<<10 {
		data = nil
	}
	*d = Decoder{Max: d.Max, line: line, data: data}
}

// Next consumes n bytes of p and gives the first event that they complete.
// With ok false all of p is consumed. The event's bytes, the lines of its data
// fields joined by LF, are valid until the next call and as long as p is.
func (d *Decoder) Next(p []byte) (event []byte, n int, ok bool, err error) {
	if d.dataDone {
		d.data, d.has, d.dataDone = d.data[:0], false, false
	}
	for n < len(p) {
		line, used, whole := d.nextLine(p[n:])
		n += used
		if len(d.line)+len(d.data) > d.max() {
			return nil, n, false, ErrTooLarge
		}
		if !whole {
			break
		}
		if len(line) == 0 {
			if event, ok := d.end(); ok {
				return event, n, true, nil
			}
			continue
		}
		value, isData := dataField(line)
		if !isData {
			continue
		}
		if !d.has { // the usual event: one line, and its end is here
			if skip := blankLine(p[n:]); skip > 0 {
				return value, n + skip, true, nil
			}
		}
		if !d.add(value) {
			return nil, n, false, ErrTooLarge
		}
	}
	return nil, n, false, nil
}

// Last gives an event whose closing blank line never came, for servers that
// end the stream without it. Call it once, at the end of the stream.
func (d *Decoder) Last() (event []byte, ok bool) {
	if d.dataDone {
		return nil, false // what follows a whole event without a line end is no event
	}
	if !d.lineDone && len(d.line) > 0 {
		if value, isData := dataField(d.trimBOM(d.line)); isData && !d.add(value) {
			return nil, false
		}
	}
	return d.end()
}

func (d *Decoder) max() int {
	if d.Max > 0 {
		return d.Max
	}
	return 1 << 20
}

// end hands out the event that a blank line closes.
func (d *Decoder) end() ([]byte, bool) {
	if d.dataDone || !d.has {
		return nil, false
	}
	d.dataDone = true
	return d.data, true
}

// add appends one data field to the event.
func (d *Decoder) add(value []byte) bool {
	if len(d.data)+len(value) >= d.max() {
		return false
	}
	if d.has {
		d.data = append(d.data, '\n')
	}
	d.data = append(d.data, value...)
	d.has = true
	return true
}

// nextLine takes one line off p. A line ends with CRLF, LF or CR.
func (d *Decoder) nextLine(p []byte) (line []byte, used int, whole bool) {
	if d.lineDone {
		d.line, d.lineDone = d.line[:0], false
	}
	if d.skipLF {
		d.skipLF = false
		if p[0] == '\n' {
			p, used = p[1:], 1
		}
	}
	lf := bytes.IndexByte(p, '\n')
	end := lf
	if lf < 0 {
		end = len(p)
	}
	cr := bytes.IndexByte(p[:end], '\r')
	switch {
	case cr >= 0:
		line, used = p[:cr], used+cr+1
		if cr+1 == len(p) {
			d.skipLF = true
		} else if p[cr+1] == '\n' {
			used++
		}
	case lf >= 0:
		line, used = p[:lf], used+lf+1
	default:
		d.line = append(d.line, p...)
		return nil, used + len(p), false
	}
	if len(d.line) > 0 {
		d.line = append(d.line, line...)
		d.lineDone = true
		line = d.line
	}
	return d.trimBOM(line), used, true
}

// trimBOM drops the byte-order mark that may start a stream.
func (d *Decoder) trimBOM(line []byte) []byte {
	if d.begun {
		return line
	}
	d.begun = true
	return bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
}

// blankLine is the length of the empty line that p starts with; 0 = none, or
// not yet known.
func blankLine(p []byte) int {
	switch {
	case len(p) >= 1 && p[0] == '\n':
		return 1
	case len(p) >= 2 && p[0] == '\r' && p[1] == '\n':
		return 2
	case len(p) >= 2 && p[0] == '\r':
		return 1
	}
	return 0
}

// dataField gives the value of a data line; comments and other fields are not.
func dataField(line []byte) ([]byte, bool) {
	if len(line) < 4 || string(line[:4]) != "data" {
		return nil, false
	}
	if len(line) == 4 {
		return line[4:], true
	}
	if line[4] != ':' {
		return nil, false
	}
	line = line[5:]
	if len(line) > 0 && line[0] == ' ' {
		line = line[1:]
	}
	return line, true
}
