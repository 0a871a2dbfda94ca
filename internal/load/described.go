package load

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// described is a protocol read from a file, so that a peer needs no code.
type described struct {
	Title   string         `json:"name"`
	OpenReq describedReq   `json:"open"`
	IDField string         `json:"session_id"` // top-level member of the answer to open
	TurnReq describedReq   `json:"turn"`
	ShutReq describedReq   `json:"shut"`
	WholeIs describedWhole `json:"whole"`
	Events  struct {
		Token  []string `json:"token"`
		Done   []string `json:"done"`
		Failed []string `json:"failed"`
	} `json:"events"` // names of server-sent events
}

// describedReq is a request; "{session}" in the path becomes the session's ID.
type describedReq struct {
	Method string          `json:"method"`
	Path   string          `json:"path"`
	Body   json.RawMessage `json:"body"`
}

// describedWhole says when a reply that is no stream counts as done.
type describedWhole struct {
	All  []string `json:"contains"`
	None []string `json:"lacks"`
}

// ReadProtocol reads the description of a peer's protocol, at most 1 MiB of
// JSON: how a session is opened and deleted, how a turn is asked for, and what
// a good answer looks like. See bench/peers for examples.
func ReadProtocol(r io.Reader) (Protocol, error) {
	const most = 1 << 20
	d := json.NewDecoder(io.LimitReader(r, most))
	d.DisallowUnknownFields()
	var p described
	if err := d.Decode(&p); err != nil {
		return nil, fmt.Errorf("protocol: %w", err)
	}
	if d.More() {
		return nil, errors.New("protocol: something follows the object")
	}
	var errs []error
	for name, q := range map[string]describedReq{"open": p.OpenReq, "turn": p.TurnReq, "shut": p.ShutReq} {
		optional := name != "turn"
		if q.Method == "" && q.Path == "" && optional {
			continue
		}
		if !slices.Contains([]string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete}, q.Method) ||
			!strings.HasPrefix(q.Path, "/") || strings.ContainsAny(q.Path, " \r\n") {
			errs = append(errs, fmt.Errorf("protocol: %s: %s %q: want a method and a path from /", name, q.Method, q.Path))
		}
	}
	if (p.OpenReq.Method == "") != (p.IDField == "") {
		errs = append(errs, errors.New("protocol: open and session_id go together"))
	}
	if p.Title == "" {
		errs = append(errs, errors.New("protocol: name is missing"))
	}
	if len(p.Events.Done) == 0 && len(p.WholeIs.All) == 0 {
		errs = append(errs, errors.New("protocol: neither events.done nor whole.contains says when a turn is done"))
	}
	return p, errors.Join(errs...)
}

func (p described) Name() string { return p.Title }

func (q describedReq) request(session string) Request {
	return Request{q.Method, strings.ReplaceAll(q.Path, "{session}", session), q.Body}
}

func (p described) Open() Request               { return p.OpenReq.request("") }
func (p described) Turn(session string) Request { return p.TurnReq.request(session) }
func (p described) Shut(session string) Request { return p.ShutReq.request(session) }

func (p described) Session(body []byte) (string, error) {
	var members map[string]json.RawMessage
	var id string
	if json.Unmarshal(body, &members) != nil || json.Unmarshal(members[p.IDField], &id) != nil || id == "" {
		return "", fmt.Errorf("no %s in %q", p.IDField, clip(body))
	}
	return id, nil
}

func (p described) Event(name, _ []byte) Progress {
	switch n := string(name); {
	case slices.Contains(p.Events.Token, n):
		return Token
	case slices.Contains(p.Events.Done, n):
		return Done
	case slices.Contains(p.Events.Failed, n):
		return Failed
	}
	return Other
}

func (p described) Whole(body []byte) Progress {
	if len(p.WholeIs.All) == 0 {
		return Failed // a stream was asked for
	}
	for _, s := range p.WholeIs.All {
		if !bytes.Contains(body, []byte(s)) {
			return Failed
		}
	}
	for _, s := range p.WholeIs.None {
		if bytes.Contains(body, []byte(s)) {
			return Failed
		}
	}
	return Done
}
