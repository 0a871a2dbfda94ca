package model

import (
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Kind says what the layer above should do about an Error.
type Kind uint8

// The kinds of errors.
const (
	// KindRetryable may pass: try again later, unless text was shown.
	KindRetryable Kind = iota + 1
	// KindPermanent comes again with the same request or configuration.
	KindPermanent
	// KindCancelled: the caller's context ended or its sink refused.
	KindCancelled
)

// String names the kind as metrics and logs do.
func (k Kind) String() string {
	switch k {
	case KindRetryable:
		return "retryable"
	case KindPermanent:
		return "permanent"
	case KindCancelled:
		return "cancelled"
	}
	return "unknown"
}

// Codes of errors: stable, fit for metric labels.
const (
	CodeCancelled      = "cancelled"           // context ended
	CodeSink           = "sink_failed"         // Sink.Delta returned an error
	CodeInvalidRequest = "invalid_request"     // refused, here or upstream
	CodeUnauthorized   = "unauthorized"        // 401, 403
	CodeNotFound       = "not_found"           // 404: base URL or model
	CodeRateLimited    = "rate_limited"        // 429
	CodeQuota          = "quota_exhausted"     // 429 that waiting does not cure
	CodeUpstream       = "upstream_error"      // 5xx, or an error inside the stream
	CodeConnect        = "connect_failed"      // no connection
	CodeTLS            = "tls_failed"          // certificate or protocol mismatch
	CodeTimeout        = "timeout"             // dial, first byte or idle
	CodeConnection     = "connection_lost"     // broken before the answer was whole
	CodeMalformed      = "malformed_response"  // not the protocol
	CodeTooLarge       = "response_too_large"  // a bound was passed
	CodeQueueFull      = "provider_queue_full" // Limiter.Acquire
)

// Error is a failed model call. No field holds an API key, even when the
// upstream echoes it.
type Error struct {
	Kind       Kind
	Status     int           // HTTP status, 0 when there was none
	RetryAfter time.Duration // the upstream's wish; 0 = none; at most 24 h
	Code       string        // one of the Code constants
	Upstream   string        // the upstream's own code or type, such as context_length_exceeded
	Message    string        // at most 600 bytes
	Hint       string        // what to do about it, may be empty

	cause error
}

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("model: ")
	b.WriteString(e.Code)
	if e.Status != 0 {
		b.WriteString(" (HTTP " + strconv.Itoa(e.Status))
		if e.Upstream != "" {
			b.WriteString(", " + e.Upstream)
		}
		b.WriteString(")")
	}
	if e.Message != "" {
		b.WriteString(": " + e.Message)
	}
	return b.String()
}

// Unwrap gives the context's or the sink's error for KindCancelled.
func (e *Error) Unwrap() error { return e.cause }

// Bounds of what an error takes over from an upstream.
const (
	maxMessage    = 600
	maxCode       = 64
	maxRetryAfter = 24 * time.Hour
)

// redactor cleans text of an upstream before it goes into an error.
type redactor struct{ key string }

const redacted = "[redacted]"

// clean removes the key and what looks like another one, makes control
// characters spaces and cuts to max bytes. Redaction comes before the cut, so
// that no half of a key remains.
func (r redactor) clean(s string, max int) string {
	if r.key != "" {
		s = strings.ReplaceAll(s, r.key, redacted)
	}
	s = redactAfter(s, "sk-", 12)
	s = redactAfter(s, "Bearer ", 8)
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(c rune) rune {
		if c < 0x20 || c == 0x7f {
			return ' '
		}
		return c
	}, s)
	s = strings.TrimSpace(s)
	if len(s) <= max {
		return s
	}
	cut := max
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

// redactAfter removes each run of at least least key characters that follows
// prefix.
func redactAfter(s, prefix string, least int) string {
	var b strings.Builder
	rest := s
	for {
		i := strings.Index(rest, prefix)
		if i < 0 {
			break
		}
		start := i + len(prefix)
		end := start
		for end < len(rest) && isKeyByte(rest[end]) {
			end++
		}
		b.WriteString(rest[:start])
		if end-start >= least {
			b.WriteString(redacted)
		} else {
			b.WriteString(rest[start:end])
		}
		rest = rest[end:]
	}
	if b.Len() == 0 {
		return s
	}
	b.WriteString(rest)
	return b.String()
}

func isKeyByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
		c == '-' || c == '_' || c == '.' || c == '*' || c == '+' || c == '/' || c == '='
}

// parseRetryAfter reads Retry-After (seconds or an HTTP date) and the
// Retry-After-Ms of some servers, which is finer and wins.
func parseRetryAfter(value, ms string, now time.Time) time.Duration {
	if n, err := strconv.ParseFloat(strings.TrimSpace(ms), 64); err == nil && n >= 0 {
		return clampRetry(n / 1e3)
	}
	value = strings.TrimSpace(value)
	if n, err := strconv.ParseFloat(value, 64); err == nil && n >= 0 {
		return clampRetry(n)
	}
	// The three date forms of RFC 9110 section 5.6.7.
	for _, layout := range []string{"Mon, 02 Jan 2006 15:04:05 GMT", "Monday, 02-Jan-06 15:04:05 GMT", time.ANSIC} {
		if t, err := time.Parse(layout, value); err == nil {
			return clampRetry(t.Sub(now).Seconds())
		}
	}
	return 0
}

func clampRetry(seconds float64) time.Duration {
	if !(seconds > 0) {
		return 0
	}
	if seconds > maxRetryAfter.Seconds() {
		return maxRetryAfter
	}
	return time.Duration(seconds * float64(time.Second))
}
