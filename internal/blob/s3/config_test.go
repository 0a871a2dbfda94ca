package s3_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/s3"
)

func environment(vars map[string]string) func(string) string {
	return func(name string) string { return vars[name] }
}

func TestParseURL(t *testing.T) {
	for _, c := range []struct {
		url  string
		vars map[string]string
		want s3.Config
	}{
		{"s3://bucket?region=eu-west-1", nil, s3.Config{Bucket: "bucket", Endpoint: "https://s3.eu-west-1.amazonaws.com", Region: "eu-west-1"}},
		{"s3://bucket/", map[string]string{"AWS_REGION": "cn-north-1"}, s3.Config{Bucket: "bucket", Endpoint: "https://s3.cn-north-1.amazonaws.com.cn", Region: "cn-north-1"}},
		{"s3://bucket", map[string]string{"AWS_DEFAULT_REGION": "us-west-2"}, s3.Config{Bucket: "bucket", Endpoint: "https://s3.us-west-2.amazonaws.com", Region: "us-west-2"}},
		{"s3://bucket?region=a-1", map[string]string{"AWS_REGION": "b-2", "AWS_DEFAULT_REGION": "c-3"}, s3.Config{Bucket: "bucket", Endpoint: "https://s3.a-1.amazonaws.com", Region: "a-1"}},
		{"s3://dotted.bucket?region=a-1", nil, s3.Config{Bucket: "dotted.bucket", Endpoint: "https://s3.a-1.amazonaws.com", Region: "a-1", PathStyle: true}},
		{"s3://bucket/clusters/one/?endpoint=http://127.0.0.1:9900", nil, s3.Config{Bucket: "bucket", Prefix: "clusters/one", Endpoint: "http://127.0.0.1:9900", Region: "us-east-1", PathStyle: true}},
		{"s3://bucket/p?endpoint=https%3A%2F%2Fhost%2F&path_style=false&region=x", nil, s3.Config{Bucket: "bucket", Prefix: "p", Endpoint: "https://host", Region: "x"}},
		{"s3://bucket?path_style=1", map[string]string{"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, s3.Config{Bucket: "bucket", Endpoint: "http://b", Region: "us-east-1", PathStyle: true}},
		{"s3://bucket", map[string]string{"AWS_ENDPOINT_URL": "http://a"}, s3.Config{Bucket: "bucket", Endpoint: "http://a", Region: "us-east-1", PathStyle: true}},
		{"s3://bucket?endpoint=https://s3.dualstack.eu-west-1.amazonaws.com&region=eu-west-1", nil, s3.Config{Bucket: "bucket", Endpoint: "https://s3.dualstack.eu-west-1.amazonaws.com", Region: "eu-west-1"}},
	} {
		got, err := s3.ParseURL(c.url, environment(c.vars))
		if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) || got.PathStyle != c.want.PathStyle || got.Region != c.want.Region {
			t.Errorf("%s: %v, path style %v, region %s, %v", c.url, got, got.PathStyle, got.Region, err)
		}
	}
}

func TestParseURLRefuses(t *testing.T) {
	for raw, want := range map[string]string{
		"":                                     "form",
		"http://bucket":                        "form",
		"s3:bucket":                            "form",
		"s3:///prefix":                         "form",
		"s3://bucket#x":                        "form",
		"s3://bucket\x7f":                      "no URL",
		"s3://key:hushhush@bucket?region=r":    "AWS_ACCESS_KEY_ID",
		"s3://key:hushhush@bucket%zz?region=r": "no URL",
		"s3://bucket":                          "region",
		"s3://bucket?region=a%20b":             "region",
		"s3://bucket?region=r&secret=hushhush": `unknown parameter "secret"`,
		"s3://bucket?region=r&region=r":        "2 times",
		"s3://bucket?region=r;x":               "parameters",
		"s3://bucket?region=r&path_style=yes":  "path_style",
		"s3://Bucket?region=r":                 "bucket",
		"s3://b?region=r":                      "bucket",
		"s3://fast--use1-az4--x-s3?region=r":   "directory bucket",
		"s3://bucket/a//b?region=r":            "prefix",
		"s3://bucket/a%20b?region=r":           "prefix",
		"s3://bucket/" + strings.Repeat("a/", 150) + "b?region=r": "prefix",
		"s3://bucket?endpoint=ftp://host":                         "endpoint",
		"s3://bucket?endpoint=host:9000":                          "endpoint",
		"s3://bucket?endpoint=http://u:hushhush@host":             "endpoint",
		"s3://bucket?endpoint=http://host/path":                   "endpoint",
		"s3://bucket?endpoint=http://host?x=hushhush":             "endpoint",
	} {
		_, err := s3.ParseURL(raw, environment(nil))
		if !errors.Is(err, blob.ErrInvalid) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hushhush") {
			t.Errorf("%q: %v, want %q", raw, err, want)
		}
	}
}

func FuzzParseURL(f *testing.F) {
	f.Add("s3://bucket/prefix?endpoint=http://127.0.0.1:9900&region=r&path_style=true", "")
	f.Add("s3://bucket", "eu-west-1")
	f.Fuzz(func(t *testing.T, raw, region string) {
		c, err := s3.ParseURL(raw, environment(map[string]string{"AWS_REGION": region}))
		if err != nil {
			if !errors.Is(err, blob.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		if c.Prefix != "" && blob.CheckKey(c.Prefix) != nil {
			t.Fatalf("prefix %q", c.Prefix)
		}
		if _, err := s3.Open(with(config("", ""), func(o *s3.Config) {
			o.Bucket, o.Prefix, o.Endpoint, o.Region, o.PathStyle = c.Bucket, c.Prefix, c.Endpoint, c.Region, c.PathStyle
		})); err != nil {
			t.Fatalf("%v of a parsed address: %v", c, err)
		}
	})
}

func TestSecretsAreNotShown(t *testing.T) {
	c := with(config("http://host", "one"), func(c *s3.Config) {
		c.Credentials = s3.Credentials{AccessKey: "THEKEY", SecretKey: "THESECRET", SessionToken: "THETOKEN"}
	})
	text, err := json.Marshal(c.Credentials)
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "config", c, "credentials", c.Credentials, "key", c.Credentials.SecretKey)
	s := open(t, c)
	for _, shown := range []string{
		string(text), log.String(), c.String(), s.String(),
		fmt.Sprint(c), fmt.Sprintf("%+v", c), fmt.Sprintf("%#v", c.Credentials), fmt.Sprintf("%q %s %x", c.Credentials, c.Credentials, c.Credentials),
	} {
		if strings.Contains(shown, "THE") || strings.Contains(shown, "544845") {
			t.Errorf("shown: %s", shown)
		}
	}
	if s.String() != "s3://perdure-test/one at http://host" {
		t.Error(s)
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, change := range map[string]func(*s3.Config){
		"no bucket":   func(c *s3.Config) { c.Bucket = "" },
		"half a key":  func(c *s3.Config) { c.Credentials.SecretKey = "" },
		"no region":   func(c *s3.Config) { c.Region, c.Endpoint = "", "" },
		"bad prefix":  func(c *s3.Config) { c.Prefix = "/a" },
		"bad address": func(c *s3.Config) { c.Endpoint = "host" },
	} {
		if _, err := s3.Open(with(config("http://host", ""), change)); !errors.Is(err, blob.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
