package model

import (
	"bytes"
	"encoding/json"
	"testing"
)

var chunkSeeds = []string{
	textChunk("Hello"), textChunk(" wörld\n\"quoted\" \\ \t"), textChunk(""), stopChunk,
	`{"id":"x","object":"chat.completion.chunk","created":1712345678,"model":"gpt","service_tier":"default","system_fingerprint":"fp","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null,"obfuscation":"abc"}`,
	`{"choices":[{"delta":{"content":"\ud83d\ude00 \u00e9 \/ \b\f\r"}}]}`,
	`{"choices":[{"delta":{"content":"\ud83d lone"}}]}`,
	`{"choices":[{"delta":{"content":"a"},"finish_reason":"length"}],"error":null}`,
	`{"choices":[{"delta":{"content":"a","Content":"b"}}]}`,
	`{"choices":[{"delta":{"content":"a"}}],"choices":[{"delta":{"content":"b"}}]}`,
	`{"choices":[{"delta":{"content":"a"}},{"delta":{"content":"b"}}]}`,
	`{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}`,
	`{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{"}}]}}]}`,
	`{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":-2}}`, `{"choices":[],"usage":{"prompt_tokens":1e2}}`,
	`{"choices":[],"usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens_details":{"reasoning_tokens":0}}}`,
	`{"error":{"message":"m"}}`, `{"choices":[{"delta":{"content":1}}]}`, `{"a":-0.5e+3,"b":[true,false,{"c":[]}],"choices":[{"delta":{}}]} `,
	`{"choices":[{"delta":{"content":"a"}}],"x":01}`, `{"choices":[{"delta":{"content":"a"}}],}`, `{"choices":[{"delta":null}]}`, "{\"choices\":[{\"delta\":{\"content\":\"\xff\"}}]}", "[DONE]", "",
}

// agree fails when the scanner claims success but the full decode differs.
func agree(t *testing.T, s *scanner, data []byte) bool {
	t.Helper()
	before := []byte("before")
	out, more, ok := s.scan(data, before)
	if !bytes.HasPrefix(out, before) || !ok && len(out) != len(before) {
		t.Fatalf("scan of %q changed dst to %q", data, out)
	}
	if !ok {
		return false
	}
	p, err := decodeChunk(data)
	if err != nil {
		t.Fatalf("scan accepts %q, decode says %v", data, err)
	}
	if text := string(out[len(before):]); text != p.text || more.finish != p.finish || p.tools != nil ||
		more.hasUsage != (p.usage != nil) || p.fault != nil {
		t.Fatalf("scan of %q: %q %+v\ndecode: %+v", data, text, more, p)
	}
	if more.hasUsage && (more.usage != Usage{p.usage.PromptTokens, p.usage.CompletionTokens}) {
		t.Fatalf("scan of %q: %+v\ndecode: %+v", data, more, p.usage)
	}
	return true
}

func FuzzScan(f *testing.F) {
	for _, a := range chunkSeeds {
		for _, b := range chunkSeeds {
			f.Add([]byte(a), []byte(b))
		}
	}
	f.Fuzz(func(t *testing.T, first, second []byte) {
		// The first event sets the frame that the second may match.
		var s scanner
		agree(t, &s, first)
		agree(t, &s, second)
		// The same with a second event that surely matches on both ends.
		if len(s.frame) > 0 && len(second) < 1<<10 {
			agree(t, &s, bytes.Join([][]byte{s.frame[:s.cut], second, s.frame[s.cut:]}, nil))
		}
	})
}

func TestScanTakesTheUsualChunks(t *testing.T) {
	var s scanner
	for i, c := range chunkSeeds[:6] {
		if !agree(t, &s, []byte(c)) {
			t.Errorf("seed %d is not taken: %s", i, c)
		}
	}
	spaced, _ := json.MarshalIndent(json.RawMessage(textChunk("x")), "", "\t")
	if !agree(t, &s, spaced) {
		t.Errorf("white space: %s", spaced)
	}
}

func TestScanDoesNotAllocate(t *testing.T) {
	var s scanner
	a, b := []byte(textChunk("Hello")), []byte(chunkSeeds[4])
	dst := make([]byte, 0, 1<<10)
	if n := testing.AllocsPerRun(100, func() {
		for _, c := range [][]byte{a, b, a} {
			if _, _, ok := s.scan(c, dst[:0]); !ok {
				t.Fatal("not taken")
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzErrorBody(f *testing.F) {
	for _, s := range []string{`{"error":{"message":"m","code":429,"type":"t"}}`, `{"error":"x"}`, `{"detail":[1]}`, `"x"`, "<html>", "", "sk-0123456789abcdef " + testKey} {
		f.Add([]byte(s))
	}
	r := redactor{key: testKey}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, e := range []*Error{r.statusError(500, parseErrorBody(body), 0), r.streamFault(body)} {
			if len(e.Message) > maxMessage+len("…") || len(e.Upstream) > maxCode+len("…") {
				t.Fatalf("too long: %+v", e)
			}
			if bytes.Contains([]byte(e.Error()+e.Message+e.Upstream), []byte(testKey)) {
				t.Fatalf("the key is in %+v", e)
			}
		}
	})
}

func BenchmarkScan(b *testing.B) {
	for name, chunks := range map[string][]string{
		"framed": {textChunk("Hello")},
		"full":   {textChunk("Hello"), chunkSeeds[4]},
	} {
		b.Run(name, func(b *testing.B) {
			var s scanner
			dst := make([]byte, 0, 1<<10)
			data := make([][]byte, len(chunks))
			for i, c := range chunks {
				data[i] = []byte(c)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				_, _, _ = s.scan(data[i%len(data)], dst[:0])
			}
		})
	}
}
