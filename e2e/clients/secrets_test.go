//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The secrets of a server. None of them may be found anywhere but where they
// are sent on purpose.
const (
	providerKey = "sk-proj-Zx81kKqLw0provider"
	clientKey   = "perdure-Qm77client-key-0001"
	toolSecret  = "tool-Tt55secret-value-42"

	marker = "marker-Kk88-no-secret" // shows that what is looked into can be read
)

// mouthy is a provider that refuses every call and repeats the key in each way
// it can think of: header, message, code, and in the middle of a stream.
func mouthy(t *testing.T) *httptest.Server {
	t.Helper()
	n := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		if key != providerKey {
			t.Errorf("the provider got %q as its key", key)
		}
		w.Header().Set("X-Your-Key", key)
		w.Header().Set("Content-Type", "application/json")
		n++ // turns come one after the other
		switch n % 3 {
		case 0:
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprintf(w, `{"error":{"message":"Incorrect API key provided: %s. (Bearer %s)","type":"invalid_request_error","code":"%s"}}`, key, key, key)
		case 1:
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprintf(w, "<html>who is %s?</html>", key)
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"error\":{\"message\":\"bad key %s\",\"code\":\"invalid_api_key\"}}\n\n", key)
		}
	}))
	t.Cleanup(srv.Close)
	return srv
}

func TestSecretsStaySecret(t *testing.T) {
	h := newToolHost(t)
	provider := mouthy(t)
	jsonl := filepath.Join(t.TempDir(), "jsonl")
	s := serve(t, setup{
		config: `
jsonl_dir: "` + jsonl + `"
log: {level: debug}
auth:
  keys: [{name: one, key_env: CLIENT_KEY}]
providers:
  mouthy: {type: openai, base_url: "` + provider.URL + `/v1", model: m, api_key_env: PROVIDER_KEY}
  demo: {type: demo}
tools:
  echo:
    parameters: {type: object}
    http: {url: "` + h.url + `/echo-secret", allow_private: true, headers: {X-Tool-Secret: "${TOOL_SECRET}"}}
agents:
  mouthy: {provider: mouthy}
  teller: {provider: demo, tools: [echo]}
`,
		env: []string{"PROVIDER_KEY=" + providerKey, "CLIENT_KEY=" + clientKey, "TOOL_SECRET=" + toolSecret},
	})
	p := plain{url: s.url, key: clientKey}
	var heard strings.Builder // all that a client can get to see
	hear := func(method, path, body string) answer {
		t.Helper()
		a, err := p.try(method, path, body)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&heard, a.header, a.body)
		return a
	}

	id, tellerID := p.newSession(t, "mouthy"), p.newSession(t, "teller")
	for i := range 3 {
		var tr turn
		a := hear("POST", "/v1/sessions/"+id+"/turns", turnBody(marker, ""))
		if err := json.Unmarshal([]byte(a.body), &tr); err != nil || tr.Status != "failed" || tr.Error == nil || tr.Error.Code != "model_unauthorized" {
			t.Errorf("turn %d: want it to fail with model_unauthorized, got %s", i, a.body)
		}
	}
	if a := hear("POST", "/v1/chat/completions", `{"model":"mouthy","messages":[{"role":"user","content":"Hi"}]}`); a.status != http.StatusBadGateway {
		t.Errorf("%d %s", a.status, a.body)
	}
	hear("POST", "/v1/sessions/"+tellerID+"/turns", turnBody("/tool echo {}", ""))
	if calls := h.seen("/echo-secret"); len(calls) == 0 || calls[0].secret != toolSecret {
		t.Errorf("the tool must get its secret: %+v", calls)
	}
	p.key = clientKey + "x" // a mistyped key is a secret too
	hear("GET", "/v1/agents", "")
	p.key = clientKey
	eventually(t, "the turns in the event log", func() bool {
		a, err := p.try("GET", "/v1/events", "")
		return err == nil && strings.Count(a.body, "turn.failed") >= 3
	})
	for _, path := range []string{"/v1/events", "/v1/access-log", "/v1/agents", "/v1/agents/teller", "/metrics", "/v1/sessions",
		"/v1/sessions/" + id, "/v1/sessions/" + id + "/messages", "/v1/sessions/" + tellerID + "/messages"} {
		if a := hear("GET", path, ""); a.status != 200 {
			t.Errorf("GET %s: %d %s", path, a.status, a.body)
		}
	}
	for _, who := range []string{id, tellerID} {
		n := 0
		want := map[string]int{id: 3, tellerID: 1}[who]
		fmt.Fprintln(&heard, show(p.follow(t, who, "").until(t, "the ends of all turns", func(f frame) bool {
			if terminal(f) {
				n++
			}
			return n == want
		})))
	}
	s.stop(t)

	clean(t, "what clients get", heard.String())
	clean(t, "the server's log", s.stderr.String()+s.stdout.String())
	files, marked := 0, 0
	for _, dir := range []string{s.data, jsonl} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := os.ReadFile(path)
			files++
			marked += strings.Count(string(b), marker)
			clean(t, path, string(b))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if files < 10 || marked == 0 {
		t.Errorf("looked into %d files and saw the marker %d times: not where the data is", files, marked)
	}
	show, errs, _ := run(t, []string{"PROVIDER_KEY=" + providerKey}, "config", "show", "--set", "providers.p.type=openai",
		"--set", "providers.p.base_url=http://127.0.0.1:1/v1", "--set", "providers.p.model=m", "--set", "providers.p.api_key_env=PROVIDER_KEY")
	clean(t, "config show", show+errs)
}

// clean fails when a text holds a secret, or the telling part of one.
func clean(t *testing.T, where, text string) {
	t.Helper()
	for _, secret := range []string{providerKey, clientKey, toolSecret, "Zx81kKqLw0", "Qm77client", "Tt55secret"} {
		if i := strings.Index(text, secret); i >= 0 {
			t.Errorf("%s has the secret %q: …%.200q…", where, secret, text[max(0, i-80):min(len(text), i+80)])
			return
		}
	}
}
