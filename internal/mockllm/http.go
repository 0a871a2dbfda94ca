package mockllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strconv"
	"time"
)

// handler serves one connection; all its fields belong to that goroutine.
type handler struct {
	s  *Server
	c  net.Conn
	br *bufio.Reader
}

// head is what matters of a request's head.
type head struct {
	method, path string
	length       int64 // -1 = none given
	chunked      bool
	expect       bool // 100-continue
	close        bool
}

// statusError is a request the mock refuses; the connection ends with it.
type statusError struct {
	status int
	text   string
}

func (e statusError) Error() string { return e.text }

// loop answers requests until the peer goes or one asks to close.
func (h *handler) loop() {
	for {
		if _, err := h.br.Peek(1); err != nil {
			return
		}
		arrived := h.s.clock.Now()
		hd, err := readHead(h.br)
		if err == nil {
			err = h.route(hd, arrived)
		}
		if se := (statusError{}); errors.As(err, &se) {
			h.s.stats.bad.Add(1)
			_ = h.answer(se.status, "Connection: close\r\n", errorBody(se.text, "invalid_request_error"))
			return
		}
		if err != nil || hd.close {
			return
		}
	}
}

func (h *handler) route(hd head, arrived time.Time) error {
	buf := h.s.buffer()
	defer h.s.release(buf)
	body, err := h.readBody(hd, *buf)
	*buf = body
	if err != nil {
		return err
	}
	switch hd.method + " " + hd.path {
	case "POST /v1/chat/completions", "POST /chat/completions":
		return h.chat(body, arrived)
	case "GET /v1/models", "GET /models":
		return h.answer(200, "", []byte(`{"object":"list","data":[{"id":"mock","object":"model","created":1700000000,"owned_by":"perdure"}]}`))
	case "GET /stats":
		b, err := json.Marshal(h.s.Stats())
		if err != nil {
			return err
		}
		return h.answer(200, "", b)
	case "POST /stats/reset":
		h.s.ResetMax()
		return h.answer(200, "", []byte(`{}`))
	case "GET /healthz", "GET /readyz":
		return h.answer(200, "", []byte(`{}`))
	}
	return h.answer(404, "", errorBody("no route "+hd.method+" "+printable(hd.path), "not_found"))
}

// readHead reads a request line and its header fields.
func readHead(br *bufio.Reader) (head, error) {
	hd := head{length: -1}
	line, err := readLine(br)
	if err != nil {
		return hd, err
	}
	method, rest, ok := bytes.Cut(line, []byte(" "))
	target, version, ok2 := bytes.Cut(rest, []byte(" "))
	if !ok || !ok2 || !bytes.HasPrefix(version, []byte("HTTP/1.")) {
		return hd, statusError{400, "not an HTTP/1.1 request"}
	}
	path, _, _ := bytes.Cut(target, []byte("?"))
	hd.method, hd.path = string(method), string(path)
	hd.close = string(version) == "HTTP/1.0"
	for size := len(line); ; size += len(line) + 2 {
		if size > maxHeaderBytes {
			return hd, statusError{431, "header fields too large"}
		}
		if line, err = readLine(br); err != nil {
			return hd, err
		}
		if len(line) == 0 {
			return hd, nil
		}
		if err := hd.field(line); err != nil {
			return hd, err
		}
	}
}

func (hd *head) field(line []byte) error {
	name, value, ok := bytes.Cut(line, []byte(":"))
	if !ok {
		return statusError{400, "malformed header field"}
	}
	value = bytes.TrimSpace(value)
	switch {
	case bytes.EqualFold(name, []byte("content-length")):
		n, err := strconv.ParseUint(string(value), 10, 63)
		if err != nil {
			return statusError{400, "malformed Content-Length"}
		}
		if n > maxBodyBytes {
			return statusError{413, "body too large"}
		}
		hd.length = int64(n)
	case bytes.EqualFold(name, []byte("transfer-encoding")):
		if !bytes.EqualFold(value, []byte("chunked")) {
			return statusError{501, "unknown Transfer-Encoding"}
		}
		hd.chunked = true
	case bytes.EqualFold(name, []byte("connection")):
		if bytes.EqualFold(value, []byte("close")) {
			hd.close = true
		}
	case bytes.EqualFold(name, []byte("expect")):
		hd.expect = true
	}
	return nil
}

// readLine returns one line without its end; it aliases the reader's buffer.
func readLine(br *bufio.Reader) ([]byte, error) {
	line, err := br.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, statusError{431, "header line too long"}
	}
	if err != nil {
		return nil, err
	}
	line = line[:len(line)-1]
	if n := len(line); n > 0 && line[n-1] == '\r' {
		line = line[:n-1]
	}
	return line, nil
}

// readBody appends the whole body to b.
func (h *handler) readBody(hd head, b []byte) ([]byte, error) {
	if hd.expect {
		if _, err := io.WriteString(h.c, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return b, err
		}
	}
	if !hd.chunked {
		return readN(h.br, b, max(hd.length, 0))
	}
	for {
		line, err := readLine(h.br)
		if err != nil {
			return b, err
		}
		size, _, _ := bytes.Cut(line, []byte(";"))
		n, err := strconv.ParseUint(string(bytes.TrimSpace(size)), 16, 63)
		if err != nil {
			return b, statusError{400, "malformed chunk size"}
		}
		if n > maxBodyBytes-uint64(len(b)) {
			return b, statusError{413, "body too large"}
		}
		if n == 0 {
			return b, skipTrailer(h.br)
		}
		if b, err = readN(h.br, b, int64(n)); err != nil {
			return b, err
		}
		if line, err = readLine(h.br); err != nil || len(line) != 0 {
			return b, statusError{400, "malformed chunk"}
		}
	}
}

func skipTrailer(br *bufio.Reader) error {
	for size := 0; size <= maxHeaderBytes; {
		line, err := readLine(br)
		if err != nil || len(line) == 0 {
			return err
		}
		size += len(line)
	}
	return statusError{431, "trailer too large"}
}

func readN(br *bufio.Reader, b []byte, n int64) ([]byte, error) {
	at := len(b)
	if need := at + int(n); need > cap(b) {
		b = append(make([]byte, 0, need), b...)
	}
	b = b[:at+int(n)]
	_, err := io.ReadFull(br, b[at:])
	return b, err
}

var reasons = map[int]string{
	200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large", 429: "Too Many Requests",
	431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented",
}

// answer writes a whole JSON response in one write. Extra header lines end
// with CRLF each.
func (h *handler) answer(status int, extra string, body []byte) error {
	buf := h.s.buffer()
	defer h.s.release(buf)
	*buf = appendResponse(*buf, status, extra, body)
	return h.write(*buf)
}

func appendResponse(b []byte, status int, extra string, body []byte) []byte {
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	b = append(b, reasons[status]...)
	b = append(b, "\r\nContent-Type: application/json\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(len(body)), 10)
	b = append(b, "\r\n"...)
	b = append(b, extra...)
	b = append(b, "\r\n"...)
	return append(b, body...)
}

func (h *handler) write(b []byte) error {
	_ = h.c.SetWriteDeadline(h.s.clock.Now().Add(writeTimeout))
	_, err := h.c.Write(b)
	return err
}

// errorBody is an error in OpenAI's form.
func errorBody(text, kind string) []byte {
	b, _ := json.Marshal(map[string]any{"error": map[string]any{"message": text, "type": kind, "code": kind}}) // strings always marshal
	return b
}

// printable keeps a hostile path short.
func printable(s string) string {
	if len(s) > 100 {
		s = s[:100] + "…"
	}
	return strconv.QuoteToASCII(s)
}
