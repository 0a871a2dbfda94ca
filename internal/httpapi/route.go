package httpapi

import (
	"net/http"
	"strings"
)

// route is one method of one path. A segment that begins with { is a
// parameter.
type route struct {
	method   string
	pattern  string
	segments []string
	handle   func(*API, *call) error
	flags    routeFlags
	query    []string // the names that its query may have
}

type routeFlags uint8

const (
	open   routeFlags = 1 << iota // no API key needed
	openAI                        // errors in OpenAI's form
	free                          // not counted by limits.max_requests
	head                          // never changes anything and is small: HEAD is fine
	starts                        // begins work: refused while draining
	loose                         // the query is not checked
)

const (
	maxParams   = 2
	maxSegments = 8
)

// routes is every route of the API. The OpenAPI file lists the same ones; a
// test compares the two.
var routes = []route{
	{"GET", "/", nil, (*API).landing, open | head | loose, nil},
	{"GET", "/healthz", nil, (*API).health, open | free | head | loose, nil},
	{"GET", "/readyz", nil, (*API).readiness, open | free | head | loose, nil},
	{"GET", "/openapi.json", nil, (*API).openAPI, open | head | loose, nil},
	{"GET", "/metrics", nil, (*API).metrics, free | head | loose, nil},

	{"POST", "/v1/sessions", nil, (*API).createSession, starts, nil},
	{"GET", "/v1/sessions", nil, (*API).listSessions, 0, []string{"after", "limit"}},
	{"GET", "/v1/sessions/{session_id}", nil, (*API).getSession, 0, nil},
	{"DELETE", "/v1/sessions/{session_id}", nil, (*API).deleteSession, 0, nil},
	{"POST", "/v1/sessions/{session_id}/turns", nil, (*API).startTurn, starts, nil},
	{"GET", "/v1/sessions/{session_id}/turns/{turn_id}", nil, (*API).getTurn, 0, []string{"wait"}},
	{"POST", "/v1/sessions/{session_id}/cancel", nil, (*API).cancel, 0, nil},
	{"GET", "/v1/sessions/{session_id}/events", nil, (*API).events, 0, []string{"after", "turn_id"}},
	{"GET", "/v1/sessions/{session_id}/messages", nil, (*API).messages, 0, []string{"after", "limit"}},

	{"GET", "/v1/agents", nil, (*API).listAgents, 0, nil},
	{"POST", "/v1/agents", nil, (*API).createAgent, 0, nil},
	{"GET", "/v1/agents/{name}", nil, (*API).getAgent, 0, nil},
	{"PUT", "/v1/agents/{name}", nil, (*API).putAgent, 0, nil},
	{"DELETE", "/v1/agents/{name}", nil, (*API).deleteAgent, 0, nil},

	{"POST", "/v1/chat/completions", nil, (*API).chatCompletions, openAI | starts | loose, nil},
	{"GET", "/v1/models", nil, (*API).listModels, openAI | loose, nil},
	{"GET", "/v1/models/{model}", nil, (*API).getModel, openAI | loose, nil},

	{"GET", "/v1/access-log", nil, (*API).accessLog, 0, []string{"after", "limit"}},
	{"GET", "/v1/events", nil, (*API).eventLog, 0, []string{"after", "limit"}},
}

// router finds routes by the number of segments and then one by one: there are
// few of each number.
type router struct {
	byLength [maxSegments + 1][]*route
}

func newRouter(all []route) *router {
	r := &router{}
	for i := range all {
		rt := all[i]
		if rt.pattern != "/" {
			rt.segments = strings.Split(rt.pattern[1:], "/")
		}
		r.byLength[len(rt.segments)] = append(r.byLength[len(rt.segments)], &rt)
	}
	return r
}

// find gives the route of a request and its parameters. Without one, near is a
// route of the same path with another method, if there is one.
func (r *router) find(method, path string) (found, near *route, params [maxParams]string) {
	var parts [maxSegments]string
	n := 0
	for rest := strings.TrimPrefix(path, "/"); rest != "" || n > 0; {
		if n == maxSegments {
			return nil, nil, params
		}
		part, after, more := strings.Cut(rest, "/")
		parts[n] = part
		n++
		if rest = after; !more {
			break
		}
	}
	for _, rt := range r.byLength[n] {
		p, ok := rt.match(parts[:n])
		if !ok {
			continue
		}
		if rt.method == method || method == http.MethodHead && rt.method == http.MethodGet && rt.flags&head != 0 {
			return rt, nil, p
		}
		near = rt
	}
	return nil, near, params
}

func (rt *route) match(parts []string) (params [maxParams]string, ok bool) {
	n := 0
	for i, s := range rt.segments {
		if s[0] == '{' {
			if parts[i] == "" {
				return params, false
			}
			params[n] = parts[i]
			n++
		} else if s != parts[i] {
			return params, false
		}
	}
	return params, true
}

// allowed lists the methods of a route's path.
func (r *router) allowed(near *route) string {
	var methods []string
	for _, rt := range r.byLength[len(near.segments)] {
		if rt.pattern != near.pattern {
			continue
		}
		methods = append(methods, rt.method)
		if rt.flags&head != 0 {
			methods = append(methods, http.MethodHead)
		}
	}
	return strings.Join(methods, ", ")
}

// overview names the paths, for the answer to an unknown one.
func overview() string {
	var paths []string
	for i, rt := range routes {
		if i == 0 || routes[i-1].pattern != rt.pattern {
			paths = append(paths, rt.pattern)
		}
	}
	return "the paths are " + strings.Join(paths, ", ")
}
