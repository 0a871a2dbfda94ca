package server

import (
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/tool"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/wire"
)

// demoDelay is the pace of the built-in model: a word each.
const demoDelay = 20 * time.Millisecond

// maxProviderQueue bounds the model calls that wait for a permit of one
// provider. Turns are bounded before by admission.
const maxProviderQueue = 100_000

// Providers makes the clients of the configured providers.
func Providers(cfg *config.Config, e env.Env) (map[string]*agent.Provider, error) {
	out := map[string]*agent.Provider{}
	for _, name := range sortedKeys(cfg.Providers) {
		c := cfg.Providers[name]
		p := &agent.Provider{Name: name, Model: c.Model, Limiter: model.NewLimiter(c.ConcurrencyLimit, maxProviderQueue),
			Retry: &wire.RetryPolicy{
				MaxAttempts: uint32(c.Retry.MaxAttempts), InitialUs: c.Retry.InitialInterval.Microseconds(),
				MaxUs: c.Retry.MaxInterval.Microseconds(), TotalUs: cfg.Kernel.TurnTimeout.Microseconds(),
			}}
		switch c.Type {
		case "demo":
			p.Provider = model.NewDemo(e.Clock, demoDelay)
		case "openai":
			client, err := model.NewOpenAI(model.OpenAIOptions{
				BaseURL: c.BaseURL, APIKey: c.APIKey.Reveal(), Dialer: e.Dialer, Clock: e.Clock,
				DialTimeout: c.ConnectTimeout, FirstByteTimeout: c.FirstByteTimeout, IdleTimeout: c.IdleTimeout,
				MaxOutput: int(c.MaxResponseBytes),
			})
			if err != nil {
				return nil, fmt.Errorf("providers.%s: %w", name, err)
			}
			p.Provider = client
		default:
			return nil, fmt.Errorf("providers.%s.type: %q is unknown", name, c.Type)
		}
		out[name] = p
	}
	return out, nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// registry makes the configured agents ready.
func registry(cfg *config.Config, e env.Env, providers map[string]*agent.Provider) (*agent.Registry, *tool.Client, error) {
	vault := headerVault{}
	tools := map[string]tool.Definition{}
	for _, name := range sortedKeys(cfg.Tools) {
		tools[name] = toolDefinition(name, cfg.Tools[name], vault)
	}
	client, err := tool.NewClient(tool.Options{Clock: e.Clock, Dialer: e.Dialer, Secrets: vault.get})
	if err != nil {
		return nil, nil, fmt.Errorf("tools: %w", err)
	}
	reg := agent.NewRegistry(providers, tools, client)
	for _, name := range sortedKeys(cfg.Agents) {
		c := cfg.Agents[name]
		def := agent.Definition{Name: name, Provider: c.Provider, Model: c.Model, Instructions: c.Instructions,
			Parameters: json.RawMessage(c.Parameters), MaxContextMessages: c.MaxContextMessages}
		for _, t := range c.Tools {
			def.Tools = append(def.Tools, agent.ToolRef{Name: t})
		}
		if err := reg.AddConfig(def); err != nil {
			return nil, nil, fmt.Errorf("agents.%s.%w", name, err)
		}
	}
	return reg, client, nil
}

// minSecret is the length from which a value can be told from ordinary text.
const minSecret = 4

// headerVault hands each configured header value to the tools as a secret, so
// that it is redacted wherever it would show.
type headerVault map[string]string

func (v headerVault) put(value string) string {
	if len(value) < minSecret {
		return strings.ReplaceAll(value, "$", "$$")
	}
	name := fmt.Sprintf("HEADER_%d", len(v))
	v[name] = value
	return "${" + name + "}"
}

func (v headerVault) get(name string) (string, bool) {
	value, ok := v[name]
	return value, ok
}

func toolDefinition(name string, c *config.Tool, vault headerVault) tool.Definition {
	d := tool.Definition{Name: name, Description: c.Description, Parameters: tool.Schema(c.Parameters), HTTP: tool.HTTP{
		Method: c.HTTP.Method, URL: c.HTTP.URL, Timeout: tool.Duration(c.HTTP.Timeout),
		MaxResponseBytes: int(c.HTTP.MaxResponseBytes), AllowHosts: c.HTTP.AllowHosts, AllowPrivate: c.HTTP.AllowPrivate,
	}}
	if len(c.HTTP.Headers) > 0 {
		d.HTTP.Headers = map[string]string{}
		for _, k := range sortedKeys(c.HTTP.Headers) {
			d.HTTP.Headers[k] = vault.put(c.HTTP.Headers[k].Reveal())
		}
	}
	return d
}
