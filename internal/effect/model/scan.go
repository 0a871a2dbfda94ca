package model

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// scanner takes the text out of the usual chunk of a stream without
// allocating. It knows the grammar of JSON but only one shape: at most one
// choice, whose delta holds text or nothing, and perhaps the usage. On anything
// else it gives up, and the caller decodes the chunk in full; where it does not
// give up it agrees with the full decode, which a fuzz test holds.
//
// The chunks of one stream differ only in their text, so the bytes around the
// text of the last chunk are kept: when they come again, only the text has to
// be looked at.
type scanner struct {
	frame []byte // the last chunk without its text, if it held nothing else; empty: none
	cut   int    // where in frame the text was
}

// maxFrame bounds what the scanner keeps, in bytes.
const maxFrame = 2 << 10

// scanned is what a chunk holds besides text.
type scanned struct {
	finish   string
	usage    Usage
	hasUsage bool
}

// scan appends the chunk's text to dst. With ok false dst is unchanged and the
// chunk must be decoded in full.
func (s *scanner) scan(data, dst []byte) (out []byte, more scanned, ok bool) {
	if n := len(data) - len(s.frame); n >= 0 && len(s.frame) > 0 &&
		bytes.Equal(data[:s.cut], s.frame[:s.cut]) && bytes.Equal(data[s.cut+n:], s.frame[s.cut:]) {
		if out, ok := appendUnquoted(dst, data[s.cut:s.cut+n]); ok {
			return out, more, true
		}
	}
	p := parser{data: data}
	p.chunk()
	if p.bad {
		return dst, more, false
	}
	if !p.hasText {
		return dst, p.scanned, true
	}
	out, ok = appendUnquoted(dst, data[p.from:p.to])
	if !ok {
		return dst, more, false
	}
	if p.scanned == (scanned{}) && len(data)-(p.to-p.from) <= maxFrame {
		s.frame = append(append(s.frame[:0], data[:p.from]...), data[p.to:]...)
		s.cut = p.from
	}
	return out, p.scanned, true
}

// parser walks one chunk. bad means "not the usual shape" as well as "not
// JSON", and is sticky.
type parser struct {
	data []byte
	i    int
	bad  bool

	hasText  bool
	from, to int // the text's bytes inside its quotes
	scanned
	seen uint8 // members that must not come twice: the last one would win
}

const (
	seenChoices = 1 << iota
	seenDelta
	seenFinish
	seenContent
	seenUsage
	seenPrompt
	seenCompletion
)

// maxSkipDepth bounds the nesting of what is skipped.
const maxSkipDepth = 16

func (p *parser) chunk() {
	p.space()
	p.expect('{')
	for first := true; p.more(first, '}'); first = false {
		switch string(p.key()) {
		case "choices":
			p.once(seenChoices)
			p.choices()
		case "usage":
			p.once(seenUsage)
			p.usageObject()
		case "error":
			p.literal("null")
		default:
			p.skip(0)
		}
	}
	p.space()
	p.bad = p.bad || p.i != len(p.data)
}

func (p *parser) choices() {
	p.expect('[')
	if !p.more(true, ']') {
		return // the chunk that only tells the usage
	}
	p.choice()
	if p.more(false, ']') {
		p.bad = true // several choices: not ours to judge
	}
}

func (p *parser) choice() {
	p.expect('{')
	for first := true; p.more(first, '}'); first = false {
		switch string(p.key()) {
		case "delta":
			p.once(seenDelta)
			p.delta()
		case "finish_reason":
			p.once(seenFinish)
			p.finishReason()
		default:
			p.skip(0)
		}
	}
}

func (p *parser) delta() {
	p.expect('{')
	for first := true; p.more(first, '}'); first = false {
		switch string(p.key()) {
		case "content":
			p.once(seenContent)
			if p.peek() == '"' {
				p.from, p.to = p.str()
				p.hasText = true
			} else {
				p.literal("null")
			}
		case "refusal", "tool_calls":
			p.literal("null")
		default:
			p.skip(0)
		}
	}
}

func (p *parser) usageObject() {
	if p.peek() != '{' {
		p.literal("null")
		return
	}
	p.i++
	p.hasUsage = true
	for first := true; p.more(first, '}'); first = false {
		switch string(p.key()) {
		case "prompt_tokens":
			p.once(seenPrompt)
			p.usage.Prompt = p.tokens()
		case "completion_tokens":
			p.once(seenCompletion)
			p.usage.Completion = p.tokens()
		default:
			p.skip(0)
		}
	}
}

// tokens reads a plain count.
func (p *parser) tokens() int {
	start := p.i
	p.number()
	n := 0
	if p.i-start > 9 {
		p.bad = true
		return 0
	}
	for _, c := range p.data[start:p.i] {
		p.bad = p.bad || c < '0' || c > '9'
		n = n*10 + int(c-'0')
	}
	return n
}

func (p *parser) finishReason() {
	if p.peek() != '"' {
		p.literal("null")
		return
	}
	from, to := p.str()
	if p.bad {
		return
	}
	switch string(p.data[from:to]) { // the known words cost no allocation
	case "stop":
		p.finish = "stop"
	case "length":
		p.finish = "length"
	case "tool_calls":
		p.finish = "tool_calls"
	case "content_filter":
		p.finish = "content_filter"
	default:
		p.bad = true
	}
}

// once turns bad when a member comes a second time.
func (p *parser) once(bit uint8) {
	p.bad = p.bad || p.seen&bit != 0
	p.seen |= bit
}

func (p *parser) peek() byte {
	if p.i < len(p.data) {
		return p.data[p.i]
	}
	return 0
}

func (p *parser) space() {
	for p.i < len(p.data) {
		switch p.data[p.i] {
		case ' ', '\t', '\n', '\r':
			p.i++
		default:
			return
		}
	}
}

func (p *parser) expect(c byte) {
	if p.peek() != c {
		p.bad = true
		return
	}
	p.i++
}

func (p *parser) literal(s string) {
	if len(p.data)-p.i < len(s) || string(p.data[p.i:p.i+len(s)]) != s {
		p.bad = true
		return
	}
	p.i += len(s)
}

// more moves to the next member of an object or array, and past its end.
func (p *parser) more(first bool, end byte) bool {
	if p.bad {
		return false
	}
	p.space()
	switch c := p.peek(); {
	case c == end && p.i < len(p.data):
		p.i++
		return false
	case first:
		return true // what follows must be a member: its reader checks
	case c != ',':
		p.bad = true
		return false
	}
	p.i++
	p.space()
	return true
}

// key reads a member's name and the colon. Only lower-case names pass:
// encoding/json matches names without regard to case, and a name that merely
// resembles one of ours must go to it.
func (p *parser) key() []byte {
	p.expect('"')
	start := p.i
	for p.i < len(p.data) {
		c := p.data[p.i]
		if c >= 'a' && c <= 'z' || c == '_' || c >= '0' && c <= '9' {
			p.i++
			continue
		}
		break
	}
	key := p.data[start:p.i]
	p.expect('"')
	p.space()
	p.expect(':')
	p.space()
	return key
}

// str passes a string and gives the range inside its quotes. Escapes are only
// checked as far as the end of the string depends on them.
func (p *parser) str() (from, to int) {
	p.expect('"')
	from = p.i
	for p.i < len(p.data) {
		switch c := p.data[p.i]; {
		case c == '"':
			to = p.i
			p.i++
			return from, to
		case c == '\\':
			p.i += 2
		case c < 0x20:
			p.bad = true
			return 0, 0
		default:
			p.i++
		}
	}
	p.bad = true
	return 0, 0
}

// skip passes any value and checks that it is JSON.
func (p *parser) skip(depth int) {
	if p.bad || depth > maxSkipDepth {
		p.bad = true
		return
	}
	switch c := p.peek(); {
	case c == '"':
		from, to := p.str()
		p.bad = p.bad || !validEscapes(p.data[from:to])
	case c == '{':
		p.i++
		for first := true; p.more(first, '}'); first = false {
			from, to := p.str()
			p.bad = p.bad || !validEscapes(p.data[from:to])
			p.space()
			p.expect(':')
			p.space()
			p.skip(depth + 1)
		}
	case c == '[':
		p.i++
		for first := true; p.more(first, ']'); first = false {
			p.skip(depth + 1)
		}
	case c == 't':
		p.literal("true")
	case c == 'f':
		p.literal("false")
	case c == 'n':
		p.literal("null")
	default:
		p.number()
	}
}

func (p *parser) number() {
	if p.peek() == '-' {
		p.i++
	}
	if p.peek() == '0' {
		p.i++
	} else {
		p.digits()
	}
	if p.peek() == '.' {
		p.i++
		p.digits()
	}
	if c := p.peek(); c == 'e' || c == 'E' {
		p.i++
		if c := p.peek(); c == '+' || c == '-' {
			p.i++
		}
		p.digits()
	}
}

func (p *parser) digits() {
	start := p.i
	for p.i < len(p.data) && p.data[p.i] >= '0' && p.data[p.i] <= '9' {
		p.i++
	}
	p.bad = p.bad || p.i == start
}

// validEscapes checks the escapes of a string that is skipped.
func validEscapes(raw []byte) bool {
	for {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 {
			return true
		}
		if i+1 >= len(raw) {
			return false
		}
		switch raw[i+1] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			raw = raw[i+2:]
		case 'u':
			if _, ok := hex4(raw[i+2:]); !ok {
				return false
			}
			raw = raw[i+6:]
		default:
			return false
		}
	}
}

// appendUnquoted appends the value of a JSON string given without its quotes.
// It refuses what is not one, and what encoding/json would repair.
func appendUnquoted(dst, raw []byte) ([]byte, bool) {
	out := dst
	for i := 0; i < len(raw); {
		start := i
		high := false
		for i < len(raw) && raw[i] >= 0x20 && raw[i] != '"' && raw[i] != '\\' {
			high = high || raw[i] >= utf8.RuneSelf
			i++
		}
		if high && !utf8.Valid(raw[start:i]) {
			return dst, false
		}
		out = append(out, raw[start:i]...)
		if i == len(raw) {
			break
		}
		if raw[i] != '\\' || i+1 == len(raw) {
			return dst, false
		}
		r, n := unescape(raw[i:])
		if n == 0 {
			return dst, false
		}
		out = utf8.AppendRune(out, r)
		i += n
	}
	return out, true
}

// unescape reads one escape of at least two bytes; n is 0 when it is not one.
func unescape(b []byte) (r rune, n int) {
	switch b[1] {
	case '"', '\\', '/':
		return rune(b[1]), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	case 'u':
		r, ok := hex4(b[2:])
		if !ok {
			return 0, 0
		}
		if !utf16.IsSurrogate(r) {
			return r, 6
		}
		if len(b) < 12 || b[6] != '\\' || b[7] != 'u' {
			return 0, 0
		}
		low, ok := hex4(b[8:])
		if r = utf16.DecodeRune(r, low); !ok || r == utf8.RuneError {
			return 0, 0
		}
		return r, 12
	}
	return 0, 0
}

func hex4(b []byte) (rune, bool) {
	if len(b) < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[:4] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}
