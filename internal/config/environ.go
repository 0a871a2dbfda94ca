package config

import (
	"fmt"
	"slices"
	"strings"
)

// Variables that are no key of their own.
const (
	envConfig    = "PERDURE_CONFIG"
	envOpenAIKey = "OPENAI_API_KEY"
)

// clientVars are read by the client commands, not by the server.
var clientVars = []string{"PERDURE_URL", "PERDURE_API_KEY", "PERDURE_ADDRESS", "PERDURE_KEY"}

// fromEnviron turns PERDURE_* variables into settings. A variable that is no
// key but looks like one is refused; any other is a warning, because
// orchestrators put variables named after a service into its containers
// (PERDURE_PORT, PERDURE_SERVICE_HOST).
func (c *Config) fromEnviron(vars map[string]string, flags *Flags) (out, given []setting, warnings []string, errs Errors) {
	static, named := envTable()
	exact := c.envOfEntries(named, flags)
	for _, name := range sortedKeys(vars) {
		if !strings.HasPrefix(name, envPrefix) || name == envConfig || slices.Contains(clientVars, name) || c.namesVariable(name) {
			continue
		}
		origin := Origin{"env", name}
		if path, ok := shortcutOfEnv(name); ok {
			given = append(given, setting{path, vars[name], origin})
			continue
		}
		if path, ok := static[name]; ok {
			out = append(out, setting{path, vars[name], origin})
			continue
		}
		if paths := exact[name]; len(paths) > 1 {
			errs = append(errs, &Error{Where: name, Problem: "fits several keys: " + strings.Join(paths, ", "), Hint: "use --set"})
			continue
		} else if len(paths) == 1 {
			out = append(out, setting{paths[0], vars[name], origin})
			continue
		}
		if path := newEntryPath(named, name); path != "" {
			out = append(out, setting{path, vars[name], origin})
			continue
		}
		if problem, hint := strayVariable(name, static); problem != "" {
			errs = append(errs, &Error{Where: name, Problem: problem, Hint: hint})
		} else {
			warnings = append(warnings, fmt.Sprintf("variable %s is no configuration key and is ignored", name))
		}
	}
	return out, given, warnings, errs
}

// namedKey is one key inside named entries: the map's name and the rest.
type namedKey struct{ group, rest string }

// envTable is the variables of the keys outside named entries, and the keys
// inside them.
func envTable() (static map[string]string, named []namedKey) {
	static = map[string]string{}
	for _, k := range allKeys {
		if group, rest, ok := strings.Cut(k.Path, ".<name>."); ok {
			named = append(named, namedKey{group, rest})
			static[envName(group)] = group // the whole map as YAML
		} else if k.Env != "" {
			static[k.Env] = k.Path
		}
	}
	return static, named
}

// envOfEntries is the variables of the entries that have a name already.
func (c *Config) envOfEntries(named []namedKey, flags *Flags) map[string][]string {
	groups := map[string]map[string]bool{"providers": {}, "tools": {}, "agents": {}}
	for n := range c.Providers {
		groups["providers"][n] = true
	}
	for n := range c.Tools {
		groups["tools"][n] = true
	}
	for n := range c.Agents {
		groups["agents"][n] = true
	}
	settings, _, _ := flags.settings()
	for _, s := range settings {
		if chain, names := root.lookup(s.path); len(names) == 1 {
			groups[chain[0].name][names[0]] = true
		}
	}
	out := map[string][]string{}
	for _, k := range named {
		for _, n := range sortedKeys(groups[k.group]) {
			path := k.group + "." + n + "." + k.rest
			out[envName(path)] = append(out[envName(path)], path)
		}
	}
	return out
}

// newEntryPath reads PERDURE_PROVIDERS_MAIN_BASE_URL as a key of an entry that
// nobody named yet: the longest key that fits, the rest in lower case is the
// name.
func newEntryPath(named []namedKey, variable string) string {
	best, longest := "", 0
	for _, k := range named {
		mid, ok := strings.CutPrefix(variable, envName(k.group)+"_")
		if !ok {
			continue
		}
		suffix := "_" + strings.TrimPrefix(envName(k.rest), envPrefix)
		name, ok := strings.CutSuffix(mid, suffix)
		name = strings.ToLower(name)
		if ok && len(suffix) > longest && nameRE.MatchString(name) {
			best, longest = k.group+"."+name+"."+k.rest, len(suffix)
		}
	}
	return best
}

// namesVariable reports whether the configuration itself names the variable as
// the place of a key.
func (c *Config) namesVariable(name string) bool {
	for _, p := range c.Providers {
		if p.APIKeyEnv == name {
			return true
		}
	}
	for _, k := range c.Auth.Keys {
		if k.KeyEnv == name {
			return true
		}
	}
	return false
}

// strayVariable decides whether a variable that is no key was meant as one.
func strayVariable(name string, static map[string]string) (problem, hint string) {
	if hint := didYouMean(name, sortedKeys(static)); hint != "" {
		return "is no configuration key", hint
	}
	for _, f := range root.fields {
		if f.sub != nil && strings.HasPrefix(name, envName(f.name)+"_") {
			return "is no configuration key", "see `perdure config init` for the keys under " + f.name
		}
	}
	return "", ""
}
