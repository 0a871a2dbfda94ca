package mux

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
)

// A connection becomes one of frames by an HTTP/1.1 upgrade, so that it can share
// an address with HTTP and gRPC, and pass what stands before a server and knows
// upgrades.
const (
	// FramesLine is how the first line of the request begins.
	FramesLine = "GET /perdure.v1.Flows/Frames "

	framesLine = FramesLine + "HTTP/1.1"
	framesName = "perdure-frames/1"
	switching  = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + framesName + "\r\n\r\n"
	maxHead    = 16 << 10 // bytes of a request or a response
)

// Refusals of an upgrade. A client that meets one goes on with gRPC.
var (
	// ErrRefused is a definite answer of another server than one of frames.
	ErrRefused = errors.New("the upgrade to frames was refused")
	// ErrForeign is a request for something else than frames.
	ErrForeign = errors.New("the request is not for frames")
)

// Ask upgrades the connection on the client's side. host names the server;
// authorization is what the header of this name says, empty = none.
func (f *Frames) Ask(host, authorization string) error {
	if !headerText(host) || !headerText(authorization) {
		return fmt.Errorf("%w: the server's name or the key cannot be in a header", ErrRefused)
	}
	var b strings.Builder
	b.WriteString(framesLine + "\r\nHost: " + host + "\r\nConnection: Upgrade\r\nUpgrade: " + framesName + "\r\n")
	if authorization != "" {
		b.WriteString("Authorization: " + authorization + "\r\n")
	}
	b.WriteString("\r\n")
	if _, err := io.WriteString(f.cfg.Conn, b.String()); err != nil {
		return err
	}
	first, headers, err := f.in.httpHead()
	if err != nil {
		return err
	}
	said := first[:min(len(first), 100)]
	switch {
	case strings.HasPrefix(first, "HTTP/1.1 101 ") && headers.has("Upgrade", framesName):
		return nil
	case strings.HasPrefix(first, "HTTP/1.1 5"): // nobody was there who could say
		return fmt.Errorf("the upgrade to frames was answered with %q", said)
	}
	return fmt.Errorf("%w: it was answered with %q", ErrRefused, said)
}

// headerText says that v can be the value of a header.
func headerText(v string) bool {
	return strings.IndexFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

// Accept upgrades the connection on the server's side, and gives what the header
// Authorization says. Another request is answered with a refusal, and ErrForeign.
func (f *Frames) Accept() (authorization string, err error) {
	first, headers, err := f.in.httpHead()
	if err != nil {
		if errors.Is(err, ErrForeign) {
			f.refuse("400 Bad Request")
		}
		return "", err
	}
	switch {
	case first != framesLine:
		f.refuse("404 Not Found")
		return "", fmt.Errorf("%w: it begins with %q", ErrForeign, first[:min(len(first), 100)])
	case !headers.has("Upgrade", framesName) || !headers.has("Connection", "upgrade"):
		f.refuse("426 Upgrade Required")
		return "", fmt.Errorf("%w: it asks for no upgrade that is known here", ErrForeign)
	case headers["transfer-encoding"] != nil || headers["content-length"] != nil && !headers.has("Content-Length", "0"):
		f.refuse("400 Bad Request")
		return "", fmt.Errorf("%w: it has a body", ErrForeign)
	}
	if given := headers["authorization"]; len(given) == 1 {
		authorization = given[0]
	}
	_, err = io.WriteString(f.cfg.Conn, switching)
	return authorization, err
}

// refuse answers a request; whether that arrives is no matter.
func (f *Frames) refuse(status string) {
	_, _ = io.WriteString(f.cfg.Conn, "HTTP/1.1 "+status+"\r\nConnection: close\r\nUpgrade: "+framesName+"\r\nContent-Length: 0\r\n\r\n")
}

// headers are values by name, in lower case.
type headers map[string][]string

// has says that a header lists v, in whatever case.
func (h headers) has(name, v string) bool {
	for _, line := range h[strings.ToLower(name)] {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(part), v) {
				return true
			}
		}
	}
	return false
}

// httpHead reads the first line and the headers of a request or response;
// ErrForeign for what is none.
func (r *reader) httpHead() (first string, h headers, err error) {
	h = headers{}
	size := 0
	for {
		line, err := r.line(maxHead - size)
		if err != nil {
			return "", nil, err
		}
		size += len(line) + 2
		switch {
		case first == "":
			if line == "" {
				return "", nil, fmt.Errorf("%w: it begins with an empty line", ErrForeign)
			}
			first = line
		case line == "":
			return first, h, nil
		default:
			name, value, ok := strings.Cut(line, ":")
			if !ok || name == "" || strings.ContainsAny(name, " \t") {
				return "", nil, fmt.Errorf("%w: a header without a name", ErrForeign)
			}
			name = strings.ToLower(name)
			h[name] = append(h[name], strings.TrimSpace(value))
		}
	}
}

// line reads one line of at most so many bytes, and gives it without its end.
func (r *reader) line(most int) (string, error) {
	looked := 0
	for {
		unread := r.buf[r.at:r.end]
		if i := bytes.IndexByte(unread[looked:], '\n'); i >= 0 {
			n := looked + i
			if n > most {
				break
			}
			r.skip(n + 1)
			return strings.TrimSuffix(string(unread[:n]), "\r"), nil
		}
		if looked = len(unread); looked > most {
			break
		}
		if err := r.more(); err != nil {
			return "", broken(err)
		}
	}
	return "", fmt.Errorf("%w: it has more than %d bytes before its end", ErrForeign, maxHead)
}
