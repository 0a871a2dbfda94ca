package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/perdure-dev/perdure/internal/env"
)

// Input is all that Load may look at.
type Input struct {
	// FS reads the configuration file and the key files. Needed only when one
	// is named.
	FS env.FS
	// Environ is the environment as NAME=value.
	Environ []string
	// Flags is the parsed command line; nil = none.
	Flags *Flags
	// SkipSecrets leaves keys and ${NAME} unresolved, for commands that only
	// show or check the configuration.
	SkipSecrets bool
}

// Load reads, layers and checks one configuration: flag over environment over
// file over default. On bad input the error is an Errors that lists every
// problem with its place. The warnings are for the log.
func Load(in Input) (cfg *Config, warnings []string, err error) {
	vars := parseEnviron(in.Environ)
	c := newConfig(vars)
	var errs Errors

	if path, origin := in.configPath(vars); path != "" {
		data, problem := readBounded(in.FS, path, maxFileBytes)
		if problem != "" {
			return nil, nil, Errors{{Where: origin.Where, Value: path, Problem: "the configuration file " + problem}}
		}
		errs = append(errs, c.decodeFile(path, data)...)
	}

	var settings []setting
	envSettings, shortcutsGiven, warnings, envErrs := c.fromEnviron(vars, in.Flags)
	errs = append(errs, envErrs...)
	settings = append(settings, envSettings...)
	flagSettings, flagShortcuts, flagErrs := in.Flags.settings()
	errs = append(errs, flagErrs...)
	settings = append(settings, flagSettings...)
	for _, s := range settings {
		c.apply(s, &errs)
	}
	c.complete(append(shortcutsGiven, flagShortcuts...), &errs)

	if len(errs) == 0 {
		errs = append(errs, c.crossChecks()...)
	}
	if len(errs) == 0 && !in.SkipSecrets {
		errs = append(errs, c.resolveSecrets(in.FS)...)
	}
	if len(errs) > 0 {
		return nil, warnings, errs[:min(len(errs), maxErrors)]
	}
	return c, warnings, nil
}

// Default is the configuration of `perdure serve` with nothing given: agent
// demo on provider demo.
func Default() *Config {
	c, _, err := Load(Input{})
	if err != nil {
		panic("config: defaults: " + err.Error())
	}
	return c
}

// Parse checks one file's content alone; name stands in the errors. Key files
// and variables are not read.
func Parse(name string, data []byte) (*Config, error) {
	c := newConfig(nil)
	errs := c.decodeFile(name, data)
	c.complete(nil, &errs)
	if len(errs) == 0 {
		errs = c.crossChecks()
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return c, nil
}

func newConfig(vars map[string]string) *Config {
	c := &Config{origins: map[string]Origin{}, env: vars}
	root.setDefaults(reflect.ValueOf(c).Elem())
	return c
}

func (in Input) configPath(vars map[string]string) (string, Origin) {
	if path := in.Flags.configPath(); path != "" {
		return path, Origin{"flag", "--config"}
	}
	return vars[envConfig], Origin{"env", envConfig}
}

// readBounded reads a whole small file. The problem never holds content.
func readBounded(files env.FS, path string, most int64) (data []byte, problem string) {
	if files == nil {
		return nil, "cannot be read: no file system given"
	}
	f, err := files.Open(path)
	if err == nil {
		defer f.Close()
		data, err = io.ReadAll(io.LimitReader(f, most+1))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "does not exist"
	case errors.Is(err, fs.ErrPermission):
		return nil, "may not be read by this user"
	case err != nil:
		return nil, "cannot be read"
	case int64(len(data)) > most:
		return nil, fmt.Sprintf("is longer than %d bytes", most)
	}
	return data, ""
}

// decodeFile puts a YAML file into c.
func (c *Config) decodeFile(name string, data []byte) Errors {
	d := &decoder{cfg: c, source: "file"}
	d.where = func(n *yaml.Node) string {
		if n == nil || n.Line == 0 {
			return name
		}
		return fmt.Sprintf("%s:%d", name, n.Line)
	}
	if len(data) > maxFileBytes {
		d.fail(nil, "", "", fmt.Sprintf("is longer than %d bytes", maxFileBytes), "", "")
		return d.errs
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if !errors.Is(err, io.EOF) { // an empty file sets nothing
			d.fail(nil, "", "", "is not YAML: "+yamlProblem(err), "", "")
		}
		return d.errs
	}
	if len(doc.Content) == 1 {
		d.section(root, reflect.ValueOf(c).Elem(), doc.Content[0], "", 0)
	}
	if err := dec.Decode(&second); err == nil {
		d.fail(&second, "", "", "holds a second document (---)", "one document", "")
	} else if !errors.Is(err, io.EOF) {
		d.fail(nil, "", "", "is not YAML: "+yamlProblem(err), "", "")
	}
	return d.errs
}

// complete adds what follows from what was given: the provider and agent
// "default" of --openai-base-url, and the demo pair when there is no agent.
func (c *Config) complete(given []setting, errs *Errors) {
	userAgents := len(c.Agents)
	for _, s := range given {
		c.applyShortcut(s, errs)
	}
	if p := c.Providers[shortcutName]; p != nil && len(given) > 0 &&
		p.APIKeyEnv == "" && p.APIKeyFile == "" && c.env[envOpenAIKey] != "" {
		c.apply(setting{"providers.default.api_key_env", envOpenAIKey, Origin{"env", envOpenAIKey}}, errs)
	}
	if userAgents > 0 {
		return
	}
	if c.Providers["demo"] == nil {
		c.apply(setting{"providers.demo.type", "demo", Origin{Source: "default"}}, errs)
	}
	c.apply(setting{"agents.demo.provider", "demo", Origin{Source: "default"}}, errs)
}

// applyShortcut sets one key of provider default; the URL also makes the
// provider and the agent.
func (c *Config) applyShortcut(s setting, errs *Errors) {
	if s.path == shortcutURL {
		c.apply(setting{"providers.default.type", "openai", s.origin}, errs)
		c.apply(setting{"agents.default.provider", shortcutName, s.origin}, errs)
	} else if c.Providers[shortcutName] == nil {
		*errs = append(*errs, &Error{Where: s.origin.Where, Value: s.text,
			Problem: "has no provider to apply to", Hint: "it goes with --openai-base-url URL, or with providers.default in the file"})
		return
	}
	c.apply(s, errs)
}

func parseEnviron(environ []string) map[string]string {
	vars := make(map[string]string, len(environ))
	for _, e := range environ {
		if name, value, ok := strings.Cut(e, "="); ok && name != "" {
			vars[name] = value
		}
	}
	return vars
}

// LockFile is the name, in Data, of the file that a running server keeps
// locked.
const LockFile = "LOCK"
