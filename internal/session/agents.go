package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/wire"
)

// Agents made by API are flows without steps: entities of one attribute.
const (
	agentFlowType       = "agent-definition"
	attributeDefinition = "definition"
)

func agentFlow(tenant, name string) string { return tenant + "/a/" + name }

// PutAgent defines an agent of a tenant, or defines it anew. Sessions use the
// new definition from their next model call on.
func (s *Service) PutAgent(ctx context.Context, tenant string, def agent.Definition) (*agent.Agent, error) {
	a, err := s.cfg.Agents.Compile(def, true)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(def)
	if err != nil {
		return nil, fmt.Errorf("encode definition: %w", err)
	}
	// The registry follows the order of the commits, also when the caller has
	// gone: one change at a time, and none is left half done.
	s.agents.Lock()
	defer s.agents.Unlock()
	ctx = context.WithoutCancel(ctx)
	if err := s.cfg.Agents.CanSet(tenant, def.Name); err != nil {
		return nil, err
	}
	flow := agentFlow(tenant, def.Name)
	set := []*wire.Attribute{{Name: attributeDefinition, Value: raw}}
	r := s.set.For(flow)
	_, err = r.Call(ctx, &wire.Entry{FlowId: flow, Command: &wire.Entry_SetAttributes{SetAttributes: &wire.SetAttributes{Attributes: set}}})
	var ce *core.Error
	if errors.As(err, &ce) && ce.Code == core.NotFound {
		_, err = r.Call(ctx, &wire.Entry{FlowId: flow, Command: &wire.Entry_StartFlow{StartFlow: &wire.StartFlow{Type: agentFlowType, Attributes: set}}})
	}
	if err != nil {
		return nil, err
	}
	s.cfg.Agents.Set(tenant, a)
	return a, nil
}

// DeleteAgent removes an agent made by API. Its sessions stay; their next turn
// fails and says so.
func (s *Service) DeleteAgent(ctx context.Context, tenant, name string) error {
	if err := s.cfg.Agents.CanSet(tenant, name); errors.Is(err, agent.ErrConfigged) {
		return err
	}
	if !agent.ValidName(name) {
		return fmt.Errorf("%w: %.70q", agent.ErrNoAgent, name)
	}
	s.agents.Lock()
	defer s.agents.Unlock()
	ctx = context.WithoutCancel(ctx)
	flow := agentFlow(tenant, name)
	_, err := s.set.For(flow).Call(ctx, &wire.Entry{FlowId: flow, Command: &wire.Entry_DeleteFlow{DeleteFlow: &wire.DeleteFlow{Reason: "deleted by a client"}}})
	var ce *core.Error
	if errors.As(err, &ce) && ce.Code == core.NotFound {
		return fmt.Errorf("%w: %q", agent.ErrNoAgent, name)
	}
	if err == nil {
		s.cfg.Agents.Remove(tenant, name)
	}
	return err
}

// Agents gives the registry.
func (s *Service) Agents() *agent.Registry { return s.cfg.Agents }

// LoadAgents makes the stored agents of the tenants known, at start. One that
// cannot be used any more (its provider is gone) is reported and left out.
func (s *Service) LoadAgents(tenants []string, skipped func(tenant, name string, err error)) error {
	for _, tenant := range tenants {
		for _, r := range s.set {
			err := r.Tables().Flows(tenant+"/a/", "", agent.MaxAgentsPerTenant, false, func(f *wire.Flow) error {
				var def agent.Definition
				err := json.Unmarshal(core.AttributeOf(f, attributeDefinition), &def)
				var a *agent.Agent
				if err == nil {
					a, err = s.cfg.Agents.Compile(def, true)
				}
				if err != nil {
					skipped(tenant, def.Name, err)
					return nil
				}
				s.cfg.Agents.Set(tenant, a)
				return nil
			})
			if err != nil {
				return fmt.Errorf("read agents of tenant %s: %w", tenant, err)
			}
		}
	}
	return nil
}
