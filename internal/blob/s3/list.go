package s3

import (
	"context"
	"encoding/xml"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
)

const (
	maxListBody = 8 << 20 // bytes of one page: 1,000 entries of up to 8 KB
	// maxPages bounds one List. A page may hold fewer keys than asked for, none
	// even, and keys that are not ours.
	maxPages = 100
)

// page is an answer to ListObjectsV2.
type page struct {
	XMLName  xml.Name `xml:"ListBucketResult"`
	Contents []struct {
		Key  string
		Size int64
	}
	IsTruncated           bool
	NextContinuationToken string
	EncodingType          string
}

// List implements blob.Store. Objects whose names are no keys (folders that a
// console made, say) are left out.
func (s *Store) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	if err := blob.CheckList(prefix, after, limit); err != nil {
		return nil, err
	}
	query := url.Values{
		"list-type": {"2"}, "prefix": {s.prefix + prefix}, "max-keys": {strconv.Itoa(limit)}, "encoding-type": {"url"},
	}
	if after != "" {
		query.Set("start-after", s.prefix+after)
	}
	var out []blob.Info
	c := &call{kind: blob.KindList, key: prefix, query: query, maxAnswer: maxListBody}
	for range maxPages {
		a, err := s.read(ctx, c)
		if err != nil {
			return nil, err
		}
		var p page
		if p, err = readPage(a.body); err != nil {
			return nil, fmt.Errorf("%w: %s: the answer is no list: %w", blob.ErrUnavailable, s.what(c), err)
		}
		for _, o := range p.Contents {
			key, ours := strings.CutPrefix(o.Key, s.prefix)
			if !ours || !strings.HasPrefix(key, prefix) || key <= after || blob.CheckKey(key) != nil {
				continue
			}
			if len(out) > 0 && key <= out[len(out)-1].Key {
				return nil, fmt.Errorf("%w: %s: the list is not in order: %s after %s", blob.ErrUnfit, s.what(c), key, out[len(out)-1].Key)
			}
			if out = append(out, blob.Info{Key: key, Size: o.Size}); len(out) == limit {
				return out, nil
			}
		}
		if !p.IsTruncated {
			return out, nil
		}
		if p.NextContinuationToken == "" {
			break
		}
		query.Set("continuation-token", p.NextContinuationToken)
	}
	return nil, fmt.Errorf("%w: %s: the list did not end within %d pages", blob.ErrUnavailable, s.what(c), maxPages)
}

// readPage decodes one page, the names in it too.
func readPage(body []byte) (page, error) {
	var p page
	if err := xml.Unmarshal(body, &p); err != nil {
		return page{}, err
	}
	if p.EncodingType != "url" {
		return p, nil
	}
	for i := range p.Contents {
		o := &p.Contents[i]
		key, err := url.QueryUnescape(o.Key)
		if err != nil {
			return page{}, err
		}
		o.Key = key
	}
	return p, nil
}
