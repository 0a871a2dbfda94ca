package tool

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/internal/env"
)

// maxRetryAfter bounds what an answer may ask us to wait.
const maxRetryAfter = time.Hour

// Call is one call of a tool.
type Call struct {
	// Arguments is the JSON text the model gave.
	Arguments string
	// IdempotencyKey is the stable ID of the effect. It is the same on every
	// attempt and is sent as the Idempotency-Key header; empty sends none.
	IdempotencyKey string
}

// Result is the outcome of a call, in a form to give to the model.
type Result struct {
	// Content is valid UTF-8 without secrets: the body of a 2xx answer, or
	// what went wrong. At most max_response_bytes and 128 bytes more; an
	// error at most 8 KiB.
	Content string
	// IsError marks everything but a 2xx answer.
	IsError bool
	// Retryable marks failures that another attempt may not meet: no
	// connection could be made, or the answer was 429, 502, 503 or 504.
	Retryable bool
	// RetryAfter is how long the answer asked to wait, 0 to 1 h.
	RetryAfter time.Duration
	// Status is that of the last answer, 0 if there was none.
	Status int
	// Truncated reports that Content is not the whole body.
	Truncated bool
}

var errTimeout = errors.New("timed out")

// withTimeout is context.WithTimeoutCause on the seam's clock.
func withTimeout(ctx context.Context, clock env.Clock, d time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := clock.AfterFunc(d, func() { cancel(errTimeout) })
	return ctx, func() {
		timer.Stop()
		cancel(context.Canceled)
	}
}

// Call validates the arguments and makes the request. It returns within the
// tool's timeout, and soon after ctx ends. The request is made at least once
// for what the engine counts as one call: the transport may send it again on a
// fresh connection if a kept one turns out to be closed, with the same key.
func (t *Tool) Call(ctx context.Context, c Call) Result {
	args, err := t.arguments(c.Arguments)
	if err != nil {
		return t.failure("invalid arguments: " + err.Error())
	}
	ctx, stop := withTimeout(ctx, t.client.clock, t.timeout)
	defer stop()

	var connected atomic.Bool // whether the present hop has its connection
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { connected.Store(false) },
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) },
	})
	req, err := t.request(traced, args, c.IdempotencyKey)
	if err != nil {
		return t.failure(err.Error())
	}
	resp, err := t.http.Do(req)
	if err != nil {
		return t.transportFailure(ctx, err, connected.Load())
	}
	defer resp.Body.Close()
	return t.result(ctx, resp)
}

// request takes what it uses in the URL out of args.
func (t *Tool) request(ctx context.Context, args map[string]any, key string) (*http.Request, error) {
	u, err := t.target.url(args, t.inQuery())
	if err != nil {
		return nil, fmt.Errorf("invalid arguments: %w", err)
	}
	var body io.Reader
	if !t.inQuery() {
		// Encoded anew, so that what is sent is what was validated: a key
		// given twice, say, would be one thing to us and another to them.
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(args); err != nil {
			return nil, errors.New("invalid arguments: they have no JSON form")
		}
		body = bytes.NewReader(bytes.TrimSuffix(b.Bytes(), []byte("\n")))
	}
	req, err := http.NewRequestWithContext(ctx, t.method, u, body)
	if err != nil {
		return nil, errors.New("the arguments make no valid URL")
	}
	req.Header.Set("User-Agent", "perdure")
	req.Header.Set("Accept", "application/json, text/*;q=0.9, */*;q=0.1")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for name, values := range t.headers {
		req.Header[name] = values
	}
	if key != "" {
		if len(key) > MaxIdempotencyKeyBytes || checkHeaderValue("", key) != nil {
			return nil, fmt.Errorf("the idempotency key is not a header value of at most %d bytes", MaxIdempotencyKeyBytes)
		}
		req.Header.Set("Idempotency-Key", key)
	}
	return req, nil
}

// result reads the body and makes the answer of it.
func (t *Tool) result(ctx context.Context, resp *http.Response) Result {
	success := resp.StatusCode >= 200 && resp.StatusCode < 300
	most := t.maxResponse
	if !success {
		most = min(most, MaxErrorExcerptBytes)
	}
	// Beyond most: to see that there is more, and secrets that end there.
	raw, err := io.ReadAll(io.LimitReader(resp.Body, int64(most+t.redactor.longest+1)))
	if err != nil {
		r := t.transportFailure(ctx, fmt.Errorf("the answer broke off after %d bytes: %w", len(raw), err), true)
		r.Status = resp.StatusCode
		return r
	}
	content, truncated := t.text(raw, most, resp.Header.Get("Content-Type"))
	r := Result{Status: resp.StatusCode, Truncated: truncated}
	status := fmt.Sprintf("HTTP %d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	if success {
		if r.Content = content; content == "" {
			r.Content = strings.TrimSpace(status) + ", empty body"
		}
		return r
	}
	r.IsError = true
	r.Content = fmt.Sprintf("tool %s failed: %s: %s", t.name, strings.TrimSpace(status), content)
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		r.Retryable = true
		r.RetryAfter = retryAfter(resp.Header.Get("Retry-After"), t.client.clock.Now())
	}
	return r
}

// text is the body as the model gets it, of at most most bytes and a mark.
func (t *Tool) text(raw []byte, most int, contentType string) (content string, truncated bool) {
	truncated = len(raw) > most
	media, _, _ := mime.ParseMediaType(contentType)
	shown := t.redactor.clean(string(raw), most)
	shown, grown := shown[:min(len(shown), most)], len(shown) > most
	if truncated = truncated || grown; truncated {
		shown = trimRune(shown)
	}
	if !utf8.ValidString(shown) {
		if !strings.HasPrefix(media, "text/") {
			return fmt.Sprintf("[binary body of type %.64q, not shown]", media), false
		}
		shown = strings.ToValidUTF8(shown, "\uFFFD") // up to three times longer
		if len(shown) > most {
			shown, truncated = trimRune(shown[:most]), true
		}
	}
	if truncated {
		shown += fmt.Sprintf("\n[truncated: the body is longer than %d bytes]", most)
	}
	return shown, truncated
}

// transportFailure tells what kept an answer from coming. ctx is that of the
// call, connected whether the last request may have been sent.
func (t *Tool) transportFailure(ctx context.Context, err error, connected bool) Result {
	var refused *refusal
	var dial *dialError
	switch {
	case errors.As(err, &refused):
		return t.failure(refused.Error())
	case errors.Is(context.Cause(ctx), errTimeout):
		r := t.failure(fmt.Sprintf("timed out after %s", t.timeout))
		r.Retryable = !connected
		return r
	case ctx.Err() != nil:
		return t.failure("cancelled")
	case errors.As(err, &dial):
		r := t.failure(dial.Error())
		var dns *net.DNSError
		r.Retryable = !(errors.As(err, &dns) && dns.IsNotFound)
		return r
	}
	return t.failure(withoutURL(err).Error())
}

// failure makes an error result of a message that may quote the world.
func (t *Tool) failure(message string) Result {
	message = strings.ToValidUTF8(t.redactor.clean(message, len(message)), "\uFFFD")
	return Result{IsError: true, Content: fmt.Sprintf("tool %s failed: %s", t.name, cut(message, MaxErrorExcerptBytes))}
}

// retryAfter reads a Retry-After header: seconds or a date.
func retryAfter(v string, now time.Time) time.Duration {
	if v == "" {
		return 0
	}
	var d time.Duration
	if secs, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64); err == nil {
		d = time.Duration(min(max(secs, 0), int64(maxRetryAfter/time.Second))) * time.Second
	} else if at, err := http.ParseTime(v); err == nil {
		d = at.Sub(now)
	}
	return min(max(d, 0), maxRetryAfter)
}
