package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// counters are what is read from a server's metrics. One that it does not have
// is below zero.
type counters struct {
	batches, bytes, puts, gets, lists, sent float64
	cpuSeconds, rss                         float64
}

// wanted are the names, without the namespace, which can be set.
func (c *counters) wanted() map[string]*float64 {
	return map[string]*float64{
		"journal_batches_total":         &c.batches,
		"journal_bytes_total":           &c.bytes,
		"store_puts_total":              &c.puts,
		"store_gets_total":              &c.gets,
		"store_lists_total":             &c.lists,
		"store_written_bytes_total":     &c.sent,
		"process_cpu_seconds_total":     &c.cpuSeconds,
		"process_resident_memory_bytes": &c.rss,
	}
}

const (
	scrapeTimeout = 5 * time.Second
	maxScrape     = 8 << 20
)

// scrape reads the metrics of the server at address.
func scrape(ctx context.Context, address, key string) (counters, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return parseMetrics(strings.NewReader("")), err
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return parseMetrics(strings.NewReader("")), err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return parseMetrics(strings.NewReader("")), fmt.Errorf("GET /metrics: %s", res.Status)
	}
	return parseMetrics(io.LimitReader(res.Body, maxScrape)), nil
}

// parseMetrics adds up the samples of each wanted name over its labels.
func parseMetrics(in io.Reader) counters {
	c := counters{-1, -1, -1, -1, -1, -1, -1, -1}
	wanted := c.wanted()
	sc := bufio.NewScanner(in)
	for sc.Scan() {
		line := sc.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		end := strings.IndexAny(line, "{ ")
		if end < 0 {
			continue
		}
		to := lookup(wanted, line[:end])
		if to == nil {
			continue
		}
		rest := line[end:]
		if i := strings.LastIndexByte(rest, '}'); i >= 0 {
			rest = rest[i+1:]
		}
		f := strings.Fields(rest)
		if len(f) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(f[0], 64); err == nil {
			*to = max(*to, 0) + v
		}
	}
	return c
}

// lookup finds a name with or without a namespace before it.
func lookup(wanted map[string]*float64, name string) *float64 {
	if to := wanted[name]; to != nil {
		return to
	}
	_, rest, ok := strings.Cut(name, "_")
	if !ok {
		return nil
	}
	return wanted[rest]
}

// since gives b minus a, or below zero when either is missing.
func since(a, b float64) float64 {
	if a < 0 || b < a {
		return -1
	}
	return b - a
}
