//go:build e2e

package crash

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"syscall"
	"time"
)

// hung is how long a request to a living server may take.
const hung = 25 * time.Second

// api speaks to one server. Safe for concurrent use.
type api struct {
	base string
	http *http.Client
}

func newAPI(base string) *api {
	return &api{base: base, http: &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
		MaxIdleConnsPerHost: 64,
	}}}
}

// answer is what came of one request.
type answer struct {
	status int
	header http.Header
	body   []byte
	code   string // of an error
}

// errUnsent: the server was not there, so nothing was asked of it.
var errUnsent = errors.New("not sent")

func (a *api) send(ctx context.Context, method, path, key string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.base+path, r)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	// A request with a key is sent again by net/http when its connection
	// breaks: refused then does not mean that nothing was asked.
	connected := false
	req = req.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected = true }}))
	resp, err := a.http.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) && !connected {
		return nil, errUnsent
	}
	return resp, err
}

// call makes a request and reads the whole answer. An error means that none
// came, or not all of it.
func (a *api) call(method, path, key string, body any) (*answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), hung)
	defer cancel()
	resp, err := a.send(ctx, method, path, key, body)
	if err != nil {
		return nil, err
	}
	return read(resp)
}

func read(resp *http.Response) (*answer, error) {
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	ans := &answer{status: resp.StatusCode, header: resp.Header, body: b}
	if ans.status >= 400 {
		var e struct {
			Error struct{ Code, Message string } `json:"error"`
		}
		if err := json.Unmarshal(b, &e); err != nil || e.Error.Code == "" || e.Error.Message == "" {
			return nil, fmt.Errorf("status %d without an error that can be read: %.200q", ans.status, b)
		}
		ans.code = e.Error.Code
	}
	return ans, nil
}

func (a *answer) String() string { return fmt.Sprintf("%d %.300s", a.status, a.body) }

// frame is one SSE frame as it came.
type frame struct {
	id, event string
	data      []byte
	raw       string
}

// frames reads a stream until its end. io.EOF is the orderly one.
func frames(body io.Reader, fn func(frame) error) error {
	r := bufio.NewReader(body)
	var f frame
	for {
		line, err := r.ReadString('\n')
		if err == io.EOF && line == "" && f.raw == "" {
			return io.EOF
		}
		if err == io.EOF {
			return fmt.Errorf("%w: the stream ended inside a frame", io.ErrUnexpectedEOF)
		}
		if err != nil {
			return err
		}
		f.raw += line
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch name {
		case "id":
			f.id = value
		case "event":
			f.event = value
		case "data":
			f.data = []byte(value)
		case "":
			if line != "\n" {
				continue // a comment
			}
			if f.event != "" {
				if err := fn(f); err != nil {
					return err
				}
			}
			f = frame{}
		}
	}
}

// follow reads a session's events from behind a cursor.
func (a *api) follow(ctx context.Context, session, after string, fn func(frame) error) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.base+"/v1/sessions/"+session+"/events", nil)
	if err != nil {
		return nil, err
	}
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return read(resp)
	}
	defer resp.Body.Close()
	return nil, frames(resp.Body, fn)
}

// sessionView is what GET of a session says.
type sessionView struct {
	Status string `json:"status"`
	Turn   string `json:"active_turn"`
	Queued int    `json:"queued_turns"`
	Last   string `json:"last_event_id"`
}

func (a *api) session(id string) (sessionView, *answer, error) {
	var v sessionView
	ans, err := a.call(http.MethodGet, "/v1/sessions/"+id, "", nil)
	if err != nil || ans.status != http.StatusOK {
		return v, ans, err
	}
	return v, ans, json.Unmarshal(ans.body, &v)
}

// messages reads a session's whole conversation.
func (a *api) messages(id string) ([]json.RawMessage, error) {
	var out []json.RawMessage
	for after := ""; ; {
		ans, err := a.call(http.MethodGet, "/v1/sessions/"+id+"/messages?limit=1000&after="+after, "", nil)
		if err != nil {
			return nil, err
		}
		if ans.status != http.StatusOK {
			return nil, fmt.Errorf("messages of %s: %s", id, ans)
		}
		var page struct {
			Messages []struct{ Message json.RawMessage } `json:"messages"`
			Next     string                              `json:"next"`
		}
		if err := json.Unmarshal(ans.body, &page); err != nil {
			return nil, err
		}
		for _, m := range page.Messages {
			out = append(out, m.Message)
		}
		if after = page.Next; after == "" {
			return out, nil
		}
	}
}
