package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/perdure-dev/perdure/internal/env"
)

// origin finds the place of a key, or of the nearest section around it.
func (c *Config) origin(path string) Origin {
	for p := path; p != ""; {
		if o, ok := c.origins[p]; ok {
			return o
		}
		i := strings.LastIndexAny(p, ".[")
		if i < 0 {
			break
		}
		p = p[:i]
	}
	return Origin{Source: "default"}
}

// Origin says where the value of a key came from.
func (c *Config) Origin(path string) Origin {
	if o, ok := c.origins[path]; ok {
		return o
	}
	return Origin{Source: "default"}
}

func (c *Config) bad(errs *Errors, path, value, problem, allowed, hint string) {
	*errs = append(*errs, &Error{Where: c.origin(path).Where, Path: path, Value: value, Problem: problem, Allowed: allowed, Hint: hint})
}

// crossChecks checks what one key alone cannot show.
func (c *Config) crossChecks() Errors {
	var errs Errors
	c.checkListen(&errs)
	c.checkSizes(&errs)
	c.checkAuth(&errs)
	for _, name := range sortedKeys(c.Providers) {
		c.checkProvider(&errs, "providers."+name, c.Providers[name])
	}
	for _, name := range sortedKeys(c.Tools) {
		c.checkTool(&errs, name, c.Tools[name])
	}
	for _, name := range sortedKeys(c.Agents) {
		c.checkAgent(&errs, "agents."+name, c.Agents[name])
	}
	return errs
}

func (c *Config) checkListen(errs *Errors) {
	if c.Listen == "" {
		c.bad(errs, "listen", "", "is empty", checks["hostport"].allowed, "")
		return
	}
	if !c.Insecure && !loopback(c.Listen) && len(c.Auth.Keys) == 0 {
		c.bad(errs, "listen", c.Listen, "can be reached from other machines, but there are no API keys", "",
			"configure auth.keys, listen on 127.0.0.1, or accept open access with --insecure")
	}
	if c.GRPCListen != "" && !c.Insecure && !loopback(c.GRPCListen) && len(c.Auth.Keys) == 0 {
		c.bad(errs, "grpc_listen", c.GRPCListen, "can be reached from other machines, but there are no API keys", "",
			"configure auth.keys, listen on 127.0.0.1, or accept open access with --insecure")
	}
	if c.AdminListen == "" {
		return
	}
	if !c.Insecure && !loopback(c.AdminListen) {
		c.bad(errs, "admin_listen", c.AdminListen, "can be reached from other machines, and the admin server has no authentication", "",
			"listen on 127.0.0.1, or accept open access with --insecure")
	}
	if c.AdminListen == c.Listen && !strings.HasSuffix(c.Listen, ":0") {
		c.bad(errs, "admin_listen", c.AdminListen, "is the address of listen", "another port", "")
	}
}

// checkSizes keeps together the sizes that must fit into each other: what one
// command carries must fit a journal batch with room for its frame.
func (c *Config) checkSizes(errs *Errors) {
	batch := c.Journal.MaxBatchBytes
	if batch > c.Journal.SegmentBytes {
		c.bad(errs, "journal.max_batch_bytes", batch.String(), "is larger than journal.segment_bytes", "at most "+c.Journal.SegmentBytes.String(), "")
	}
	if c.Limits.MaxPromptBytes > c.Limits.MaxBodyBytes {
		c.bad(errs, "limits.max_prompt_bytes", c.Limits.MaxPromptBytes.String(), "is larger than limits.max_body_bytes", "at most "+c.Limits.MaxBodyBytes.String(), "")
	}
	c.fitsBatch(errs, "limits.max_prompt_bytes", c.Limits.MaxPromptBytes)
}

func (c *Config) fitsBatch(errs *Errors, path string, size ByteSize) {
	if half := c.Journal.MaxBatchBytes / 2; size > half {
		c.bad(errs, path, size.String(), "is larger than half of journal.max_batch_bytes", "at most "+half.String(), "raise journal.max_batch_bytes")
	}
}

func (c *Config) checkAuth(errs *Errors) {
	names := map[string]bool{}
	for i, k := range c.Auth.Keys {
		path := "auth.keys[" + itoa(i) + "]"
		if k.Name == "" {
			c.bad(errs, path+".name", "", "has no value", nameAllowed, "")
		} else if names[k.Name] {
			c.bad(errs, path+".name", k.Name, "is given twice", "one key a name", "")
		}
		names[k.Name] = true
		if k.Tenant == "" {
			c.bad(errs, path+".tenant", "", "is empty", nameAllowed, "")
		}
		if given(k.KeyEnv, k.KeyFile, k.SHA256) != 1 {
			c.bad(errs, path, "", "needs exactly one of key_env, key_file, sha256", "", "")
		}
	}
}

func given(texts ...string) (n int) {
	for _, t := range texts {
		if t != "" {
			n++
		}
	}
	return n
}

func (c *Config) checkProvider(errs *Errors, path string, p *Provider) {
	switch p.Type {
	case "":
		c.bad(errs, path+".type", "", "has no value", root.leaf(path+".type").allowed(), "")
	case "openai":
		if p.BaseURL == "" {
			c.bad(errs, path+".base_url", "", "has no value", checks["baseurl"].allowed, "like https://api.openai.com/v1")
		}
	case "demo":
		if given(p.BaseURL, p.APIKeyEnv, p.APIKeyFile) > 0 {
			c.bad(errs, path, "", "is a demo provider, which has no base_url and no key", "", "for a real model: type: openai")
		}
	}
	if given(p.APIKeyEnv, p.APIKeyFile) > 1 {
		c.bad(errs, path, "", "has both api_key_env and api_key_file", "one of them", "")
	}
	if p.Retry.MaxInterval < p.Retry.InitialInterval {
		c.bad(errs, path+".retry.max_interval", p.Retry.MaxInterval.String(), "is shorter than initial_interval", "at least "+p.Retry.InitialInterval.String(), "")
	}
	c.fitsBatch(errs, path+".max_response_bytes", p.MaxResponseBytes)
}

func (c *Config) checkTool(errs *Errors, name string, t *Tool) {
	path := "tools." + name
	if strings.Contains(name, ".") {
		c.bad(errs, path, "", "has a dot in its name, which model APIs refuse", "a-z, 0-9, _ and -", "")
	}
	if t.HTTP.URL == "" {
		c.bad(errs, path+".http.url", "", "has no value", checks["httpurl"].allowed, "")
	}
	if t.Parameters != nil {
		var schema struct{ Type any }
		if err := json.Unmarshal(t.Parameters, &schema); err != nil || (schema.Type != nil && schema.Type != "object") {
			c.bad(errs, path+".parameters.type", "", "is not object", "a JSON Schema of type object", "")
		}
	}
	if host := urlHost(t.HTTP.URL); len(t.HTTP.AllowHosts) > 0 && host != "" && !slices.Contains(t.HTTP.AllowHosts, host) {
		c.bad(errs, path+".http.allow_hosts", strings.Join(t.HTTP.AllowHosts, ", "), "does not hold the host of url", "a list with "+host, "")
	}
	c.fitsBatch(errs, path+".http.max_response_bytes", t.HTTP.MaxResponseBytes)
}

func urlHost(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	return strings.ToLower(u.Hostname())
}

func (c *Config) checkAgent(errs *Errors, path string, a *Agent) {
	known := sortedKeys(c.Providers)
	p := c.Providers[a.Provider]
	switch {
	case a.Provider == "":
		c.bad(errs, path+".provider", "", "has no value", listOrNone(known), "")
	case p == nil:
		c.bad(errs, path+".provider", a.Provider, "is no provider", listOrNone(known), didYouMean(a.Provider, known))
	case p.Type == "openai" && a.Model == "" && p.Model == "":
		c.bad(errs, path+".model", "", "has no value, and neither has its provider's", "", "set providers."+a.Provider+".model, or use --model NAME with --openai-base-url")
	}
	tools, seen := sortedKeys(c.Tools), map[string]bool{}
	for i, name := range a.Tools {
		at := path + ".tools[" + itoa(i) + "]"
		if c.Tools[name] == nil {
			c.bad(errs, at, name, "is no tool", listOrNone(tools), didYouMean(name, tools))
		} else if seen[name] {
			c.bad(errs, at, name, "is given twice", "each tool once", "")
		}
		seen[name] = true
	}
	if len(a.Tools) > 128 {
		c.bad(errs, path+".tools", "", "has more than 128 tools", "at most 128", "")
	}
}

func listOrNone(names []string) string {
	switch {
	case len(names) == 0:
		return "none is configured"
	case len(names) > 20:
		return strings.Join(names[:20], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

// minKeyBytes keeps API keys out of the reach of guessing.
const minKeyBytes = 16

// resolveSecrets reads keys and fills ${NAME} in headers. Errors name the
// variable or the key path, never a value.
func (c *Config) resolveSecrets(files env.FS) Errors {
	var errs Errors
	for _, name := range sortedKeys(c.Providers) {
		p, path := c.Providers[name], "providers."+name
		p.APIKey = NewSecret(c.secret(&errs, files, path+".api_key", p.APIKeyEnv, p.APIKeyFile))
	}
	digests := map[[32]byte]bool{}
	for i, k := range c.Auth.Keys {
		path := "auth.keys[" + itoa(i) + "]"
		had := len(errs)
		if k.SHA256 != "" {
			_, _ = hex.Decode(k.Digest[:], []byte(k.SHA256)) // the form is checked
		} else if key := c.secret(&errs, files, path+".key", k.KeyEnv, k.KeyFile); len(errs) == had {
			if len(key) < minKeyBytes {
				c.bad(&errs, path, "", "has a key shorter than "+itoa(minKeyBytes)+" bytes", "", "openssl rand -hex 32 makes one")
			}
			k.Digest = sha256.Sum256([]byte(key))
		}
		if len(errs) == had && digests[k.Digest] {
			c.bad(&errs, path, "", "has the same key as another entry", "", "")
		}
		digests[k.Digest] = true
	}
	for _, name := range sortedKeys(c.Tools) {
		c.expandHeaders(&errs, "tools."+name+".http.headers", c.Tools[name].HTTP.Headers)
	}
	return errs
}

// secret reads one key from its variable or file; "" when none is configured.
func (c *Config) secret(errs *Errors, files env.FS, path, variable, file string) string {
	switch {
	case variable != "":
		v := strings.TrimSpace(c.env[variable])
		if v == "" {
			c.bad(errs, path+"_env", "", "names the variable "+variable+", which is not set", "", "")
		} else if !printable(v) {
			c.bad(errs, path+"_env", "", "names the variable "+variable+", whose value is not one word of printable ASCII", "", "")
		}
		return v
	case file != "":
		data, problem := readBounded(files, file, 64<<10)
		v := string(bytes.TrimSpace(data))
		if problem == "" && v == "" {
			problem = "is empty"
		} else if problem == "" && !printable(v) {
			problem = "is not one word of printable ASCII"
		}
		if problem != "" { // the name is not shown: it may be a key pasted by mistake
			c.bad(errs, path+"_file", "", "names a file that "+problem, "", "")
		}
		return v
	}
	return ""
}

// printable keeps line breaks and blanks out of HTTP headers.
func printable(v string) bool {
	for i := range len(v) {
		if v[i] <= ' ' || v[i] > '~' {
			return false
		}
	}
	return true
}

var expandRE = regexp.MustCompile(`\$\{([A-Za-z_][A-Za-z0-9_]*)\}`)

func (c *Config) expandHeaders(errs *Errors, path string, h Headers) {
	for _, name := range sortedKeys(h) {
		out := expandRE.ReplaceAllStringFunc(h[name].value, func(ref string) string {
			variable := ref[2 : len(ref)-1]
			v, ok := c.env[variable]
			if !ok {
				c.bad(errs, path+"."+name, "", "names the variable "+variable+", which is not set", "", "")
			}
			return v
		})
		if strings.ContainsAny(out, "\r\n\x00") {
			c.bad(errs, path+"."+name, "", "has a line break or a NUL byte after ${} is replaced", "", "")
		}
		h[name] = NewSecret(out)
	}
}
