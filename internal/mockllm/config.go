// Package mockllm is a model provider that costs almost nothing: an
// OpenAI-compatible server that answers a fixed text at a fixed pace. Load
// tests run it beside the server under test on the same cores, so it speaks
// its own small HTTP/1.1 and keeps no goroutine busy while a reply waits.
//
// The package stands outside the engine: it talks to the network itself and
// takes only the clock from the seam.
package mockllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Limits of one mock. A request beyond them is refused with a 4xx, a
// connection beyond them is closed at once.
const (
	maxHeaderBytes = 64 << 10
	maxBodyBytes   = 16 << 20
	maxTokens      = 1 << 20
	maxConns       = 16384
	writeTimeout   = 30 * time.Second
)

// Fault is a kind of injected error.
type Fault string

// The kinds of faults.
const (
	// Fault500 answers 500 at once.
	Fault500 Fault = "500"
	// Fault429 answers 429 at once, with Retry-After.
	Fault429 Fault = "429"
	// FaultReset resets the connection in the middle of the reply.
	FaultReset Fault = "reset"
	// FaultEOF ends the stream early but cleanly, without [DONE].
	FaultEOF Fault = "eof"
	// FaultStall falls silent in the middle of the reply until the peer goes.
	FaultStall Fault = "stall"
)

var allFaults = []Fault{Fault500, Fault429, FaultReset, FaultEOF, FaultStall}

// Config says how the mock answers. The zero value answers an empty text at
// once; DefaultConfig is the pace of the published load tests.
type Config struct {
	// TTFT is the time from a request's first byte to the first token.
	TTFT time.Duration
	// TPS is the pace of the tokens after the first, in tokens a second; 0
	// sends all of them with the first.
	TPS float64
	// Tokens is the length of a reply, at most 1,048,576.
	Tokens int
	// ErrorRate is the share of requests that fail, 0 to 1.
	ErrorRate float64
	// ErrorKinds are the faults drawn from when a request fails; none means
	// 500, 429 and reset.
	ErrorKinds []Fault
	// RetryAfter goes into the header of an injected 429; 0 leaves it out.
	RetryAfter time.Duration
	// Seed decides which requests fail and how: request n fails the same way
	// in every run with the same seed.
	Seed uint64
	// Tool, when set, makes the mock call a tool if the request offers tools
	// and its last message is the user's. "*" calls the first one offered.
	Tool string
	// ToolArgs are the arguments of that call, a JSON object; "" means {}.
	ToolArgs string
}

// DefaultConfig is TTFT 2 s, 200 tokens a second, 8 tokens, no faults.
func DefaultConfig() Config {
	return Config{TTFT: 2 * time.Second, TPS: 200, Tokens: 8, RetryAfter: time.Second}
}

// ConfigFromEnv reads DefaultConfig overridden by MOCK_TTFT_MS, MOCK_TPS,
// MOCK_TOKENS, MOCK_ERROR_RATE, MOCK_ERROR_KINDS (comma-separated),
// MOCK_RETRY_AFTER_MS, MOCK_SEED, MOCK_TOOL and MOCK_TOOL_ARGS. The error
// names every variable with a bad value.
func ConfigFromEnv(getenv func(string) string) (Config, error) {
	c := DefaultConfig()
	var errs []error
	number := func(key string, max float64, set func(float64)) {
		s := getenv(key)
		if s == "" {
			return
		}
		v, err := strconv.ParseFloat(s, 64)
		if err != nil || !(v >= 0 && v <= max) {
			errs = append(errs, fmt.Errorf("%s=%q: want a number from 0 to %g", key, s, max))
			return
		}
		set(v)
	}
	millis := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
	number("MOCK_TTFT_MS", 3_600_000, func(v float64) { c.TTFT = millis(v) })
	number("MOCK_TPS", 1e9, func(v float64) { c.TPS = v })
	number("MOCK_TOKENS", maxTokens, func(v float64) { c.Tokens = int(v) })
	number("MOCK_ERROR_RATE", 1, func(v float64) { c.ErrorRate = v })
	number("MOCK_RETRY_AFTER_MS", 3_600_000, func(v float64) { c.RetryAfter = millis(v) })
	if s := getenv("MOCK_SEED"); s != "" {
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			errs = append(errs, fmt.Errorf("MOCK_SEED=%q: want a whole number from 0", s))
		}
		c.Seed = v
	}
	for _, k := range strings.FieldsFunc(getenv("MOCK_ERROR_KINDS"), func(r rune) bool { return r == ',' || r == ' ' }) {
		c.ErrorKinds = append(c.ErrorKinds, Fault(k))
	}
	c.Tool, c.ToolArgs = getenv("MOCK_TOOL"), getenv("MOCK_TOOL_ARGS")
	errs = append(errs, c.validate())
	return c, errors.Join(errs...)
}

func (c Config) validate() error {
	var errs []error
	if c.TTFT < 0 || c.TPS < 0 || c.Tokens < 0 || c.Tokens > maxTokens {
		errs = append(errs, fmt.Errorf("mock pace: TTFT %v, %g tokens/s, %d tokens: want none negative and at most %d tokens", c.TTFT, c.TPS, c.Tokens, maxTokens))
	}
	if !(c.ErrorRate >= 0 && c.ErrorRate <= 1) {
		errs = append(errs, fmt.Errorf("mock error rate %g: want 0 to 1", c.ErrorRate))
	}
	for _, k := range c.ErrorKinds {
		if !known(k) {
			errs = append(errs, fmt.Errorf("mock error kind %q: want one of %v", k, allFaults))
		}
	}
	if c.ToolArgs != "" && !json.Valid([]byte(c.ToolArgs)) {
		errs = append(errs, fmt.Errorf("mock tool arguments %q: want JSON", c.ToolArgs))
	}
	return errors.Join(errs...)
}

func known(k Fault) bool {
	for _, f := range allFaults {
		if f == k {
			return true
		}
	}
	return false
}

// fault says how request n fails, "" for not at all.
func (c *Config) fault(n uint64) Fault {
	if c.ErrorRate <= 0 {
		return ""
	}
	h := mix(c.Seed ^ mix(n))
	if float64(h>>11)/(1<<53) >= c.ErrorRate {
		return ""
	}
	kinds := c.ErrorKinds
	if len(kinds) == 0 {
		kinds = allFaults[:3]
	}
	return kinds[mix(h)%uint64(len(kinds))]
}

// mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
