package config

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/pflag"
)

// world is one test's file system, environment and command line.
type world struct {
	files map[string]string
	env   []string
	args  []string
}

func (w world) load(t *testing.T) (*Config, []string, error) {
	t.Helper()
	mem := vfs.NewMem()
	for name, content := range w.files {
		f, err := mem.Create(name, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	flags := RegisterFlags(fs)
	if err := fs.Parse(w.args); err != nil {
		t.Fatal(err)
	}
	return Load(Input{FS: mem, Environ: w.env, Flags: flags})
}

func (w world) mustLoad(t *testing.T) *Config {
	t.Helper()
	c, _, err := w.load(t)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func file(content string) world {
	return world{files: map[string]string{"p.yaml": content}, args: []string{"--config", "p.yaml"}}
}

func TestNothingGivenServesDemo(t *testing.T) {
	c := world{}.mustLoad(t)
	if c.Listen != "127.0.0.1:8080" || c.Data != "./data" || c.Kernel.SessionTTLSecs != 300 || c.Kernel.Partitions != 4 {
		t.Errorf("defaults are %q %q %d %d", c.Listen, c.Data, c.Kernel.SessionTTLSecs, c.Kernel.Partitions)
	}
	if len(c.Agents) != 1 || c.Agents["demo"].Provider != "demo" || c.Providers["demo"].Type != "demo" {
		t.Errorf("agents %v, providers %v", c.Agents, c.Providers)
	}
	if c.Providers["demo"].Retry.MaxAttempts != 4 {
		t.Error("a named entry does not get its defaults")
	}
}

func TestPrecedence(t *testing.T) {
	w := file("kernel:\n  session_ttl_secs: 10\n")
	if got := w.mustLoad(t).Kernel.SessionTTLSecs; got != 10 {
		t.Errorf("file: %d", got)
	}
	w.env = []string{"PERDURE_KERNEL_SESSION_TTL_SECS=20"}
	c := w.mustLoad(t)
	if got := c.Kernel.SessionTTLSecs; got != 20 {
		t.Errorf("environment over file: %d", got)
	}
	if o := c.Origin("kernel.session_ttl_secs"); o != (Origin{"env", "PERDURE_KERNEL_SESSION_TTL_SECS"}) {
		t.Errorf("origin %v", o)
	}
	w.args = append(w.args, "--kernel.session_ttl_secs", "30")
	if got := w.mustLoad(t).Kernel.SessionTTLSecs; got != 30 {
		t.Errorf("flag over environment: %d", got)
	}
}

// TestEveryKeyIsOverridable sets each key of the table by its variable, its
// flag and --set, and looks at the origin.
func TestEveryKeyIsOverridable(t *testing.T) {
	base := `
insecure: true
providers: {p: {type: openai, base_url: "http://h/v1", model: m}}
tools: {t: {http: {url: "http://h/"}}}
agents: {a: {provider: p}}
`
	entry := map[string]string{"providers": "p", "tools": "t", "agents": "a"}
	for _, k := range Keys() {
		if strings.Contains(k.Path, "[i]") {
			continue
		}
		path := k.Path
		if group, rest, ok := strings.Cut(path, ".<name>."); ok {
			path = group + "." + entry[group] + "." + rest
		}
		text := sample(root.leaf(path), path)
		ways := map[string]world{
			"env": {env: []string{envName(path) + "=" + text, "AKEY=0123456789abcdef"}},
			"set": {env: []string{"AKEY=0123456789abcdef"}, args: []string{"--set", path + "=" + text}},
		}
		if k.Flag != "" {
			ways["flag"] = world{env: []string{"AKEY=0123456789abcdef"}, args: []string{"--" + k.Flag + "=" + text}}
		} else if root.leaf(path).kind.scalar() && !strings.Contains(k.Path, "<name>") {
			t.Errorf("%s has no flag", path)
		}
		for way, w := range ways {
			w.files = map[string]string{"p.yaml": base, "key": "abcdefghijklmnopqrst"}
			w.args = append(w.args, "--config", "p.yaml")
			c, warnings, err := w.load(t)
			if err != nil || len(warnings) > 0 {
				t.Errorf("%s by %s: %v %v", path, way, err, warnings)
				continue
			}
			if src := c.Origin(path).Source; src != "env" && src != "flag" {
				t.Errorf("%s by %s: source is %s", path, way, src)
			}
		}
	}
}

// sample is an allowed text for a key.
func sample(f *field, path string) string {
	special := map[string]string{
		"listen": "127.0.0.1:9", "grpc_listen": "127.0.0.1:2", "flows.trace_ratio": "0.5", "admin_listen": "127.0.0.1:10", "cluster.advertise": "10.0.0.1:80", "store": "mem:", "agents.a.provider": "p", "agents.a.tools": "[t]",
		"tools.t.http.allow_hosts": "h", "auth.keys": "[{name: n, key_env: AKEY}]", "tools.t.parameters": "{type: object}",
		"providers.p.api_key_env": "AKEY", "providers.p.api_key_file": "key", "providers.p.type": "openai",
	}
	if s, ok := special[path]; ok {
		return s
	}
	switch {
	case f.enum != "":
		return strings.SplitN(f.enum, "|", 2)[0]
	case f.check == "httpurl", f.check == "baseurl":
		return "http://h/x"
	case f.kind == kindJSON, f.kind == kindHeaders:
		return "{a: b}"
	case f.def != "":
		return f.def
	}
	return "x"
}

func TestRefusals(t *testing.T) {
	tests := []struct{ name, yaml, want string }{
		{"unknown key", "kernel:\n  max_inflight_turns: 3\n", `p.yaml:2: kernel.max_inflight_turns: unknown key; allowed: partitions, .*did you mean "max_in_flight_turns"`},
		{"key in the wrong place", "session_ttl_secs: 3\n", `did you mean kernel.session_ttl_secs\?`},
		{"not a number", "kernel:\n  partitions: four\n", `p.yaml:2: kernel.partitions: "four" is not a whole number; allowed: a whole number from 1 to 256`},
		{"out of range", "kernel: {partitions: 0}", `kernel.partitions: "0" is out of range`},
		{"huge number", "kernel: {partitions: 99999999999999999999}", `is not a whole number`},
		{"duration without unit", "kernel: {turn_timeout: 30}", `"30" is not a duration; .*add a unit, like 30s`},
		{"size", "limits: {max_body_bytes: 1MB}", `"1MB" is not a size`},
		{"bool", "insecure: yes", `"yes" is not true or false`},
		{"enum", "log: {level: wran}", `"wran" is not one of the allowed words; allowed: debug, info, warn, error \(did you mean "warn"`},
		{"given twice", "data: a\ndata: b\n", `p.yaml:2: data: is given twice`},
		{"list for a mapping", "kernel: [1]", `kernel: is a list; allowed: a mapping`},
		{"mapping for a value", "data: {a: b}", `data: is a mapping; allowed: text that is not empty`},
		{"no value", "data:\n", `data: has no value`},
		{"merge key", "x: &a {partitions: 1}\nkernel:\n  <<: *a\n", `kernel: uses a merge key`},
		{"second document", "data: a\n---\ndata: b\n", `second document`},
		{"syntax", "data: [\n", `p.yaml: is not YAML: .*line`},
		{"store", "store: gs://b/p", `"gs://b/p" is not a store; allowed: empty \(local segments\), s3://bucket/prefix or mem:`},
		{"store without a bucket", "store: s3:///p", `names no bucket`},
		{"store with a key", "store: s3://id:key@b/p", `^p.yaml:1: store: "s3://.redacted.@b/p" has a user.*credentials come from the environment`},
		{"open without keys", "listen: 0.0.0.0:80", `listen: "0.0.0.0:80" can be reached from other machines.*--insecure`},
		{"open on every address", `listen: ":80"`, `can be reached from other machines`},
		{"open on IPv6", `listen: "[::]:80"`, `can be reached from other machines`},
		{"admin open", "admin_listen: 0.0.0.0:81", `admin_listen: .*no authentication`},
		{"port", "listen: localhost:99999", `no valid port`},
		{"name", "agents: {Bad Name: {provider: demo}}", `agents: "Bad Name" is not a name`},
		{"unknown provider", "agents: {a: {provider: mian}}\nproviders: {main: {type: demo}}", `agents.a.provider: "mian" is no provider; allowed: main \(did you mean "main"`},
		{"unknown tool", "providers: {p: {type: demo}}\ntools:\n  weather: {http: {url: http://h}}\nagents:\n  a:\n    provider: p\n    tools: [wether]\n", `p.yaml:7: agents.a.tools\[0\]: "wether" is no tool; allowed: weather \(did you mean "weather"`},
		{"bad value deep inside", "tools: {w: {http: {url: http://h, timeout: soon}}}", `tools.w.http.timeout: "soon" is not a duration`},
		{"no model", "providers: {p: {type: openai, base_url: http://h}}\nagents: {a: {provider: p}}", `agents.a.model: has no value`},
		{"no type", "providers: {p: {}}", `providers.p.type: has no value; allowed: openai, demo`},
		{"demo with URL", "providers: {p: {type: demo, base_url: http://h}}", `demo provider`},
		{"tool with a dot", "tools: {a.b: {http: {url: http://h}}}", `tools.a.b: has a dot`},
		{"schema", "tools: {a: {parameters: {type: array}, http: {url: http://h}}}", `tools.a.parameters.type: is not object`},
		{"NaN", "providers: {p: {type: demo}}\nagents: {a: {provider: p, parameters: {t: .nan}}}", `agents.a.parameters.t: ".nan" has no form in JSON`},
		{"sizes", "journal: {segment_bytes: 64KiB}", `journal.max_batch_bytes: "1MiB" is larger than journal.segment_bytes`},
		{"prompt", "limits: {max_prompt_bytes: 2MiB}", `larger than limits.max_body_bytes`},
		{"two keys", "auth: {keys: [{name: a, key_env: A, key_file: b}]}", `auth.keys\[0\]: needs exactly one of`},
		{"intervals", "providers: {p: {type: demo, retry: {max_interval: 1ms}}}", `retry.max_interval: "1ms" is shorter`},
		{"allow_hosts", "tools: {a: {http: {url: http://h, allow_hosts: [g]}}}", `does not hold the host of url`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := file(tt.yaml).load(t)
			if err == nil {
				t.Fatal("accepted")
			}
			if !regexp.MustCompile(tt.want).MatchString(err.Error()) {
				t.Errorf("got  %s\nwant %s", err, tt.want)
			}
		})
	}
}

func TestAllErrorsAtOnceAndBounded(t *testing.T) {
	_, _, err := file("a: 1\nb: 2\nkernel: {partitions: x}\n").load(t)
	if es := Errors(nil); !errors.As(err, &es) || len(es) != 3 {
		t.Errorf("got %v", err)
	}
	var many strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&many, "k%d: 1\n", i)
	}
	_, _, err = file(many.String()).load(t)
	if es := Errors(nil); !errors.As(err, &es) || len(es) != maxErrors {
		t.Errorf("got %d errors", len(es))
	}
}

func TestEnvironment(t *testing.T) {
	t.Run("makes entries", func(t *testing.T) {
		c := world{env: []string{
			"PERDURE_PROVIDERS_MAIN_TYPE=openai", "PERDURE_PROVIDERS_MAIN_BASE_URL=http://h/v1", "PERDURE_PROVIDERS_MAIN_MODEL=m",
			"PERDURE_PROVIDERS_MAIN_RETRY_MAX_ATTEMPTS=9", "PERDURE_AGENTS_HELPER_PROVIDER=main",
		}}.mustLoad(t)
		if p := c.Providers["main"]; p == nil || p.BaseURL != "http://h/v1" || p.Retry.MaxAttempts != 9 || c.Agents["helper"].Provider != "main" {
			t.Errorf("got %+v", p)
		}
		if c.Agents["demo"] != nil {
			t.Error("demo beside a configured agent")
		}
	})
	t.Run("finds names with dots and dashes", func(t *testing.T) {
		w := file("providers: {my-gpt.4: {type: openai, base_url: http://h, model: m}}")
		w.env = []string{"PERDURE_PROVIDERS_MY_GPT_4_MODEL=n"}
		if got := w.mustLoad(t).Providers["my-gpt.4"].Model; got != "n" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("refuses a misspelt key", func(t *testing.T) {
		_, _, err := world{env: []string{"PERDURE_KERNEL_MAX_INFLIGHT_TURNS=1"}}.load(t)
		if err == nil || !strings.Contains(err.Error(), "PERDURE_KERNEL_MAX_IN_FLIGHT_TURNS") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("refuses two meanings", func(t *testing.T) {
		w := file("providers: {a-b: {type: demo}, a_b: {type: demo}}")
		w.env = []string{"PERDURE_PROVIDERS_A_B_MODEL=n"}
		if _, _, err := w.load(t); err == nil || !strings.Contains(err.Error(), "fits several keys") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("leaves variables of an orchestrator alone", func(t *testing.T) {
		_, warnings, err := world{env: []string{"PERDURE_SERVICE_HOST=10.0.0.1", "PERDURE_API_KEY=x"}}.load(t)
		if err != nil || len(warnings) != 1 {
			t.Errorf("got %v %v", warnings, err)
		}
	})
	t.Run("names the file", func(t *testing.T) {
		w := world{files: map[string]string{"e.yaml": "data: /d"}, env: []string{"PERDURE_CONFIG=e.yaml"}}
		if got := w.mustLoad(t).Data; got != "/d" {
			t.Errorf("got %q", got)
		}
		w.env = []string{"PERDURE_CONFIG=gone.yaml"}
		if _, _, err := w.load(t); err == nil || !strings.Contains(err.Error(), `PERDURE_CONFIG: "gone.yaml" the configuration file does not exist`) {
			t.Errorf("got %v", err)
		}
	})
}

func TestFlags(t *testing.T) {
	t.Run("shortcuts beside a file", func(t *testing.T) {
		w := file("providers: {p: {type: demo}}\nagents: {a: {provider: p}}\n")
		w.args = append(w.args, "--openai-base-url", "http://127.0.0.1:9/v1", "--model", "mock", "--concurrency-limit", "7")
		w.env = []string{"OPENAI_API_KEY=sk-0123456789"}
		c := w.mustLoad(t)
		p := c.Providers["default"]
		if p == nil || p.Type != "openai" || p.Model != "mock" || p.ConcurrencyLimit != 7 || p.APIKey.Reveal() != "sk-0123456789" {
			t.Errorf("provider %+v", p)
		}
		if c.Agents["default"].Provider != "default" || c.Agents["a"] == nil || c.Agents["demo"] != nil {
			t.Errorf("agents %v", c.Agents)
		}
	})
	t.Run("shortcuts alone keep demo", func(t *testing.T) {
		c := world{args: []string{"--openai-base-url", "http://h", "--model", "m"}}.mustLoad(t)
		if c.Agents["demo"] == nil || c.Agents["default"] == nil {
			t.Errorf("agents %v", c.Agents)
		}
	})
	t.Run("model alone", func(t *testing.T) {
		_, _, err := world{args: []string{"--model", "m"}}.load(t)
		if err == nil || !strings.Contains(err.Error(), "--openai-base-url") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("URL without model", func(t *testing.T) {
		_, _, err := world{args: []string{"--openai-base-url", "http://h"}}.load(t)
		if err == nil || !strings.Contains(err.Error(), "--model NAME") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("both spellings", func(t *testing.T) {
		c := world{args: []string{"--kernel.session-ttl-secs=9", "--admin_listen=127.0.0.1:1", "--log-level", "debug", "--insecure"}}.mustLoad(t)
		if c.Kernel.SessionTTLSecs != 9 || c.AdminListen != "127.0.0.1:1" || c.Log.Level != "debug" || !c.Insecure {
			t.Errorf("got %+v", c)
		}
	})
	for _, tt := range []struct{ arg, want string }{
		{"--grpc-listen=h:1", "grpc_listen"},
		{"--set=x", "has no ="},
		{"--set=kernel.partitons=3", `unknown key (did you mean "kernel.partitions"?)`},
		{"--set=kernel.partitions=3,", "is not a whole number"},
		{"--set=auth.keys[0].name=x", "items of a list are set together"},
		{"--set=agents=[", "is not YAML"},
		{"--kernel.partitions=many", "--kernel.partitions: kernel.partitions: \"many\" is not a whole number"},
		{"--data=", "is empty"},
		{"--set=providers.p=x", "write providers.p.KEY=value"},
	} {
		if _, _, err := (world{args: []string{tt.arg}}).load(t); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %s", tt.arg, err, tt.want)
		}
	}
}

func TestSecretsNeverShow(t *testing.T) {
	const secret = "sk-VERY-secret-0123456789"
	good := world{
		files: map[string]string{"p.yaml": `
providers: {p: {type: openai, base_url: "http://h/v1", model: m, api_key_file: k}}
tools: {t: {http: {url: "http://h/?sig=` + secret + `", headers: {Authorization: "Bearer ${TOK}", X-Raw: ` + secret + `}}}}
agents: {a: {provider: p, tools: [t]}}
auth: {keys: [{name: one, key_env: KEYVAR}]}
`, "k": secret + "\n"},
		env:  []string{"TOK=" + secret, "KEYVAR=" + secret},
		args: []string{"--config", "p.yaml"},
	}
	c := good.mustLoad(t)
	if c.Providers["p"].APIKey.Reveal() != secret || c.Tools["t"].HTTP.Headers["Authorization"].Reveal() != "Bearer "+secret {
		t.Error("secrets are not resolved")
	}
	if c.Auth.Keys[0].Digest != sha256.Sum256([]byte(secret)) {
		t.Error("digest is wrong")
	}
	var text strings.Builder
	if err := c.Explain(&text); err != nil {
		t.Fatal(err)
	}
	asJSON, _ := json.Marshal(c.Providers["p"])
	for _, out := range []string{text.String(), string(asJSON), fmt.Sprintf("%v %+v %#v", *c.Providers["p"], *c.Providers["p"], c.Tools["t"].HTTP.Headers)} {
		if strings.Contains(out, secret) {
			t.Errorf("shown in %s", out)
		}
	}
	if !strings.Contains(text.String(), "providers.p.model = \"m\"  # p.yaml:2\n") || !strings.Contains(text.String(), "data = \"./data\"  # default\n") {
		t.Errorf("explain says\n%s", text.String())
	}

	for _, y := range []string{
		"api_key: " + secret, "providers: {p: {type: openai, base_url: http://h, model: m, api_key: " + secret + "}}",
		"providers: {p: {type: openai, base_url: http://h, model: m, api_key_env: " + secret + "}}",
		"providers: {p: {type: openai, base_url: http://h, model: m, api_key_file: " + secret + "}}",
		"providers: {p: {type: openai, base_url: 'http://u:" + secret + "@h', model: m}}",
		"providers: {p: {type: openai, base_url: 'http://h/?k=" + secret + "', model: m}}",
		"auth: {keys: [{name: a, sha256: " + secret + "}]}",
		"tools: {t: {http: {url: http://h, headers: {X: [" + secret + "]}}}}",
		"tools: {t: {http: {url: http://h, headers: {X: \"a\\n" + secret + "\"}}}}",
	} {
		_, _, err := file(y).load(t)
		if err == nil {
			t.Errorf("accepted %s", y)
		} else if strings.Contains(err.Error(), secret) {
			t.Errorf("the error shows the key: %v", err)
		}
	}
}

func TestAuthKeys(t *testing.T) {
	for _, tt := range []struct{ yaml, want string }{
		{"auth: {keys: [{name: a, key_env: SHORT}]}", "shorter than 16 bytes"},
		{"auth: {keys: [{name: a, key_env: GONE}]}", "names the variable GONE, which is not set"},
		{"auth: {keys: [{name: a, key_env: LONG}, {name: b, key_env: LONG}]}", "the same key as another"},
		{"auth: {keys: [{name: a, key_env: LONG}, {name: a, key_env: LONG2}]}", "auth.keys[1].name: \"a\" is given twice"},
		{"auth: {keys: [{key_env: LONG}]}", "auth.keys[0].name: has no value"},
	} {
		w := file(tt.yaml)
		w.env = []string{"SHORT=abc", "LONG=0123456789abcdef", "LONG2=0123456789abcdeF"}
		if _, _, err := w.load(t); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want %s", err, tt.want)
		}
	}
	w := file("listen: 0.0.0.0:80\nauth: {keys: [{name: a, tenant: acme, key_env: LONG}]}")
	w.env = []string{"LONG=0123456789abcdef"}
	if k := w.mustLoad(t).Auth.Keys[0]; k.Tenant != "acme" {
		t.Errorf("got %+v", k)
	}
}

func TestDefaultFileChangesNothing(t *testing.T) {
	c, err := Parse("d.yaml", DefaultYAML())
	if err != nil {
		t.Fatal(err)
	}
	d := Default()
	for _, x := range []*Config{c, d} {
		x.origins, x.env = nil, nil
	}
	if !reflect.DeepEqual(c, d) {
		t.Errorf("differs:\n%+v\n%+v", c, d)
	}
}

// TestExamplesOfDefaultFile turns the commented entries on.
func TestExamplesOfDefaultFile(t *testing.T) {
	on := regexp.MustCompile(`(?m)^#(  )`).ReplaceAll(DefaultYAML(), []byte("$1"))
	on = regexp.MustCompile(`(?m)^ +(api_key_file|key_file|sha256): ""\n`).ReplaceAll(on, nil)
	c, err := Parse("d.yaml", on)
	if err != nil {
		t.Fatalf("%v\n%s", err, on)
	}
	if c.Agents["helper"].Tools[0] != "weather" || c.Providers["main"].Model == "" || len(c.Auth.Keys) != 1 {
		t.Errorf("got %+v", c)
	}
	if got := string(c.Agents["helper"].Parameters); got != `{"temperature":0.2}` {
		t.Errorf("parameters %s", got)
	}
}

func TestJSONKeepsOrderAndTypes(t *testing.T) {
	c := file("providers: {p: {type: demo}}\nagents:\n  a:\n    provider: p\n    parameters:\n      z: 1\n      a: [1.5, true, null, 2020-01-01, \"7\", 9007199254740993]\n      m: {x: &q hi, y: *q}\n").mustLoad(t)
	want := `{"z":1,"a":[1.5,true,null,"2020-01-01","7",9007199254740993],"m":{"x":"hi","y":"hi"}}`
	if got := string(c.Agents["a"].Parameters); got != want {
		t.Errorf("got %s", got)
	}
}

func TestAliasBombIsRefused(t *testing.T) {
	var b strings.Builder
	b.WriteString("providers: {p: {type: demo}}\nagents:\n  a:\n    provider: p\n    parameters:\n      k0: &k0 [x, x, x, x, x, x, x, x, x, x]\n")
	for i := 1; i < 12; i++ {
		r := strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*k%d, ", i-1), 10), ", ")
		fmt.Fprintf(&b, "      k%d: &k%d [%s]\n", i, i, r)
	}
	if _, err := Parse("b.yaml", []byte(b.String())); err == nil || !regexp.MustCompile("too large|longer than").MatchString(err.Error()) {
		t.Errorf("got %v", err)
	}
}

func TestLoopback(t *testing.T) {
	for addr, want := range map[string]bool{
		"127.0.0.1:1": true, "127.9.9.9:1": true, "[::1]:1": true, "localhost:1": true, "LOCALHOST:1": true, "[::ffff:127.0.0.1]:1": true,
		":1": false, "0.0.0.0:1": false, "[::]:1": false, "10.0.0.1:1": false, "example.com:1": false, "localhost.evil.com:1": false, "bad": false,
	} {
		if loopback(addr) != want {
			t.Errorf("loopback(%q) = %v", addr, !want)
		}
	}
}

func TestByteSizeRoundTrip(t *testing.T) {
	for _, n := range []ByteSize{0, 1, 1023, 1024, 1025, 1 << 20, 3 << 20, 1 << 30, 1<<30 + 1} {
		if got, ok := parseBytes(n.String()); !ok || got != n {
			t.Errorf("%d → %s → %d", n, n, got)
		}
	}
}

func TestDurationsHaveUnits(t *testing.T) {
	c := file("kernel: {turn_timeout: 90s}").mustLoad(t)
	if c.Kernel.TurnTimeout != 90*time.Second {
		t.Errorf("got %v", c.Kernel.TurnTimeout)
	}
}

func FuzzLoad(f *testing.F) {
	f.Add(DefaultYAML())
	f.Add([]byte("kernel: {partitions: 2}\nagents: {a: {provider: demo, parameters: {x: [1, {y: null}]}}}"))
	f.Add([]byte("a: &a [*a]\nagents: *a"))
	f.Add([]byte("providers: {p: {type: openai, base_url: http://h, model: m}}\n---\n"))
	f.Add([]byte("auth: {keys: [{name: a, sha256: 00}]}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f.yaml", data)
		if err != nil {
			if len(err.Error()) > 64<<10 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		var out strings.Builder
		if err := c.Explain(&out); err != nil {
			t.Error(err)
		}
		for _, a := range c.Agents {
			if c.Providers[a.Provider] == nil {
				t.Error("an agent without its provider was accepted")
			}
			if a.Parameters != nil && !json.Valid(a.Parameters) {
				t.Errorf("parameters are not JSON: %s", a.Parameters)
			}
		}
	})
}

func FuzzOverride(f *testing.F) {
	f.Add("kernel.partitions", "3")
	f.Add("agents.a.b.provider", "demo")
	f.Add("auth.keys", "[{name: a, sha256: '0'}]")
	f.Add("providers.x.retry.max_attempts", "-1")
	f.Fuzz(func(t *testing.T, path, text string) {
		c := newConfig(nil)
		var errs Errors
		c.apply(setting{path, text, Origin{"flag", "--set"}}, &errs)
		c.complete(nil, &errs)
		_ = c.crossChecks()
	})
}
