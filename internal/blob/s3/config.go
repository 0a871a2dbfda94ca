package s3

import (
	"fmt"
	"log/slog"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// Bounds and defaults.
const (
	DefaultTimeout  = 10 * time.Second
	DefaultMaxConns = 256
	// MaxPrefix keeps prefix and key together within S3's 1,024 bytes.
	MaxPrefix = 256
)

// Secret is text that is never shown: it prints, logs and marshals as "[secret]".
type Secret string

const hidden = "[secret]"

// String hides the text.
func (Secret) String() string { return hidden }

// GoString hides the text.
func (Secret) GoString() string { return hidden }

// MarshalText hides the text.
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// LogValue hides the text.
func (Secret) LogValue() slog.Value { return slog.StringValue(hidden) }

// Credentials are fixed keys. The zero value stands for the usual chain: the
// environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), the
// shared files (AWS_PROFILE, ~/.aws), a web identity, the container's or the
// machine's role; those that expire are renewed in time.
type Credentials struct {
	AccessKey    Secret
	SecretKey    Secret
	SessionToken Secret // optional
}

// Config says where a store is and how to reach it. ParseURL fills the first
// five fields.
type Config struct {
	Bucket string
	// Prefix of all keys, without a slash at its ends; "" is the whole bucket.
	Prefix string
	// Endpoint is http(s)://host[:port]. http is neither private nor protected
	// against changes on the way, but for the content that is put.
	Endpoint string
	Region   string
	// PathStyle puts the bucket into the path (http://host/bucket/key) and not
	// into the host name (http://bucket.host/key).
	PathStyle bool

	// CA is certificates in PEM that the server's is checked with, besides the
	// system's; only for https.
	CA          []byte
	Credentials Credentials
	// Timeout of one request, besides the time that its object takes at
	// 1 MiB/s; 0 is DefaultTimeout. It should be well below a lease's term.
	Timeout time.Duration
	// MaxConns bounds the connections, so the requests at once; others wait
	// within their timeout. 0 is DefaultMaxConns.
	MaxConns int

	// The world; all three are needed.
	Dialer env.Dialer
	Clock  env.Clock
	Rand   env.Rand
}

// String is the address without secrets.
func (c Config) String() string {
	s := "s3://" + c.Bucket
	if c.Prefix != "" {
		s += "/" + c.Prefix
	}
	return s + " at " + c.Endpoint
}

// ParseURL reads s3://bucket/prefix?endpoint=…&region=…&path_style=true. What
// the URL leaves open comes from lookup (an environment: "" when unset):
// AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION. Without
// an endpoint it is Amazon's for the region; with another one, the region is
// us-east-1 and path_style true unless given. Errors do not repeat the URL.
func ParseURL(raw string, lookup func(name string) string) (Config, error) {
	u, err := url.Parse(raw)
	if err != nil { // its text holds the URL, maybe with keys
		return Config{}, fmt.Errorf("%w: store address is no URL, want s3://bucket/prefix?region=…", blob.ErrInvalid)
	}
	if u.User != nil {
		return Config{}, fmt.Errorf("%w: store address holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead", blob.ErrInvalid)
	}
	if u.Scheme != "s3" || u.Host == "" || u.Opaque != "" || u.Fragment != "" {
		return Config{}, fmt.Errorf("%w: store address has another form than s3://bucket/prefix?region=…", blob.ErrInvalid)
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Config{}, fmt.Errorf("%w: store address has parameters that cannot be read", blob.ErrInvalid)
	}
	c := Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	for name, values := range query {
		if len(values) != 1 {
			return Config{}, fmt.Errorf("%w: store address gives %q %d times", blob.ErrInvalid, name, len(values))
		}
		switch name {
		case "endpoint":
			c.Endpoint = values[0]
		case "region":
			c.Region = values[0]
		case "path_style":
		default:
			return Config{}, fmt.Errorf("%w: store address has the unknown parameter %q, want endpoint, region or path_style", blob.ErrInvalid, name)
		}
	}
	c.Endpoint = first(c.Endpoint, lookup("AWS_ENDPOINT_URL_S3"), lookup("AWS_ENDPOINT_URL"))
	c.Region = first(c.Region, lookup("AWS_REGION"), lookup("AWS_DEFAULT_REGION"))
	c.PathStyle = c.Endpoint != "" && !strings.Contains(c.Endpoint, ".amazonaws.com")
	if v := query.Get("path_style"); v != "" {
		if c.PathStyle, err = strconv.ParseBool(v); err != nil {
			return Config{}, fmt.Errorf("%w: store address has path_style=%q, want true or false", blob.ErrInvalid, v)
		}
	}
	return c, c.complete()
}

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

var (
	bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	regionName = regexp.MustCompile(`^[a-z0-9-]{1,64}$`)
)

// complete fills what follows from the other fields, and checks all of them.
func (c *Config) complete() error {
	if !bucketName.MatchString(c.Bucket) {
		return fmt.Errorf("%w: bucket %q is no bucket's name", blob.ErrInvalid, c.Bucket)
	}
	if strings.HasSuffix(c.Bucket, "--x-s3") {
		return fmt.Errorf("%w: bucket %q is a directory bucket, which does not list in order; use a general purpose bucket", blob.ErrInvalid, c.Bucket)
	}
	if c.Prefix != "" {
		if err := blob.CheckKey(c.Prefix); err != nil || len(c.Prefix) > MaxPrefix {
			return fmt.Errorf("%w: prefix %q of the bucket: want up to %d of A-Z a-z 0-9 . _ - = + @ and single slashes", blob.ErrInvalid, c.Prefix, MaxPrefix)
		}
	}
	if c.Region == "" && c.Endpoint == "" {
		return fmt.Errorf("%w: the region of bucket %s is not set: give region=… in the address, or AWS_REGION; for another store than Amazon's, endpoint=…", blob.ErrInvalid, c.Bucket)
	}
	c.Region = first(c.Region, "us-east-1")
	if !regionName.MatchString(c.Region) {
		return fmt.Errorf("%w: region %q is no region's name", blob.ErrInvalid, c.Region)
	}
	if c.Endpoint == "" {
		c.Endpoint = "https://s3." + c.Region + ".amazonaws.com"
		if strings.HasPrefix(c.Region, "cn-") {
			c.Endpoint += ".cn"
		}
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("%w: endpoint of bucket %s: want http(s)://host or http(s)://host:port and no more", blob.ErrInvalid, c.Bucket)
	}
	c.Endpoint = u.Scheme + "://" + u.Host
	// A certificate for *.host does not hold for a bucket's name with dots.
	c.PathStyle = c.PathStyle || (u.Scheme == "https" && strings.Contains(c.Bucket, "."))
	return nil
}
