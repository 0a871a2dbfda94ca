// Package chat is the terminal client of a Perdure server: it talks HTTP like
// any other client.
package chat

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Client calls one server.
type Client struct {
	Target string // http://host:port
	Key    string // API key, or empty
	HTTP   *http.Client
}

// Refusal is an answer of the server that is not the wanted one.
type Refusal struct {
	Status  int
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint"`
}

func (r *Refusal) Error() string {
	s := fmt.Sprintf("%s (%d %s)", r.Message, r.Status, r.Code)
	if r.Hint != "" {
		s += "; " + r.Hint
	}
	return s
}

// final reports whether the same request will be refused again.
func (r *Refusal) final() bool {
	return r.Status >= 400 && r.Status < 500 && r.Status != http.StatusTooManyRequests && r.Status != http.StatusRequestTimeout
}

// Unreachable says that the server did not answer at all.
type Unreachable struct {
	Target string
	Err    error
}

func (u *Unreachable) Error() string {
	return fmt.Sprintf("%s is not reachable: %v; is it running? (perdure serve)", u.Target, u.Err)
}

// Unwrap gives the reason.
func (u *Unreachable) Unwrap() error { return u.Err }

// Agents lists the names of the agents.
func (c *Client) Agents(ctx context.Context) ([]string, error) {
	resp, err := c.do(ctx, http.MethodGet, "/v1/agents", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var list struct{ Agents []struct{ Name string } }
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		return nil, fmt.Errorf("read the server's answer: %w", err)
	}
	var names []string
	for _, a := range list.Agents {
		names = append(names, a.Name)
	}
	return names, nil
}

// maxLine bounds a line of the stream: the server's largest event.
const maxLine = 16 << 20

func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.Target, "/")+path, r)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return nil, &Unreachable{c.Target, err}
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // an unreadable refusal is still one
	var e struct{ Error Refusal }
	if json.Unmarshal(raw, &e) != nil || e.Error.Message == "" {
		e.Error.Message = "the server answered " + resp.Status
	}
	e.Error.Status = resp.StatusCode
	return nil, &e.Error
}

// Create makes a session and gives its ID.
func (c *Client) Create(ctx context.Context, agent string) (string, error) {
	resp, err := c.do(ctx, http.MethodPost, "/v1/sessions", map[string]string{"agent": agent})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var s struct{ ID string }
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		return "", fmt.Errorf("read the server's answer: %w", err)
	}
	return s.ID, nil
}

// Cancel stops what a session is doing.
func (c *Client) Cancel(ctx context.Context, session string) error {
	resp, err := c.do(ctx, http.MethodPost, "/v1/sessions/"+session+"/cancel", map[string]string{"reason": "cancelled in the terminal"})
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Event is one frame of a stream.
type Event struct {
	ID, Name string
	Data     []byte
}

// Turn gives input and calls fn for each event until the turn has ended. When
// the connection breaks it goes on from the last event seen.
func (c *Client) Turn(ctx context.Context, session, input string, fn func(Event)) error {
	resp, err := c.do(ctx, http.MethodPost, "/v1/sessions/"+session+"/turns", map[string]any{"input": input, "stream": true})
	if err != nil {
		return err
	}
	turn := resp.Header.Get("X-Perdure-Turn")
	last, done, err := read(resp.Body, fn)
	_ = resp.Body.Close() // read to its end
	for tries := 0; !done && tries < maxReconnects; tries++ {
		if turn == "" {
			return fmt.Errorf("the stream ended and the server did not name the turn: %w", err)
		}
		var refused *Refusal
		if errors.As(err, &refused) && refused.final() {
			return err
		}
		if tries > 0 {
			fn(Event{Name: EventReconnecting})
			select {
			case <-time.After(reconnectPause):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		before := last
		if last, done, err = c.resume(ctx, session, turn, last, fn); last != before {
			tries = 0
		}
	}
	if !done {
		return fmt.Errorf("the stream broke and could not be resumed: %w", err)
	}
	return nil
}

// A server that restarts is back within these.
const (
	maxReconnects  = 60
	reconnectPause = 500 * time.Millisecond
)

// EventReconnecting is the client's own: the server is not reachable and is
// tried again.
const EventReconnecting = "reconnecting"

// resume follows the turn from the last event that was seen.
func (c *Client) resume(ctx context.Context, session, turn, last string, fn func(Event)) (string, bool, error) {
	q := url.Values{"turn_id": {turn}}
	if last != "" {
		q.Set("after", last)
	}
	resp, err := c.do(ctx, http.MethodGet, "/v1/sessions/"+session+"/events?"+q.Encode(), nil)
	if err != nil {
		return last, false, err
	}
	if resp.StatusCode == http.StatusNoContent { // its end was the last event seen
		return last, true, resp.Body.Close()
	}
	defer resp.Body.Close()
	seen, done, err := read(resp.Body, fn)
	if seen != "" {
		last = seen
	}
	return last, done, err
}

// read calls fn for each event; done says that a terminal one came.
func read(r io.Reader, fn func(Event)) (last string, done bool, err error) {
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, maxLine)
	var ev Event
	for sc.Scan() {
		line := sc.Text()
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "" && ev.Name != "":
			fn(ev)
			if ev.ID != "" {
				last = ev.ID
			}
			switch ev.Name {
			case "turn.completed", "turn.failed", "turn.cancelled", "session.deleted":
				return last, true, nil
			}
			ev = Event{}
		case name == "id":
			ev.ID = value
		case name == "event":
			ev.Name = value
		case name == "data":
			ev.Data = append(ev.Data, value...)
		}
	}
	if err = sc.Err(); err == nil {
		err = errors.New("the stream ended early")
	}
	return last, false, err
}
