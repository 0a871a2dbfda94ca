package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/perdure-dev/perdure/internal/session"
)

// call is one request and its answer. It is the only thing that is made per
// request besides what net/http makes, and belongs to the request's goroutine.
type call struct {
	api    *API
	w      http.ResponseWriter
	r      *http.Request
	rc     *http.ResponseController
	route  *route
	params [maxParams]string
	method string
	remote string // address of the client's end
	id     string
	tenant string
	start  time.Time
	query  map[string]string // only of routes that check it; nil when there is none

	deadline time.Time // of a stream's writes, as the connection has it

	status  int // 0: nothing was sent
	bytes   int64
	first   time.Time // first byte of the answer
	session string
	turn    string
	closed  string // see AccessRecord.Closed
}

func (c *call) pattern() string {
	if c.route == nil {
		return ""
	}
	return c.route.pattern
}

func (c *call) record() AccessRecord {
	rec := AccessRecord{
		At: c.start, RequestID: c.id, Tenant: c.tenant, Method: c.method, Route: c.pattern(), Status: c.status, Bytes: c.bytes,
		Duration: c.api.cfg.Clock.Now().Sub(c.start), Session: c.session, Turn: c.turn, Remote: c.remote, Closed: c.closed,
	}
	if !c.first.IsZero() {
		rec.TTFB = c.first.Sub(c.start)
	}
	return rec
}

// moveTo lets the call go on without its request.
func (c *call) moveTo(w http.ResponseWriter) {
	c.w, c.rc, c.r, c.query = w, http.NewResponseController(w), nil, nil
	c.deadline = time.Time{} // net/http has cleared it
}

// Header, Write, WriteHeader and Unwrap make a call the ResponseWriter that
// other handlers (of metrics) get.
func (c *call) Header() http.Header { return c.w.Header() }

func (c *call) WriteHeader(status int) {
	if c.status == 0 {
		c.status = status
	}
	c.w.WriteHeader(status)
}

func (c *call) Write(b []byte) (int, error) {
	if c.status == 0 {
		c.status = http.StatusOK
	}
	if c.first.IsZero() {
		c.first = c.api.cfg.Clock.Now()
	}
	n, err := c.w.Write(b)
	c.bytes += int64(n)
	return n, err
}

func (c *call) Unwrap() http.ResponseWriter { return c.w }

var (
	typeJSON = []string{"application/json"}
	typeSSE  = []string{"text/event-stream"}
	noStore  = []string{"no-store"}
	noCache  = []string{"no-cache"}
	no       = []string{"no"}
)

// buffers holds the memory in which answers are written, for a moment each.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 2<<10); return &b }}

// maxKeptBuffer bounds the buffers that are kept.
const maxKeptBuffer = 64 << 10

func getBuffer() *[]byte { return buffers.Get().(*[]byte) }

func putBuffer(p *[]byte, used []byte) {
	if cap(used) <= maxKeptBuffer {
		*p = used[:0]
		buffers.Put(p)
	}
}

// send writes a whole JSON answer.
func (c *call) send(status int, body []byte) error {
	h := c.w.Header()
	h["Content-Type"] = typeJSON
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	if h["Cache-Control"] == nil {
		h["Cache-Control"] = noStore
	}
	_ = c.rc.SetWriteDeadline(c.api.cfg.Clock.Now().Add(c.api.cfg.Limits.StreamStall))
	c.WriteHeader(status)
	_, _ = c.Write(body) // an error means that the client is gone; there is no one to tell
	return nil
}

// reply writes v as JSON.
func (c *call) reply(status int, v any) error {
	p := getBuffer()
	buf := bytes.NewBuffer(*p)
	enc := json.NewEncoder(buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	err := c.send(status, buf.Bytes())
	putBuffer(p, buf.Bytes())
	return err
}

// refuse answers with an error, in the form of the route.
func (c *call) refuse(err error) {
	ref, ok := refusalOf(err)
	if !ok {
		c.api.cfg.Logger.Error("request failed", "request_id", c.id, "route", c.pattern(), "error", err)
		ref = internalError(c.id)
	}
	if c.status != 0 { // the answer has begun; a stream tells its errors itself
		return
	}
	if ref.status == statusClientGone {
		c.status, c.closed = ref.status, ref.code
		return
	}
	if ref.retry > 0 {
		c.w.Header()["Retry-After"] = []string{retryAfter(ref.retry)}
	}
	p := getBuffer()
	var b []byte
	if c.route != nil && c.route.flags&openAI != 0 {
		b = ref.appendOpenAI(*p)
	} else {
		b = ref.appendNative(*p)
	}
	_ = c.send(ref.status, b)
	putBuffer(p, b)
}

var errBodyTimeout = &refusal{status: http.StatusRequestTimeout, code: "body_timeout", message: "the body did not arrive in time",
	hint: "the bound is limits.read_body_timeout of the server's config"}

// body reads the request's body, which must be JSON; nil when it is empty and
// may be. The caller owns it: it is not shared with another request.
func (c *call) body(optional bool) ([]byte, error) {
	bound := int64(c.api.cfg.Limits.MaxBodyBytes)
	size := c.r.ContentLength
	if size > bound {
		c.w.Header()["Connection"] = []string{"close"}
		return nil, tooLarge("the body", bound, "limits.max_body_bytes")
	}
	if size == 0 {
		if optional {
			return nil, nil
		}
		return nil, invalidJSON("the body is empty; send a JSON object")
	}
	if err := c.wantJSON(); err != nil {
		return nil, err
	}
	b, err := readBody(c.r.Body, size, bound)
	if err == nil { // else the deadline stays, for net/http reads what is left of the body
		_ = c.rc.SetReadDeadline(time.Time{})
	}
	var ne net.Error
	switch {
	case err == nil && len(b) == 0 && optional:
		return nil, nil
	case errors.As(err, &ne) && ne.Timeout():
		c.w.Header()["Connection"] = []string{"close"}
		return nil, errBodyTimeout
	case errors.Is(err, errBodyBound):
		c.w.Header()["Connection"] = []string{"close"}
		return nil, tooLarge("the body", bound, "limits.max_body_bytes")
	case err != nil:
		return nil, errClientGone
	}
	return b, nil
}

var errBodyBound = errors.New("body over its bound")

func readBody(from io.Reader, size, bound int64) ([]byte, error) {
	if size > 0 {
		b := make([]byte, size)
		_, err := io.ReadFull(from, b)
		return b, err
	}
	b, err := io.ReadAll(io.LimitReader(from, bound+1))
	if err == nil && int64(len(b)) > bound {
		err = errBodyBound
	}
	return b, err
}

// wantJSON refuses other types. A type that forms can send is what a foreign
// web page could send without asking, so a missing type is refused too.
func (c *call) wantJSON() error {
	given := c.r.Header.Get("Content-Type")
	if given == "application/json" {
		return nil
	}
	if t, _, err := mime.ParseMediaType(given); err == nil && (t == "application/json" || strings.HasSuffix(t, "+json")) {
		return nil
	}
	return &refusal{status: http.StatusUnsupportedMediaType, code: "unsupported_media_type",
		message: fmt.Sprintf("Content-Type is %.100q", given), hint: "send Content-Type: application/json"}
}

// object reads the body as a JSON object, member by member.
func (c *call) object(optional bool, member func(name string, v value) error) error {
	b, err := c.body(optional)
	if err != nil || b == nil {
		return err
	}
	v, err := parse(b)
	if err != nil {
		return err
	}
	return v.object(member)
}

// readQuery reads the URL's query; a name that is not known is refused, since a
// misspelt one would be ignored in silence.
func (c *call) readQuery() error {
	values, err := url.ParseQuery(c.r.URL.RawQuery)
	if err != nil {
		return invalidField("query", "is not well-formed")
	}
	c.query = make(map[string]string, len(values))
	for name, v := range values {
		if !slices.Contains(c.route.query, name) {
			allowed := list(c.route.query)
			if allowed == "" {
				allowed = "none"
			}
			return invalidField(cutText(name, 64), "is not a known query parameter; allowed here: "+allowed)
		}
		if len(v) != 1 {
			return invalidField(name, "is there twice")
		}
		c.query[name] = v[0]
	}
	return nil
}

func cutText(s string, n int) string { return s[:min(n, len(s))] }

// page reads the query of a listing.
func (c *call) page() (after string, limit int, err error) {
	limit = 100
	if text := c.query["limit"]; text != "" {
		limit, err = strconv.Atoi(text)
		if err != nil || limit < 1 || limit > session.MaxPage {
			return "", 0, invalidField("limit", fmt.Sprintf("%.40q is not allowed; allowed: 1 to %d", text, session.MaxPage))
		}
	}
	return c.query["after"], limit, nil
}

// idempotencyKey reads the header of that name.
func (c *call) idempotencyKey() (string, error) {
	v := c.r.Header.Get("Idempotency-Key")
	if len(v) > maxIdempotencyKey {
		return "", invalidField("Idempotency-Key", fmt.Sprintf("has more than %d bytes", maxIdempotencyKey))
	}
	return v, nil
}

const maxIdempotencyKey = 255
