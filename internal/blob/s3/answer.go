package s3

import (
	"encoding/xml"
	"fmt"
	"net/http"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
)

// maxMessage is how much of a store's own words an error repeats.
const maxMessage = 200

// refusal is an answer that is no success.
type refusal struct {
	status  int
	code    string // S3's error code, "" if the answer has none: then it may not be the store's
	message string
	region  string // of the bucket, if the answer says so
}

// readRefusal takes S3's error out of an answer. What is not of its form is
// left out: it may be the page of a proxy, of any size.
func readRefusal(status int, header http.Header, body []byte) refusal {
	var e struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
		Message string
		Region  string
	}
	r := refusal{status: status, region: header.Get("X-Amz-Bucket-Region")}
	if xml.Unmarshal(body, &e) == nil {
		r.code, r.message = strings.TrimSpace(e.Code), clip(e.Message)
		if r.region == "" {
			r.region = e.Region
		}
	}
	if !regionName.MatchString(r.region) {
		r.region = ""
	}
	if !errorCode(r.code) {
		r.code = ""
	}
	return r
}

// errorCode says whether code has the form of one: a word.
func errorCode(code string) bool {
	for i := range len(code) {
		c := code[i]
		if letter := c|0x20 >= 'a' && c|0x20 <= 'z'; !letter && (c < '0' || c > '9') && c != '.' && c != '_' {
			return false
		}
	}
	return code != "" && len(code) <= 64
}

// clip makes foreign text fit for one line of a log.
func clip(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return ' '
		}
		return r
	}, s)
	if len(s) > maxMessage {
		s = s[:maxMessage] + "…"
	}
	return strings.ToValidUTF8(s, "")
}

func (r refusal) String() string {
	s := fmt.Sprintf("status %d", r.status)
	if r.code == "" {
		return s + " without an S3 error: is it an S3 store that answers there?"
	}
	if s += " " + r.code; r.message != "" {
		s += ": " + r.message
	}
	return s
}

// The codes by which the store says that it has done nothing and will do it
// later.
var notNow = map[string]bool{
	"SlowDown": true, "SlowDownRead": true, "SlowDownWrite": true, "ServiceUnavailable": true,
	"TooManyRequests": true, "Throttling": true, "ThrottlingException": true, "RequestThrottled": true,
	"RequestLimitExceeded": true, "BandwidthLimitExceeded": true, "TemporaryRedirect": true,
}

// The codes by which the store says that what it got was not what was sent: it
// keeps nothing of it.
var garbled = map[string]bool{
	"BadDigest": true, "IncompleteBody": true, "XAmzContentSHA256Mismatch": true, "XAmzContentChecksumMismatch": true,
}

// The codes of credentials that were good before.
var expired = map[string]bool{"ExpiredToken": true, "ExpiredTokenException": true, "TokenRefreshRequired": true}

// missing: the store says that there is no such object.
func (r refusal) missing() bool { return r.status == http.StatusNotFound && r.code == "NoSuchKey" }

// sentinel is the error of package blob that the refusal of a request stands
// for. Only what the store itself says counts: an answer without S3's code may
// come from anything on the way, before or after the store did the request.
func (r refusal) sentinel(c *call) error {
	unknown := blob.ErrUnavailable
	if c.write() {
		unknown = blob.ErrAmbiguous
	}
	switch {
	case r.status == http.StatusPreconditionFailed && c.conditional():
		return blob.ErrPrecondition
	case r.missing() && c.kind == blob.KindGet:
		return blob.ErrNotFound
	case r.missing() && c.ifMatch != "":
		return blob.ErrPrecondition
	case r.status == http.StatusTooManyRequests, notNow[r.code], garbled[r.code], expired[r.code]:
		return blob.ErrUnavailable
	case r.status == http.StatusUnauthorized, r.status == http.StatusForbidden, r.status == http.StatusNotImplemented && r.code != "":
		return blob.ErrDenied
	case r.status == http.StatusConflict, r.missing() && c.ifNoneMatch:
		return unknown // a write or delete at the same time; the outcome shows by writing again
	case r.status == http.StatusRequestTimeout, r.code == "RequestTimeout":
		return unknown
	case r.code != "" && r.status >= 300 && r.status < 500:
		return blob.ErrDenied
	default:
		return unknown
	}
}

// advice says what to do about a refusal, "" if there is nothing to do.
func (r refusal) advice(c *Config) string {
	switch r.code {
	case "AccessDenied", "AllAccessDisabled", "AccountProblem":
		return fmt.Sprintf("allow these credentials s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, s3:DeleteObject on its objects below %q", c.Prefix)
	case "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "NotSignedUp":
		return "check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE) and the region"
	case "RequestTimeTooSkewed":
		return "set this machine's clock, for instance by NTP"
	case "NoSuchBucket":
		return "create the bucket, or correct its name; Perdure makes none"
	case "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidRegion":
		if r.region != "" && r.region != c.Region {
			return fmt.Sprintf("set region=%s, this is set up for %s", r.region, c.Region)
		}
		return fmt.Sprintf("check region (%s) and endpoint", c.Region)
	case "NotImplemented":
		return "this store cannot do what Perdure needs; use another one"
	}
	switch {
	case r.status == http.StatusUnauthorized, r.status == http.StatusForbidden:
		return "check credentials and rights"
	case r.status >= 300 && r.status < 400:
		return "check region and endpoint"
	}
	return ""
}

// failure is the error for an answer that is no success.
func (s *Store) failure(c *call, r refusal) error {
	err := fmt.Errorf("%w: %s: %s", r.sentinel(c), s.what(c), r)
	if advice := r.advice(&s.cfg); advice != "" {
		err = fmt.Errorf("%w; %s", err, advice)
	}
	return err
}
