package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"sort"
	"sync"

	"github.com/perdure-dev/perdure/internal/effect/model"
	"github.com/perdure-dev/perdure/internal/effect/tool"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Definition is an agent as the API gives it.
type Definition struct {
	Name         string          `json:"name"`
	Provider     string          `json:"provider"`
	Model        string          `json:"model,omitempty"` // empty: the provider's
	Instructions string          `json:"instructions,omitempty"`
	Parameters   json.RawMessage `json:"parameters,omitempty"` // sent with each model call
	Tools        []ToolRef       `json:"tools,omitempty"`
	// MaxContextMessages is how many of the newest messages the model gets;
	// 0 means 200.
	MaxContextMessages int `json:"max_context_messages,omitempty"`
}

// ToolRef is a tool by the name the config gives it, or a definition in place.
type ToolRef struct {
	Name string
	Def  *tool.Definition
}

// UnmarshalJSON takes a string or an object.
func (t *ToolRef) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		return json.Unmarshal(b, &t.Name)
	}
	t.Def = &tool.Definition{}
	return json.Unmarshal(b, t.Def)
}

// MarshalJSON writes what UnmarshalJSON takes.
func (t ToolRef) MarshalJSON() ([]byte, error) {
	if t.Def != nil {
		return json.Marshal(t.Def)
	}
	return json.Marshal(t.Name)
}

// Bounds of definitions.
const (
	DefaultContextMessages = 200
	MaxInstructions        = 256 << 10 // bytes
	MaxAgentsPerTenant     = 1000
)

// Provider is a model provider with its limits.
type Provider struct {
	model.Provider
	Name    string
	Model   string // for agents that name none
	Limiter *model.Limiter
	Retry   *wire.RetryPolicy
}

// Agent is a definition made ready to run.
type Agent struct {
	Def      Definition
	provider *Provider
	model    string
	system   json.RawMessage // nil without instructions
	tools    map[string]*tool.Tool
	schemas  json.RawMessage // OpenAI tools array, nil without tools
	FromAPI  bool
}

// Errors of the registry.
var (
	ErrNoAgent   = errors.New("no such agent")
	ErrConfigged = errors.New("the agent is defined in the config and cannot be changed by API")
)

// DefinitionError says what is wrong with a definition, by the path of its key.
type DefinitionError struct{ Path, Problem string }

func (e *DefinitionError) Error() string { return e.Path + ": " + e.Problem }

// Registry holds the agents: those of the config, for every tenant, and those
// made by API, for theirs. Safe for concurrent use.
type Registry struct {
	providers map[string]*Provider
	tools     map[string]tool.Definition
	client    *tool.Client

	mu     sync.RWMutex
	config map[string]*Agent            // guarded by mu
	api    map[string]map[string]*Agent // guarded by mu; by tenant
}

// NewRegistry makes an empty registry over the config's providers and tools.
func NewRegistry(providers map[string]*Provider, tools map[string]tool.Definition, client *tool.Client) *Registry {
	return &Registry{providers: providers, tools: tools, client: client, config: map[string]*Agent{}, api: map[string]map[string]*Agent{}}
}

var validName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$`)

// ValidName reports whether an agent may have the name.
func ValidName(name string) bool { return validName.MatchString(name) }

// Compile checks a definition and makes it ready.
func (r *Registry) Compile(def Definition, fromAPI bool) (*Agent, error) {
	if !ValidName(def.Name) {
		return nil, &DefinitionError{"name", fmt.Sprintf("%.70q is not a name; allowed: letters, digits, _ . -, 1 to 64 of them", def.Name)}
	}
	p := r.providers[def.Provider]
	if p == nil {
		return nil, &DefinitionError{"provider", fmt.Sprintf("%.70q is not configured; there are: %v", def.Provider, r.ProviderNames())}
	}
	a := &Agent{Def: def, provider: p, model: def.Model, FromAPI: fromAPI}
	if a.model == "" {
		a.model = p.Model
	}
	if len(def.Instructions) > MaxInstructions {
		return nil, &DefinitionError{"instructions", fmt.Sprintf("has %d bytes, at most %d", len(def.Instructions), MaxInstructions)}
	}
	if def.Instructions != "" {
		a.system = encode(map[string]string{"role": "system", "content": def.Instructions})
	}
	if err := model.ValidateParams(def.Parameters); err != nil {
		return nil, &DefinitionError{"parameters", err.Error()}
	}
	if def.MaxContextMessages < 0 {
		return nil, &DefinitionError{"max_context_messages", "must not be negative"}
	}
	return a, r.compileTools(a)
}

func (r *Registry) compileTools(a *Agent) error {
	if len(a.Def.Tools) > tool.MaxToolsPerAgent {
		return &DefinitionError{"tools", fmt.Sprintf("has %d tools, at most %d", len(a.Def.Tools), tool.MaxToolsPerAgent)}
	}
	a.tools = map[string]*tool.Tool{}
	var schemas []json.RawMessage
	for i, ref := range a.Def.Tools {
		path := fmt.Sprintf("tools[%d]", i)
		def, from := tool.Definition{}, tool.FromAPI
		if ref.Def != nil {
			def = *ref.Def
		} else {
			known, ok := r.tools[ref.Name]
			if !ok {
				return &DefinitionError{path, fmt.Sprintf("tool %.70q is not configured", ref.Name)}
			}
			def, from = known, tool.FromOperator
		}
		t, err := tool.Compile(def, r.client, from)
		if err != nil {
			return &DefinitionError{path, err.Error()}
		}
		if a.tools[t.Name()] != nil {
			return &DefinitionError{path, fmt.Sprintf("tool %q is there twice", t.Name())}
		}
		a.tools[t.Name()] = t
		schemas = append(schemas, t.Schema())
	}
	if len(schemas) > 0 {
		a.schemas = encode(schemas)
	}
	return nil
}

// ProviderNames lists the providers, sorted.
func (r *Registry) ProviderNames() []string {
	var names []string
	for n := range r.providers {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}

// AddConfig makes an agent of the config known to all tenants.
func (r *Registry) AddConfig(def Definition) error {
	a, err := r.Compile(def, false)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.config[def.Name] = a
	return nil
}

// Set makes an agent of the API known to its tenant, once it is durable.
func (r *Registry) Set(tenant string, a *Agent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.api[tenant] == nil {
		r.api[tenant] = map[string]*Agent{}
	}
	r.api[tenant][a.Def.Name] = a
}

// CanSet reports why an agent may not be set by API, or nil.
func (r *Registry) CanSet(tenant, name string) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.config[name] != nil {
		return ErrConfigged
	}
	if r.api[tenant][name] == nil && len(r.api[tenant]) >= MaxAgentsPerTenant {
		return fmt.Errorf("the tenant has %d agents already", MaxAgentsPerTenant)
	}
	return nil
}

// Remove forgets an agent of the API.
func (r *Registry) Remove(tenant, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.api[tenant], name)
	if len(r.api[tenant]) == 0 {
		delete(r.api, tenant)
	}
}

// Get finds an agent for a tenant.
func (r *Registry) Get(tenant, name string) (*Agent, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if a := r.config[name]; a != nil {
		return a, nil
	}
	if a := r.api[tenant][name]; a != nil {
		return a, nil
	}
	return nil, ErrNoAgent
}

// List gives the agents a tenant sees, by name.
func (r *Registry) List(tenant string) []*Agent {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var out []*Agent
	for _, a := range r.config {
		out = append(out, a)
	}
	for _, a := range r.api[tenant] {
		if r.config[a.Def.Name] == nil {
			out = append(out, a)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Def.Name < out[j].Def.Name })
	return out
}

// FirstStep is where a session of this agent begins: at rest.
func (a *Agent) FirstStep() *wire.StepSpec { return TurnStep(a.provider.Retry) }
