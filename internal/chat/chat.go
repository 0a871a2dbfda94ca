package chat

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// Options of a conversation in a terminal.
type Options struct {
	Client     *Client
	Agent      string // empty: the server's only one, or demo
	Session    string // go on with this one; empty: a new one
	Once       string // one message, then end; empty: read lines of In
	In         io.Reader
	Out        io.Writer
	Color      bool
	Interrupts <-chan struct{} // one for each Ctrl-C
}

type screen struct {
	mu    sync.Mutex
	w     io.Writer
	color bool
	text  int // bytes of the current message that are on the screen
	fresh bool
	lost  bool // the server is away, and that was said

	once    bool
	outcome error // a *TurnError when the last turn did not complete
}

// TurnError says that a turn ended otherwise than completed.
type TurnError struct{ Outcome, Reason string }

func (e *TurnError) Error() string { return "the turn " + e.Outcome + ": " + e.Reason }

// pick chooses an agent when none is named.
func pick(ctx context.Context, c *Client) (string, error) {
	names, err := c.Agents(ctx)
	switch {
	case err != nil:
		return "", err
	case len(names) == 1 || len(names) > 1 && slices.Contains(names, "demo"):
		if len(names) == 1 {
			return names[0], nil
		}
		return "demo", nil
	case len(names) == 0:
		return "", errors.New("the server has no agent")
	}
	return "", fmt.Errorf("the server has several agents, choose one with --agent: %s", strings.Join(names, ", "))
}

const help = `Commands: /new  a new session   /id  this session's ID   /quit  leave (Ctrl-D too)
Ctrl-C while the agent answers cancels the turn.
`

// Run holds a conversation until the input ends.
func Run(ctx context.Context, o Options) error {
	s := &screen{w: o.Out, color: o.Color, once: o.Once != ""}
	var err error
	if o.Agent == "" && o.Session == "" {
		if o.Agent, err = pick(ctx, o.Client); err != nil {
			return err
		}
	}
	if o.Session == "" {
		if o.Session, err = o.Client.Create(ctx, o.Agent); err != nil {
			return err
		}
	}
	if o.Once != "" {
		if err := s.turn(ctx, o, o.Once); err != nil {
			return err
		}
		return s.outcome
	}
	s.print(fmt.Sprintf("Session %s with agent %s. /help lists the commands.\n", o.Session, o.Agent))
	lines := make(chan string)
	go func() {
		defer close(lines)
		sc := bufio.NewScanner(o.In)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			select {
			case lines <- sc.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		s.print(s.paint("1;36", "› "))
		line, ok := s.line(ctx, o, lines)
		if !ok {
			s.print("\n")
			return nil
		}
		switch line = strings.TrimSpace(line); line {
		case "":
		case "/quit", "/exit":
			return nil
		case "/help":
			s.print(help)
		case "/id":
			s.print(o.Session + "\n")
		case "/new":
			if o.Session, err = o.Client.Create(ctx, o.Agent); err != nil {
				return err
			}
			s.print("Session " + o.Session + "\n")
		default:
			if err := s.turn(ctx, o, line); err != nil {
				var refused *Refusal
				if !errors.As(err, &refused) {
					return err
				}
				s.print(s.paint("31", err.Error()) + "\n")
			}
		}
	}
}

// line waits for one; Ctrl-C at the prompt leaves.
func (s *screen) line(ctx context.Context, o Options, lines <-chan string) (string, bool) {
	select {
	case l, ok := <-lines:
		return l, ok
	case <-o.Interrupts:
	case <-ctx.Done():
	}
	return "", false
}

// turn shows one turn; Ctrl-C cancels it on the server, and the stream then
// ends by itself.
func (s *screen) turn(ctx context.Context, o Options, input string) error {
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case <-o.Interrupts:
				cctx, cancel := context.WithTimeout(ctx, 10*time.Second)
				if err := o.Client.Cancel(cctx, o.Session); err != nil {
					s.print("\n" + s.paint("31", "cancel: "+err.Error()) + "\n")
				}
				cancel()
			case <-done:
				return
			}
		}
	}()
	s.text, s.outcome = 0, nil
	return o.Client.Turn(ctx, o.Session, input, s.event)
}

type eventData struct {
	Offset    int
	Text      string
	Name      string
	Arguments string
	CallID    string `json:"call_id"`
	Content   string
	IsError   bool `json:"is_error"`
	Reason    string
	Message   struct{ Content any }
	Error     json.RawMessage
}

func (s *screen) event(ev Event) {
	if ev.Name == EventReconnecting {
		if !s.lost {
			s.lost = true
			s.newline()
			s.print(s.paint("2", "the server is away; trying again…") + "\n")
		}
		return
	}
	s.lost = false
	var d eventData
	if json.Unmarshal(ev.Data, &d) != nil {
		return
	}
	switch ev.Name {
	case "message.delta":
		s.delta(d)
	case "message.completed":
		if text, ok := d.Message.Content.(string); ok {
			s.delta(eventData{Text: text}) // what deltas did not show
		}
		s.text = 0
		s.newline()
	case "tool.started":
		s.newline()
		s.print(s.paint("33", "⚙ "+d.Name+" "+clip(d.Arguments)) + "\n")
	case "tool.completed":
		mark := "✓ "
		if d.IsError {
			mark = "✗ "
		}
		s.print(s.paint("2", mark+d.Name+": "+clip(d.Content)) + "\n")
	case "turn.queued":
		s.print(s.paint("2", "waiting for the turn before…") + "\n")
	case "turn.retrying":
		s.newline()
		s.print(s.paint("2", "trying again: "+reason(d.Error)) + "\n")
	case "turn.resumed":
		s.text = 0
		s.newline()
		s.print(s.paint("2", "going on after a restart") + "\n")
	case "turn.cancelled":
		s.outcome = &TurnError{"was cancelled", d.Reason}
		s.newline()
		s.ended("33", "cancelled: "+d.Reason)
	case "turn.failed":
		s.outcome = &TurnError{"failed", reason(d.Error)}
		s.newline()
		s.ended("31", "failed: "+reason(d.Error))
	}
}

// ended shows why a turn did not complete; with a single message that is the
// error of Run.
func (s *screen) ended(color, text string) {
	if !s.once {
		s.print(s.paint(color, text) + "\n")
	}
}

// delta shows the part of a message that is not on the screen yet.
func (s *screen) delta(d eventData) {
	end := d.Offset + len(d.Text)
	if end <= s.text || d.Offset > s.text {
		return
	}
	s.print(d.Text[s.text-d.Offset:])
	s.text = end
}

func reason(raw json.RawMessage) string {
	var r Refusal
	if json.Unmarshal(raw, &r) == nil && r.Message != "" {
		if r.Hint != "" {
			return r.Message + " (" + r.Hint + ")"
		}
		return r.Message
	}
	var plain string
	if json.Unmarshal(raw, &plain) == nil {
		return plain
	}
	return string(raw)
}

func clip(t string) string {
	t = strings.Join(strings.Fields(t), " ")
	if r := []rune(t); len(r) > 200 {
		return string(r[:200]) + "…"
	}
	return t
}

func (s *screen) newline() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.fresh {
		_, _ = io.WriteString(s.w, "\n") // the terminal's own
		s.fresh = true
	}
}

func (s *screen) print(t string) {
	if t == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = io.WriteString(s.w, t) // the terminal's own
	s.fresh = strings.HasSuffix(t, "\n")
}

func (s *screen) paint(code, t string) string {
	if !s.color {
		return t
	}
	return "\x1b[" + code + "m" + t + "\x1b[0m"
}
