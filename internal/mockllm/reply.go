package mockllm

import (
	"strconv"
	"time"
)

// words is the text of a reply, one token each, over and over.
var words = [...]string{"Durable ", "turns ", "stream ", "one ", "token ", "at ", "a ", "time "}

// reply renders the frames of one answer. Frame i of n = len() is due at
// due(i); the last carries the finish reason, the usage and the end.
type reply struct {
	cfg       *Config
	n         uint64 // number of the request, makes ids unique
	created   int64  // Unix seconds
	model     string // JSON-escaped
	tool      string // JSON-escaped; "" = answer with text
	usage     bool
	bodyBytes int
}

// frames is how many due frames the reply has: its tokens and the end.
func (r *reply) frames() int { return r.tokens() + 1 }

func (r *reply) tokens() int {
	if r.tool != "" {
		return 1
	}
	return r.cfg.Tokens
}

// due is the offset of frame i from the request's arrival. The schedule is
// absolute, so lateness of one frame never moves the next.
func (r *reply) due(i int) time.Duration {
	if r.cfg.TPS <= 0 {
		return r.cfg.TTFT
	}
	return r.cfg.TTFT + time.Duration(float64(i)/r.cfg.TPS*float64(time.Second))
}

// appendFrame appends the SSE events of frame i.
func (r *reply) appendFrame(b []byte, i int) []byte {
	if i == 0 {
		b = r.appendChunk(b, `{"role":"assistant","content":""}`, "")
	}
	if i < r.tokens() {
		if r.tool != "" {
			b = append(r.appendHead(b), `{"tool_calls":[`...)
			b = append(r.appendCall(b, true), `]},"finish_reason":null}]}`+"\n\n"...)
			return b
		}
		b = append(r.appendHead(b), `{"content":"`...)
		b = append(b, words[i%len(words)]...)
		return append(b, `"},"finish_reason":null}]}`+"\n\n"...)
	}
	b = r.appendChunk(b, "{}", r.finish())
	if r.usage {
		b = append(r.appendEnvelope(b, "data: ", "chat.completion.chunk"), `"choices":[],"usage":`...)
		b = append(r.appendUsage(b), "}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

// appendWhole appends the answer as one JSON object.
func (r *reply) appendWhole(b []byte) []byte {
	b = append(r.appendEnvelope(b, "", "chat.completion"), `"choices":[{"index":0,"message":{"role":"assistant","content":`...)
	if r.tool != "" {
		b = append(b, `null,"tool_calls":[`...)
		b = append(r.appendCall(b, false), ']')
	} else {
		b = append(b, '"')
		for i := range r.tokens() {
			b = append(b, words[i%len(words)]...)
		}
		b = append(b, '"')
	}
	b = append(b, `},"finish_reason":"`...)
	b = append(b, r.finish()...)
	b = append(b, `"}],"usage":`...)
	return append(r.appendUsage(b), '}')
}

func (r *reply) finish() string {
	if r.tool != "" {
		return "tool_calls"
	}
	return "stop"
}

func (r *reply) appendEnvelope(b []byte, prefix, object string) []byte {
	b = append(b, prefix...)
	b = append(b, `{"id":"chatcmpl-mock-`...)
	b = strconv.AppendUint(b, r.n, 10)
	b = append(b, `","object":"`...)
	b = append(b, object...)
	b = append(b, `","created":`...)
	b = strconv.AppendInt(b, r.created, 10)
	b = append(b, `,"model":"`...)
	b = append(b, r.model...)
	return append(b, `",`...)
}

func (r *reply) appendHead(b []byte) []byte {
	return append(r.appendEnvelope(b, "data: ", "chat.completion.chunk"), `"choices":[{"index":0,"delta":`...)
}

func (r *reply) appendChunk(b []byte, delta, finish string) []byte {
	b = append(r.appendHead(b), delta...)
	if finish == "" {
		return append(b, `,"finish_reason":null}]}`+"\n\n"...)
	}
	b = append(b, `,"finish_reason":"`...)
	b = append(b, finish...)
	return append(b, `"}]}`+"\n\n"...)
}

func (r *reply) appendCall(b []byte, indexed bool) []byte {
	b = append(b, '{')
	if indexed {
		b = append(b, `"index":0,`...)
	}
	b = append(b, `"id":"call_mock_`...)
	b = strconv.AppendUint(b, r.n, 10)
	b = append(b, `","type":"function","function":{"name":"`...)
	b = append(b, r.tool...)
	b = append(b, `","arguments":`...)
	args := r.cfg.ToolArgs
	if args == "" {
		args = "{}"
	}
	b = appendQuoted(b, args)
	return append(b, "}}"...)
}

// appendUsage counts a token per four bytes of body: near enough for a mock,
// and it shows how much prompt arrived.
func (r *reply) appendUsage(b []byte) []byte {
	in, out := r.bodyBytes/4, r.tokens()
	b = append(b, `{"prompt_tokens":`...)
	b = strconv.AppendInt(b, int64(in), 10)
	b = append(b, `,"completion_tokens":`...)
	b = strconv.AppendInt(b, int64(out), 10)
	b = append(b, `,"total_tokens":`...)
	b = strconv.AppendInt(b, int64(in+out), 10)
	return append(b, '}')
}

// appendQuoted appends s as a JSON string. The caller has checked that s is
// JSON itself, so only quotes, backslashes and white space need escaping.
func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
	for _, c := range []byte(s) {
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n', '\r', '\t':
			b = append(b, ' ')
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
