package model

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/effect/model/http1"
)

// cancelled is the error of a call whose context has ended.
func cancelled(ctx context.Context) *Error {
	cause := context.Cause(ctx)
	msg := "the call was cancelled"
	if errors.Is(cause, context.DeadlineExceeded) {
		msg = "the caller's deadline passed"
	}
	return &Error{Kind: KindCancelled, Code: CodeCancelled, Message: msg, cause: cause}
}

// transportError classifies a failure below HTTP.
func (r redactor) transportError(err error) *Error {
	var h *http1.Error
	if !errors.As(err, &h) {
		return &Error{Kind: KindPermanent, Code: CodeMalformed, Message: r.clean(err.Error(), maxMessage)}
	}
	e := &Error{Kind: KindRetryable, Message: r.clean(h.Error(), maxMessage)}
	switch h.Failure {
	case http1.FailDial:
		e.Code = CodeConnect
		e.Hint = "check the provider's base_url and that its server runs; proxies from the environment are not used"
	case http1.FailTLS:
		e.Kind, e.Code = KindPermanent, CodeTLS
		e.Hint = "check that base_url names the right host and scheme, and the server's certificate"
	case http1.FailTimeout:
		e.Code = CodeTimeout
	case http1.FailMalformed:
		e.Kind, e.Code = KindPermanent, CodeMalformed
		e.Hint = "check that base_url names an OpenAI-compatible server"
	case http1.FailTooLarge:
		e.Kind, e.Code = KindPermanent, CodeTooLarge
	case http1.FailCancelled:
		e.Kind, e.Code = KindCancelled, CodeCancelled
	default:
		e.Code = CodeConnection
	}
	return e
}

// statusError classifies an HTTP answer that is not a success.
func (r redactor) statusError(status int, f fault, retryAfter time.Duration) *Error {
	e := &Error{
		Kind: KindPermanent, Status: status, RetryAfter: retryAfter, Code: CodeInvalidRequest,
		Upstream: r.clean(f.code, maxCode), Message: r.clean(f.message, maxMessage),
	}
	if e.Message == "" {
		e.Message = "the provider answered with status " + strconv.Itoa(status)
	}
	switch {
	case status < 400:
		e.Code, e.Message = CodeNotFound, "the provider redirects elsewhere; redirects are not followed"
		e.Hint = "set base_url to the final address (scheme and path included)"
	case status == 401 || status == 403:
		e.Code, e.Hint = CodeUnauthorized, "check the provider's API key"
	case status == 404:
		e.Code, e.Hint = CodeNotFound, "check the provider's base_url (it usually ends in /v1) and the model's name"
	case status == 429 && (f.code == "insufficient_quota" || f.code == "billing_hard_limit_reached"):
		e.Code, e.Hint = CodeQuota, "the account has no quota left: check its plan and billing"
	case status == 429:
		e.Kind, e.Code = KindRetryable, CodeRateLimited
		e.Hint = "lower the provider's concurrency_limit if this happens often"
	case status == 408 || status == 409 || status == 425:
		e.Kind, e.Code = KindRetryable, CodeUpstream
	case status == 501 || status == 505:
		e.Code = CodeUpstream
	case status >= 500:
		e.Kind, e.Code = KindRetryable, CodeUpstream
	}
	return e
}

// streamFault classifies an error that came inside a stream, or in a body of
// status 200. It has no status of its own, so the words decide; what is not
// known to be the request's fault is taken to pass.
func (r redactor) streamFault(raw []byte) *Error {
	f, ok := parseFault(raw)
	if !ok {
		f.message = string(raw)
	}
	if f.status != 0 {
		return r.statusError(f.status, f, 0)
	}
	e := &Error{
		Kind: KindRetryable, Code: CodeUpstream,
		Upstream: r.clean(f.code, maxCode), Message: r.clean(f.message, maxMessage),
	}
	switch code := strings.ToLower(f.code); {
	case strings.Contains(code, "rate_limit"):
		e.Code = CodeRateLimited
	case strings.Contains(code, "insufficient_quota"):
		e.Kind, e.Code = KindPermanent, CodeQuota
	case strings.Contains(code, "auth"), strings.Contains(code, "permission"), strings.Contains(code, "api_key"):
		e.Kind, e.Code = KindPermanent, CodeUnauthorized
	case strings.Contains(code, "invalid"), strings.Contains(code, "context_length"), strings.Contains(code, "badrequest"):
		e.Kind, e.Code = KindPermanent, CodeInvalidRequest
	}
	return e
}
