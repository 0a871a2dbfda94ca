package httpapi

import (
	"encoding/json"
	"net/http"

	"github.com/perdure-dev/perdure/api"
)

// landingPage is what GET / gives: where to go from here.
func (a *API) landingPage() []byte {
	type link struct {
		Name string `json:"name"`
		Href string `json:"href"`
	}
	b, err := json.MarshalIndent(struct {
		Name    string `json:"name"`
		Version string `json:"version"`
		Links   []link `json:"links"`
	}{"perdure", a.cfg.Version, []link{
		{"description of the API (OpenAPI 3.1)", "/openapi.json"},
		{"agents", "/v1/agents"},
		{"sessions", "/v1/sessions"},
		{"models, for OpenAI clients (base URL /v1)", "/v1/models"},
		{"metrics", "/metrics"},
		{"health", "/healthz"},
		{"readiness", "/readyz"},
	}}, "", "  ")
	if err != nil {
		panic("httpapi: encode landing page: " + err.Error()) // strings only: cannot happen
	}
	return append(b, '\n')
}

func (a *API) landing(c *call) error { return c.send(http.StatusOK, a.landed) }

func (a *API) health(c *call) error {
	return c.reply(http.StatusOK, struct {
		Status  string `json:"status"`
		Version string `json:"version"`
	}{"ok", a.cfg.Version})
}

func (a *API) readiness(c *call) error {
	if a.isDraining() {
		return errDraining
	}
	if a.cfg.Ready != nil {
		if err := a.cfg.Ready(); err != nil {
			return &refusal{status: http.StatusServiceUnavailable, code: "not_ready", message: err.Error()}
		}
	}
	return c.reply(http.StatusOK, struct {
		Status string `json:"status"`
	}{"ready"})
}

func (a *API) openAPI(c *call) error {
	c.w.Header()["Cache-Control"] = noCache
	return c.send(http.StatusOK, api.OpenAPI)
}

func (a *API) metrics(c *call) error {
	if a.cfg.Metrics == nil {
		return &refusal{status: http.StatusNotFound, code: "not_kept", message: "this server keeps no metrics"}
	}
	a.cfg.Metrics.ServeHTTP(c, c.r)
	return nil
}

// modelView is an agent as OpenAI's clients see it: a model.
type modelView struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func (a *API) modelOf(name string) modelView {
	return modelView{ID: name, Object: "model", Created: a.started, OwnedBy: "perdure"}
}

func (a *API) listModels(c *call) error {
	models := []modelView{}
	for _, ag := range a.svc.Agents().List(c.tenant) {
		models = append(models, a.modelOf(ag.Def.Name))
	}
	return c.reply(http.StatusOK, struct {
		Object string      `json:"object"`
		Data   []modelView `json:"data"`
	}{"list", models})
}

func (a *API) getModel(c *call) error {
	ag, err := a.agentKnown(c.tenant, c.params[0])
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, a.modelOf(ag.Def.Name))
}
