package httpapi

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/perdure-dev/perdure/internal/session"
)

// Bounds of sessions made by clients.
const (
	maxMetadata  = 16 << 10 // bytes
	maxHistory   = 4096     // messages given at the start
	maxReason    = 1024     // bytes of a cancel's reason
	minRetention = time.Second
	maxRetention = 10 * 365 * 24 * time.Hour
)

// statelessPrefix marks the sessions that a completion without a session makes
// for itself; see session.CreateRequest.Stateless.
const statelessPrefix = "chat_"

func checkNewID(id string) error {
	if strings.HasPrefix(id, statelessPrefix) {
		return &refusal{status: http.StatusBadRequest, code: "bad_session_id", message: "IDs that begin with " + statelessPrefix + " are for completions without a session",
			hint: "take another ID", param: "id"}
	}
	return nil
}

func decodeSession(v value) (session.CreateRequest, error) {
	var req session.CreateRequest
	err := v.object(func(name string, m value) error {
		switch name {
		case "agent":
			return m.str(&req.Agent)
		case "id":
			if err := m.str(&req.ID); err != nil {
				return err
			}
			return checkNewID(req.ID)
		case "metadata":
			return m.metadata(&req.Metadata)
		case "retention":
			return m.retention(&req.Retention)
		case "messages":
			return m.array(maxHistory, func(_ int, e value) error {
				msg, err := e.message()
				req.History = append(req.History, msg.raw)
				return err
			})
		}
		return m.unknown("agent, id, messages, metadata, retention")
	})
	if err == nil && req.Agent == "" {
		err = &refusal{status: http.StatusBadRequest, code: "invalid_request", message: "agent: is missing", hint: "GET /v1/agents lists the agents", param: "agent"}
	}
	return req, err
}

func (v value) metadata(into *json.RawMessage) error {
	if v.isNull() {
		return nil
	}
	if v.raw[0] != '{' {
		return v.want("an object")
	}
	if len(v.raw) > maxMetadata {
		return v.bad("has %d bytes, at most %d", len(v.raw), maxMetadata)
	}
	*into = v.raw
	return nil
}

func (v value) retention(into *time.Duration) error {
	var text string
	if err := v.str(&text); err != nil {
		return err
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < minRetention || d > maxRetention {
		return v.bad(`%.40q is not allowed; allowed: a duration from %s to %s, such as "72h"`, text, minRetention, maxRetention)
	}
	*into = d
	return nil
}

func (a *API) createSession(c *call) error {
	b, err := c.body(false)
	if err != nil {
		return err
	}
	v, err := parse(b)
	if err != nil {
		return err
	}
	req, err := decodeSession(v)
	if err != nil {
		return err
	}
	if req.RequestID, err = c.idempotencyKey(); err != nil {
		return err
	}
	s, err := a.svc.Create(c.r.Context(), c.tenant, req)
	if err != nil {
		return err
	}
	c.session = s.ID
	c.w.Header()["Location"] = []string{"/v1/sessions/" + s.ID}
	return c.reply(http.StatusCreated, s)
}

func (a *API) listSessions(c *call) error {
	after, limit, err := c.page()
	if err != nil {
		return err
	}
	if after != "" && !isPlain(after, 128) {
		return session.ErrBadID
	}
	list, more, err := a.svc.List(c.r.Context(), c.tenant, after, limit)
	if err != nil {
		return err
	}
	out := struct {
		Sessions []session.Session `json:"sessions"`
		Next     string            `json:"next,omitempty"`
	}{Sessions: list}
	if list == nil {
		out.Sessions = []session.Session{}
	}
	if more && len(list) > 0 {
		out.Next = list[len(list)-1].ID
	}
	return c.reply(http.StatusOK, out)
}

func (a *API) getSession(c *call) error {
	c.session = c.params[0]
	s, err := a.svc.Get(c.r.Context(), c.tenant, c.session)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, s)
}

func (a *API) deleteSession(c *call) error {
	c.session = c.params[0]
	if err := a.svc.Delete(c.r.Context(), c.tenant, c.session); err != nil {
		return err
	}
	c.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) cancel(c *call) error {
	c.session = c.params[0]
	var reason string
	err := c.object(true, func(name string, v value) error {
		switch name {
		case "turn_id":
			return v.str(&c.turn)
		case "reason":
			if err := v.str(&reason); err != nil {
				return err
			}
			if len(reason) > maxReason {
				return v.bad("has %d bytes, at most %d", len(reason), maxReason)
			}
			return nil
		}
		return v.unknown("turn_id, reason")
	})
	if err != nil {
		return err
	}
	n, err := a.svc.Cancel(c.r.Context(), c.tenant, c.session, c.turn, reason)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, struct {
		Cancelled int `json:"cancelled"`
	}{n})
}

func (a *API) messages(c *call) error {
	c.session = c.params[0]
	after, limit, err := c.page()
	if err != nil {
		return err
	}
	list, next, err := a.svc.Messages(c.r.Context(), c.tenant, c.session, after, limit)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, struct {
		Messages []session.Message `json:"messages"`
		Next     string            `json:"next,omitempty"`
	}{list, next})
}

// events follows a session, or one of its turns, from a cursor.
func (a *API) events(c *call) error {
	c.session = c.params[0]
	after, turn := c.query["after"], c.query["turn_id"]
	if last := c.r.Header.Get("Last-Event-ID"); last != "" { // newer: the client has come back
		after = last
	}
	if turn != "" {
		return a.turnEvents(c, turn, after)
	}
	w, err := a.svc.Watch(c.r.Context(), c.tenant, c.session, after)
	if err != nil {
		return err
	}
	s := c.stream()
	r := c.relay(w, s)
	if err := a.watch(r); err != nil {
		r.close()
		return err
	}
	return s.resume(r, after)
}

// turnEvents follows one turn. A client that has had its end already gets 204,
// which tells an EventSource not to come back.
func (a *API) turnEvents(c *call, turn, after string) error {
	c.turn = turn
	o, err := a.lookUp(c, turn)
	if err != nil {
		return err
	}
	if o.ended() {
		had, err := session.ParseID(after)
		if err != nil {
			return err
		}
		if last, err := session.ParseID(o.last); err == nil && (had.LSN > last.LSN || had.LSN == last.LSN && had.N >= last.N) {
			c.WriteHeader(http.StatusNoContent)
			return nil
		}
	}
	w, err := a.svc.WatchTurn(c.r.Context(), c.tenant, c.session, turn, after)
	if err != nil {
		return err
	}
	s := c.stream()
	return s.resume(c.relay(w, s), after)
}

// resume follows from a cursor; the client hears at once that it is connected.
func (s *sse) resume(r *relay, after string) error {
	s.cursor = after
	if err := s.write([]byte(": connected\n\n")); err != nil {
		r.close()
		return err
	}
	return r.serve()
}
