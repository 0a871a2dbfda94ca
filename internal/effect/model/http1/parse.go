package http1

import (
	"bytes"
	"io"
)

// bodyState is where the reader stands in the response.
type bodyState uint8

const (
	inHead bodyState = iota
	bodyLength
	bodyUntilClose
	chunkSize
	chunkData
	chunkEnd
	chunkTrailer
	bodyDone
)

// Next gives the next buffered bytes of the body without blocking. The slice
// is valid until the next Fill. It returns ErrWait when Fill must run first,
// io.EOF at the proper end of the body, and *Error for a broken body.
func (x *Exchange) Next() ([]byte, error) {
	for {
		switch x.state {
		case bodyDone:
			return nil, io.EOF
		case bodyLength, chunkData:
			if x.left == 0 {
				if x.state == bodyLength {
					x.state = bodyDone
				} else {
					x.state = chunkEnd
				}
				continue
			}
			if x.r == x.w {
				return nil, ErrWait
			}
			n := int(min(int64(x.w-x.r), x.left))
			x.left -= int64(n)
			return x.take(n), nil
		case bodyUntilClose:
			if x.r < x.w {
				return x.take(x.w - x.r), nil
			}
			if !x.eof {
				return nil, ErrWait
			}
			x.state = bodyDone
		case chunkSize, chunkEnd, chunkTrailer:
			line, err := x.bufferedLine()
			if err != nil {
				return nil, err
			}
			if err := x.chunkLine(line); err != nil {
				return nil, err
			}
		default:
			return nil, fail(FailClosed, "the exchange has no response", nil)
		}
	}
}

func (x *Exchange) take(n int) []byte {
	data := x.buf[x.r : x.r+n]
	x.r += n
	x.inBody = true
	return data
}

// chunkLine handles one line of the chunked framing.
func (x *Exchange) chunkLine(line []byte) error {
	switch x.state {
	case chunkSize:
		n, ok := parseChunkSize(line)
		if !ok {
			return fail(FailMalformed, "bad chunk size", nil)
		}
		x.left = n
		x.state = chunkData
		if n == 0 {
			x.state = chunkTrailer
		}
	case chunkEnd:
		if len(line) != 0 {
			return fail(FailMalformed, "a chunk is longer than its size", nil)
		}
		x.state = chunkSize
	case chunkTrailer:
		if len(line) == 0 {
			x.state = bodyDone
			return nil
		}
		if x.trailer += len(line); x.trailer > MaxHead {
			return fail(FailTooLarge, "the trailer is too large", nil)
		}
	}
	return nil
}

// parseChunkSize reads hex digits, then nothing or an extension.
func parseChunkSize(line []byte) (int64, bool) {
	if i := bytes.IndexByte(line, ';'); i >= 0 {
		line = line[:i]
	}
	line = bytes.TrimRight(line, " \t")
	if len(line) == 0 || len(line) > 12 {
		return 0, false
	}
	var n int64
	for _, c := range line {
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
		n = n<<4 | int64(c)
	}
	return n, true
}

// bufferedLine takes one line without its end (CRLF, or LF alone, which RFC
// 9112 section 2.2 lets a reader accept), or returns ErrWait.
func (x *Exchange) bufferedLine() ([]byte, error) {
	i := bytes.IndexByte(x.buf[x.r:x.w], '\n')
	if i >= MaxLine || i < 0 && x.w-x.r >= MaxLine {
		return nil, fail(FailTooLarge, "a line of the response is too long", nil)
	}
	if i < 0 {
		return nil, ErrWait
	}
	line := x.buf[x.r : x.r+i]
	x.r += i + 1
	if i > 0 && line[i-1] == '\r' {
		line = line[:i-1]
	}
	return line, nil
}

// headLine takes one line of the head, blocking.
func (x *Exchange) headLine() ([]byte, error) {
	for {
		line, err := x.bufferedLine()
		if err == ErrWait {
			if err := x.Fill(); err != nil {
				return nil, err
			}
			continue
		}
		if x.headBytes += len(line); x.headBytes > MaxHead {
			return nil, fail(FailTooLarge, "the response head is too large", nil)
		}
		return line, err
	}
}

// head collects what the framing of a response depends on.
type head struct {
	http10   bool
	length   int64 // -1: none
	chunked  bool
	close    bool
	keep     bool // Keep-alive said so, which HTTP/1.0 needs
	encoding bool // a content encoding nobody asked for
}

// readHead reads the final response head, past interim ones.
func (x *Exchange) readHead() error {
	for range maxInterim {
		h := head{length: -1}
		line, err := x.headLine()
		if err != nil {
			return err
		}
		if err := x.statusLine(line, &h); err != nil {
			return err
		}
		for {
			line, err := x.headLine()
			if err != nil {
				return err
			}
			if len(line) == 0 {
				break
			}
			if err := x.headerLine(line, &h); err != nil {
				return err
			}
		}
		if x.Status >= 200 {
			return x.startBody(&h)
		}
		if x.Status == 101 {
			return fail(FailMalformed, "the server switches protocols unasked", nil)
		}
	}
	return fail(FailMalformed, "too many interim responses", nil)
}

// statusLine reads "HTTP/1.x NNN reason".
func (x *Exchange) statusLine(line []byte, h *head) error {
	bad := len(line) < 12 || string(line[:7]) != "HTTP/1." || line[7] != '0' && line[7] != '1' ||
		line[8] != ' ' || len(line) > 12 && line[12] != ' '
	status := 0
	for i := 9; !bad && i < 12; i++ {
		bad = line[i] < '0' || line[i] > '9'
		status = status*10 + int(line[i]-'0')
	}
	if bad || status < 100 {
		return fail(FailMalformed, "the server does not answer in HTTP/1.1", nil)
	}
	x.Status = status
	h.http10 = line[7] == '0'
	return nil
}

func (x *Exchange) headerLine(line []byte, h *head) error {
	i := bytes.IndexByte(line, ':')
	if i <= 0 || line[0] == ' ' || line[0] == '\t' || line[i-1] == ' ' || line[i-1] == '\t' {
		return fail(FailMalformed, "bad header line", nil)
	}
	name, value := line[:i], bytes.Trim(line[i+1:], " \t")
	switch len(name) {
	case 10:
		if isName(name, "connection") {
			h.close = h.close || hasToken(value, "close")
			h.keep = h.keep || hasToken(value, "keep-alive")
		}
	case 11:
		if isName(name, "retry-after") && x.Status >= 400 {
			x.RetryAfter = string(value)
		}
	case 14:
		if isName(name, "content-length") {
			n, ok := parseLength(value)
			if !ok || h.length >= 0 && h.length != n {
				return fail(FailMalformed, "bad Content-Length", nil)
			}
			h.length = n
		} else if isName(name, "retry-after-ms") && x.Status >= 400 {
			x.RetryMS = string(value)
		}
	case 16:
		if isName(name, "content-encoding") {
			h.encoding = h.encoding || len(value) > 0 && !isName(value, "identity")
		}
	case 17:
		if isName(name, "transfer-encoding") {
			if h.chunked || !isName(value, "chunked") {
				return fail(FailMalformed, "unsupported Transfer-Encoding", nil)
			}
			h.chunked = true
		}
	}
	return nil
}

// startBody chooses the framing as RFC 9112 section 6.3 orders it.
func (x *Exchange) startBody(h *head) error {
	if h.encoding {
		return fail(FailMalformed, "the server sent a Content-Encoding that was not asked for", nil)
	}
	x.keep = !h.close && (!h.http10 || h.keep)
	switch {
	case x.Status == 204 || x.Status == 304:
		x.state = bodyDone
	case h.chunked && h.http10:
		return fail(FailMalformed, "chunked answer in HTTP/1.0", nil)
	case h.chunked:
		x.state = chunkSize
		// Both framings at once smell of a confused proxy: read it, trust it no further.
		x.keep = x.keep && h.length < 0
	case h.length >= 0:
		x.state, x.left = bodyLength, h.length
		if h.length == 0 {
			x.state = bodyDone
		}
	default:
		x.state, x.keep = bodyUntilClose, false
	}
	return nil
}

// isName compares ASCII case-insensitively; lower is in lower case.
func isName(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

func hasToken(list []byte, lower string) bool {
	for len(list) > 0 {
		item, rest, _ := bytes.Cut(list, []byte(","))
		if isName(bytes.Trim(item, " \t"), lower) {
			return true
		}
		list = rest
	}
	return false
}

func parseLength(v []byte) (int64, bool) {
	if len(v) == 0 || len(v) > 15 {
		return 0, false
	}
	var n int64
	for _, c := range v {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}
