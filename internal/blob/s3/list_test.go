package s3

import (
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

// lister answers each list with the next of pages.
func lister(t *testing.T, pages ...string) (*Store, *[]string) {
	var queries []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page := pages[min(len(queries), len(pages)-1)]
		queries = append(queries, r.URL.RawQuery)
		_, _ = fmt.Fprintf(w, `<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</ListBucketResult>`, page)
	}))
	t.Cleanup(server.Close)
	world := env.Real()
	s, err := Open(Config{
		Bucket: "bucket", Prefix: "one", Endpoint: server.URL, PathStyle: true, Credentials: Credentials{AccessKey: "a", SecretKey: "b"},
		Dialer: world.Dialer, Clock: world.Clock, Rand: world.Rand,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s, &queries
}

func contents(keys ...string) string {
	var b strings.Builder
	for _, k := range keys {
		_, _ = fmt.Fprintf(&b, "<Contents><Key>%s</Key><Size>7</Size></Contents>", k)
	}
	return b.String()
}

func more(token string) string {
	return "<IsTruncated>true</IsTruncated><NextContinuationToken>" + token + "</NextContinuationToken>"
}

// TestListGoesOnOverShortPages: a page may hold less than was asked for, none,
// what is no key of ours, or what was to be left out.
func TestListGoesOnOverShortPages(t *testing.T) {
	s, queries := lister(t,
		contents("one/", "one/a")+more("t1"),
		more("t+2"),
		"<EncodingType>url</EncodingType>"+contents("one/a/", "one/a%2Bb", "one/b+c", "one/d%C3%A9", "one/e%0A")+more("t3"),
		contents("one/f", "one/g"),
	)
	infos, err := s.List(t.Context(), "", "A", 5)
	if err != nil {
		t.Fatal(err)
	}
	want := []blob.Info{{Key: "a", Size: 7}, {Key: "a+b", Size: 7}, {Key: "f", Size: 7}, {Key: "g", Size: 7}}
	if !slices.Equal(infos, want) {
		t.Errorf("%v", infos)
	}
	if q := *queries; len(q) != 4 || !strings.Contains(q[0], "start-after=one%2FA") || !strings.Contains(q[2], "continuation-token=t%2B2") {
		t.Errorf("%q", q)
	}
	if n := s.Stats()[blob.KindList].Requests(); n != 4 {
		t.Errorf("%d requests counted", n)
	}
}

func TestListRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		page string
		want error
	}{
		"disorder":      {contents("one/b", "one/a"), blob.ErrUnfit},
		"twice":         {contents("one/a", "one/a"), blob.ErrUnfit},
		"no end":        {more("t"), blob.ErrUnavailable},
		"no token":      {"<IsTruncated>true</IsTruncated>", blob.ErrUnavailable},
		"bad escape":    {"<EncodingType>url</EncodingType>" + contents("one/%zz"), blob.ErrUnavailable},
		"broken page":   {"<Contents>", blob.ErrUnavailable},
		"broken number": {"<Contents><Key>one/a</Key><Size>many</Size></Contents>", blob.ErrUnavailable},
	} {
		s, queries := lister(t, c.page)
		if _, err := s.List(t.Context(), "", "", 10); !errors.Is(err, c.want) || len(*queries) > maxPages {
			t.Errorf("%s: %v after %d pages", name, err, len(*queries))
		}
	}
}

func FuzzReadPage(f *testing.F) {
	f.Add([]byte(`<ListBucketResult><EncodingType>url</EncodingType>` + contents("a%2Bb", "c") + more("t") + `</ListBucketResult>`))
	f.Add([]byte(`<ListBucketResult/>`))
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := readPage(body)
		if err != nil {
			return
		}
		again, err := xml.Marshal(page{Contents: p.Contents, IsTruncated: p.IsTruncated, NextContinuationToken: p.NextContinuationToken})
		if err != nil {
			t.Fatal(err)
		}
		q, err := readPage(again)
		if err != nil || len(q.Contents) != len(p.Contents) || q.IsTruncated != p.IsTruncated {
			t.Fatalf("%v: %+v, then %+v", err, p, q)
		}
	})
}

// FuzzReadRefusal: whatever answers there, errors stay of one line and short.
func FuzzReadRefusal(f *testing.F) {
	f.Add(503, "", []byte(`<Error><Code>SlowDown</Code><Message>slower</Message></Error>`))
	f.Add(400, "eu-west-1", []byte(`<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu</Region></Error>`))
	f.Add(404, "", []byte(`<html>nothing here</html>`))
	s := &Store{name: "s3://bucket"}
	f.Fuzz(func(t *testing.T, status int, region string, body []byte) {
		r := readRefusal(status, http.Header{"X-Amz-Bucket-Region": {region}}, body)
		for _, kind := range []blob.Kind{blob.KindGet, blob.KindPut} {
			err := s.failure(&call{kind: kind, key: "k"}, r)
			if blob.ResultOf(err) == blob.ResultOther {
				t.Fatalf("%v is of no kind", err)
			}
			if text := err.Error(); len(text) > 1000 || strings.ContainsAny(text, "\n\r\x1b\x00") {
				t.Fatalf("%q", text)
			}
		}
	})
}
