package flowcli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/perdure-dev/perdure/client"
)

const maxInput = 64 << 20 // bytes of a value, as everywhere

// value reads a JSON value of the command line: the text itself, @file, or -
// for the standard input. what names it in errors.
func (a *app) value(what, arg string) (json.RawMessage, error) {
	text, from := []byte(arg), ""
	var err error
	switch {
	case arg == "-":
		from = "the standard input"
		text, err = io.ReadAll(io.LimitReader(a.In, maxInput+1))
	case strings.HasPrefix(arg, "@"):
		from = arg[1:]
		text, err = a.ReadFile(from)
	}
	if err != nil {
		return nil, usage("%s: %v", what, err)
	}
	if len(text) > maxInput {
		return nil, usage("%s has more than %d bytes", what, maxInput)
	}
	text = bytes.TrimSpace(text)
	if err := checkJSON(text); err != nil {
		if from != "" {
			what += " in " + from
		}
		return nil, usage("%s is not JSON: %v", what, err)
	}
	return text, nil
}

// checkJSON says where a text is not JSON, and what is meant often.
func checkJSON(text []byte) error {
	var v any
	err := json.Unmarshal(text, &v)
	if err == nil {
		return nil
	}
	if len(text) == 0 {
		return errors.New("it is empty; null is the value that is none")
	}
	if bare(text) {
		return fmt.Errorf("text needs double quotes, in the shell as '%q'", text)
	}
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return err
	}
	at := int(syntax.Offset) - 1
	if at >= len(text) || strings.Contains(err.Error(), "unexpected end") {
		return errors.New("it ends too early; something is not closed")
	}
	at = max(at, 0)
	line := 1 + bytes.Count(text[:at], []byte("\n"))
	begin := bytes.LastIndexByte(text[:at], '\n') + 1
	end := len(text)
	if i := bytes.IndexByte(text[at:], '\n'); i >= 0 {
		end = at + i
	}
	// A long line is shown around the place.
	begin, end = max(begin, at-60), min(end, at+20)
	where := ""
	if line > 1 {
		where = fmt.Sprintf(" in line %d", line)
	}
	return fmt.Errorf("%s%s\n%s", strings.TrimPrefix(err.Error(), "json: "), where, caret(string(text[begin:end]), at-begin))
}

// bare says that a text looks like one whose quotes the shell has eaten.
func bare(text []byte) bool {
	return !bytes.ContainsAny(text, "\"{}[]\n") && !('0' <= text[0] && text[0] <= '9' || text[0] == '-')
}

// caret shows a line and a mark below the byte at pos.
func caret(line string, pos int) string {
	pos = min(max(pos, 0), len(line))
	return "  " + line + "\n  " + strings.Repeat(" ", utf8.RuneCountInString(line[:pos])) + "^"
}

// queryError shows where a query is wrong.
type queryError struct {
	query string
	err   *client.Error
}

func (e *queryError) Error() string {
	msg := "the query is wrong: " + e.err.Message + "\n" + caret(strings.NewReplacer("\n", " ", "\t", " ").Replace(e.query), e.err.Position)
	if e.err.Hint != "" {
		msg += "\n" + e.err.Hint
	}
	return msg
}

func (e *queryError) Unwrap() error { return e.err }

// assignments reads name=JSON arguments; names stay in order.
func (a *app) assignments(what string, args []string) ([]client.Attribute, error) {
	out := make([]client.Attribute, 0, len(args))
	for _, arg := range args {
		name, text, ok := strings.Cut(arg, "=")
		if !ok || name == "" {
			return nil, usage("%q is not %s=JSON", arg, what)
		}
		v, err := a.value("the value of "+name, text)
		if err != nil {
			return nil, err
		}
		out = append(out, client.Attribute{Name: name, Value: v})
	}
	return out, nil
}

// instant reads a time: RFC 3339, or a date and time of day in the shown zone.
func (a *app) instant(what, text string) (time.Time, error) {
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		return t, nil
	}
	for _, layout := range []string{"2006-01-02 15:04:05", "2006-01-02 15:04", "2006-01-02"} {
		if t, err := time.ParseInLocation(layout, text, a.Zone); err == nil {
			return t, nil
		}
	}
	if d, err := time.ParseDuration(text); err == nil {
		return a.Now().Add(d), nil
	}
	return time.Time{}, usage(`%s is %q, want a time as "2026-03-01T09:00:00Z", "2026-03-01 09:00", "2026-03-01", or "-2h" from now`, what, text)
}
