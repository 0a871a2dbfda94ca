package httpapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/effect/tool"
)

// redacted stands for the values of a tool's headers, which may be secrets.
const redacted = "[redacted]"

// agentView is an agent as clients see it.
type agentView struct {
	agent.Definition
	Source string `json:"source"` // config or api
}

// viewOf hides the header values of an agent's tools.
func viewOf(a *agent.Agent) agentView {
	v := agentView{Definition: a.Def, Source: "config"}
	if a.FromAPI {
		v.Source = "api"
	}
	v.Tools = make([]agent.ToolRef, len(a.Def.Tools))
	for i, t := range a.Def.Tools {
		v.Tools[i] = t
		if t.Def == nil || len(t.Def.HTTP.Headers) == 0 {
			continue
		}
		def := *t.Def
		def.HTTP.Headers = make(map[string]string, len(t.Def.HTTP.Headers))
		for name := range t.Def.HTTP.Headers {
			def.HTTP.Headers[name] = redacted
		}
		v.Tools[i].Def = &def
	}
	return v
}

// decodeAgent reads a definition; a name given by the path may be left out.
func decodeAgent(v value, name string) (agent.Definition, error) {
	def := agent.Definition{Name: name}
	err := v.object(func(field string, m value) error {
		switch field {
		case "name":
			if err := m.str(&def.Name); err != nil {
				return err
			}
			if name != "" && def.Name != name {
				return m.bad("is %.70q, but the path says %.70q", def.Name, name)
			}
			return nil
		case "provider":
			return m.str(&def.Provider)
		case "model":
			return m.str(&def.Model)
		case "instructions":
			return m.str(&def.Instructions)
		case "parameters":
			if m.isNull() {
				return nil
			}
			if m.raw[0] != '{' {
				return m.want("an object")
			}
			def.Parameters = m.raw
			return nil
		case "max_context_messages":
			return m.integer(&def.MaxContextMessages)
		case "tools":
			return m.array(tool.MaxToolsPerAgent, func(_ int, e value) error {
				ref, err := e.toolRef()
				def.Tools = append(def.Tools, ref)
				return err
			})
		case "source": // as the server writes it, so that what was read can be sent back
			return nil
		}
		return m.unknown("name, provider, model, instructions, parameters, tools, max_context_messages")
	})
	switch {
	case err != nil:
	case def.Name == "":
		err = invalidField("name", "is missing")
	case def.Provider == "":
		err = invalidField("provider", "is missing")
	}
	return def, err
}

func (v value) toolRef() (agent.ToolRef, error) {
	if v.raw[0] == '"' {
		return agent.ToolRef{Name: text(v.raw)}, nil
	}
	def := &tool.Definition{}
	err := v.object(func(field string, m value) error {
		switch field {
		case "name":
			return m.str(&def.Name)
		case "description":
			return m.str(&def.Description)
		case "parameters":
			def.Parameters = tool.Schema(m.raw)
			return nil
		case "max_argument_bytes":
			return m.integer(&def.MaxArgumentBytes)
		case "http":
			return m.httpTool(&def.HTTP)
		}
		return m.unknown("name, description, parameters, max_argument_bytes, http")
	})
	return agent.ToolRef{Def: def}, err
}

func (v value) httpTool(into *tool.HTTP) error {
	return v.object(func(field string, m value) error {
		switch field {
		case "method":
			return m.str(&into.Method)
		case "url":
			return m.str(&into.URL)
		case "headers":
			if err := m.decode(&into.Headers); err != nil {
				return err
			}
			for name, val := range into.Headers {
				if val == redacted {
					return invalidField(m.at(name), "is "+redacted+", as the server writes it; send the real value")
				}
			}
			return nil
		case "timeout":
			return m.decode(&into.Timeout)
		case "max_response_bytes":
			return m.integer(&into.MaxResponseBytes)
		case "allow_hosts":
			return m.decode(&into.AllowHosts)
		case "allow_private":
			return m.boolean(&into.AllowPrivate)
		}
		return m.unknown("method, url, headers, timeout, max_response_bytes, allow_hosts, allow_private")
	})
}

// agentKnown finds an agent.
func (a *API) agentKnown(tenant, name string) (*agent.Agent, error) {
	ag, err := a.svc.Agents().Get(tenant, name)
	if err != nil {
		return nil, fmt.Errorf("%w: %.100q", err, name)
	}
	return ag, nil
}

func (a *API) listAgents(c *call) error {
	views := []agentView{}
	for _, ag := range a.svc.Agents().List(c.tenant) {
		views = append(views, viewOf(ag))
	}
	return c.reply(http.StatusOK, struct {
		Agents []agentView `json:"agents"`
	}{views})
}

func (a *API) getAgent(c *call) error {
	ag, err := a.agentKnown(c.tenant, c.params[0])
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, viewOf(ag))
}

func (a *API) readAgent(c *call, name string) (agent.Definition, error) {
	b, err := c.body(false)
	if err != nil {
		return agent.Definition{}, err
	}
	v, err := parse(b)
	if err != nil {
		return agent.Definition{}, err
	}
	return decodeAgent(v, name)
}

func (a *API) createAgent(c *call) error {
	def, err := a.readAgent(c, "")
	if err != nil {
		return err
	}
	if _, err := a.svc.Agents().Get(c.tenant, def.Name); err == nil {
		return &refusal{status: http.StatusConflict, code: "already_exists", message: fmt.Sprintf("agent %.70q exists already", def.Name),
			hint: "PUT /v1/agents/{name} defines it anew"}
	}
	return a.storeAgent(c, def, http.StatusCreated)
}

func (a *API) putAgent(c *call) error {
	def, err := a.readAgent(c, c.params[0])
	if err != nil {
		return err
	}
	status := http.StatusOK
	if _, err := a.svc.Agents().Get(c.tenant, def.Name); err != nil {
		status = http.StatusCreated
	}
	return a.storeAgent(c, def, status)
}

func (a *API) storeAgent(c *call, def agent.Definition, status int) error {
	if _, err := a.svc.Agents().Compile(def, true); err != nil {
		return err
	}
	if err := a.svc.Agents().CanSet(c.tenant, def.Name); err != nil && !errors.Is(err, agent.ErrConfigged) {
		return &refusal{status: http.StatusConflict, code: "too_many_agents", message: err.Error(), hint: "delete one that is not needed"}
	}
	ag, err := a.svc.PutAgent(c.r.Context(), c.tenant, def)
	if err != nil {
		return err
	}
	if status == http.StatusCreated {
		c.w.Header()["Location"] = []string{"/v1/agents/" + def.Name}
	}
	return c.reply(status, viewOf(ag))
}

func (a *API) deleteAgent(c *call) error {
	if err := a.svc.DeleteAgent(c.r.Context(), c.tenant, c.params[0]); err != nil {
		return err
	}
	c.WriteHeader(http.StatusNoContent)
	return nil
}

// records answers with a part of one of the server's logs.
func (a *API) records(c *call, from LogReader, name string) error {
	if from == nil {
		return &refusal{status: http.StatusNotFound, code: "not_kept", message: "this server keeps no " + name}
	}
	after, limit, err := c.page()
	if err != nil {
		return err
	}
	list, next, err := from.Tail(c.r.Context(), c.tenant, after, limit)
	if err != nil {
		return err
	}
	if list == nil {
		list = []json.RawMessage{}
	}
	return c.reply(http.StatusOK, struct {
		Records []json.RawMessage `json:"records"`
		Next    string            `json:"next,omitempty"`
	}{list, next})
}

func (a *API) accessLog(c *call) error { return a.records(c, a.cfg.AccessReader, "access log") }

func (a *API) eventLog(c *call) error { return a.records(c, a.cfg.EventReader, "event log") }
