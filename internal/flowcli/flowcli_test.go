package flowcli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/spf13/cobra"
)

// TestCommands runs the command lines of testdata. Output to Err has "! " before
// it; asked shows what the last command has asked the server for.
//
//	go test ./internal/flowcli -rewrite
func TestCommands(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		f, address := serve(t)
		files := map[string]string{"ca.pem": "nothing", "key": "bad\n"}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "file":
				name := d.CmdArgs[0].Key
				files[name] = d.Input
				return "ok"
			case "run":
				r := runner{address: address, files: files, stdin: "", color: d.HasArg("color"), width: 0}
				if d.HasArg("narrow") {
					r.width = 60
				}
				d.MaybeScanArgs(t, "stdin", &r.stdin)
				out := ""
				for line := range strings.Lines(d.Input) {
					out += r.run(t, split(strings.TrimSpace(line)))
				}
				return out
			case "asked":
				return f.asked()
			}
			t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
			return ""
		})
	})
}

type runner struct {
	address, stdin string
	files          map[string]string
	color          bool
	width          int
}

// run is the program: it gives what it prints, and the exit code when it is not 0.
func (r *runner) run(t *testing.T, args []string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	root := r.root(&out, &errOut)
	root.SetArgs(args)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := root.ExecuteContext(ctx)
	code := ExitCode(err)
	var u *usageError
	if err != nil && !errors.As(err, &u) && strings.Contains(err.Error(), "flag") {
		code = ExitUsage // cobra's own refusals are usage in main
	}
	if err != nil && err.Error() != "" {
		fmt.Fprintln(&errOut, "perdure: "+err.Error())
	}
	text := out.String()
	for line := range strings.Lines(errOut.String()) {
		text += "! " + line
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	if code != 0 {
		text += fmt.Sprintf("exit %d\n", code)
	}
	text = strings.ReplaceAll(text, r.address, "ADDRESS")
	return strings.ReplaceAll(text, "\x1b", "ESC")
}

func (r *runner) root(out, errOut *bytes.Buffer) *cobra.Command {
	root := &cobra.Command{Use: "perdure", SilenceUsage: true, SilenceErrors: true}
	root.SetOut(out)
	root.SetErr(errOut)
	root.AddCommand(Commands(Env{
		In: strings.NewReader(r.stdin), Out: out, Err: errOut, Color: r.color, Width: r.width,
		Now: func() time.Time { return now }, Zone: time.FixedZone("CET", 3600),
		Getenv: func(k string) string {
			return map[string]string{"PERDURE_ADDRESS": r.address, "BAD_KEY": "bad", "GOOD_KEY": "good"}[k]
		},
		ReadFile: func(name string) ([]byte, error) {
			if text, ok := r.files[name]; ok {
				return []byte(text), nil
			}
			return nil, &fs.PathError{Op: "open", Path: name, Err: os.ErrNotExist}
		},
	})...)
	return root
}

// split takes a command line apart, with single and double quotes.
func split(line string) []string {
	var args []string
	var cur strings.Builder
	open, quote := false, rune(0)
	for _, c := range line {
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote == 0 && (c == '\'' || c == '"'):
			quote, open = c, true
		case quote == 0 && c == ' ':
			if open {
				args = append(args, cur.String())
				cur.Reset()
				open = false
			}
		default:
			cur.WriteRune(c)
			open = true
		}
	}
	if open {
		args = append(args, cur.String())
	}
	return args
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 12 * time.Microsecond: "12µs", 340 * time.Millisecond: "340ms", 1234 * time.Millisecond: "1.2s",
		59 * time.Second: "59s", 125 * time.Second: "2m5s", 2 * time.Hour: "2h", 50 * time.Hour: "2d2h",
	} {
		if got := span(d); got != want {
			t.Errorf("%d is %s, want %s", d, got, want)
		}
	}
}

func FuzzCheckJSON(f *testing.F) {
	for _, s := range []string{"", "{", `{"a":1,}`, "hello", "[1,2", "{\"a\":\n tru}", `"\x"`, "nul", "1 2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if err := checkJSON([]byte(s)); err != nil && err.Error() == "" {
			t.Error("an error without words")
		}
	})
}
