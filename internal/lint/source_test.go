package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/perdure-dev/perdure/"

// source is one Go file, by its slash path inside the repository.
type source struct {
	name string
	text []byte
	fset *token.FileSet
	ast  *ast.File
}

func parseSource(name string, text []byte) (*source, error) {
	s := &source{name: name, text: text, fset: token.NewFileSet()}
	var err error
	s.ast, err = parser.ParseFile(s.fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
	return s, err
}

func (s *source) pkg() string     { return path.Dir(s.name) }
func (s *source) isTest() bool    { return strings.HasSuffix(s.name, "_test.go") }
func (s *source) generated() bool { return ast.IsGenerated(s.ast) }

func (s *source) finding(pos token.Pos, format string, args ...any) string {
	return fmt.Sprintf("%s:%d: %s", s.name, s.fset.Position(pos).Line, fmt.Sprintf(format, args...))
}

// readSources parses every Go file of the repository.
func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

func readSources(t *testing.T) []*source {
	t.Helper()
	root := filepath.Join("..", "..")
	var out []*source
	err := filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch name := d.Name(); {
			case rel == ".":
			case name == "testdata", name == "node_modules", name == "bin", name == "data", strings.HasPrefix(name, "."):
				return filepath.SkipDir
			}
			if rel != "." && isModule(p) {
				return filepath.SkipDir // a program of its own: a peer
			}
			return nil
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		s, err := parseSource(filepath.ToSlash(rel), text)
		if err != nil {
			return err
		}
		out = append(out, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 10 {
		t.Fatalf("found only %d Go files: is the test run inside the repository?", len(out))
	}
	return out
}

func within(pkg string, parents []string) bool {
	return slices.ContainsFunc(parents, func(p string) bool { return pkg == p || strings.HasPrefix(pkg, p+"/") })
}

func levelOf(pkg string) (int, bool) {
	for _, l := range levels {
		if l.pkg == pkg {
			return l.level, true
		}
	}
	return 0, false
}

// checkImports enforces the order of the packages. Tests may look upward.
func checkImports(s *source) (out []string) {
	own, ok := levelOf(s.pkg())
	if !ok {
		return []string{s.finding(s.ast.Package, "package %s is not in the table of levels (internal/lint/rules_test.go): give it a level", s.pkg())}
	}
	if s.isTest() {
		return nil
	}
	for _, imp := range s.ast.Imports {
		p, _ := strconv.Unquote(imp.Path.Value)
		target, ok := strings.CutPrefix(p, module)
		if !ok {
			continue
		}
		if other, ok := levelOf(target); !ok {
			out = append(out, s.finding(imp.Pos(), "imports %s, which is not in the table of levels", target))
		} else if other >= own {
			out = append(out, s.finding(imp.Pos(), "%s (level %d) imports %s (level %d): imports go downward only", s.pkg(), own, target, other))
		}
	}
	return out
}

// importNames maps the name a file uses for an import to its path.
func (s *source) importNames() map[string]string {
	names := map[string]string{}
	for _, imp := range s.ast.Imports {
		p, _ := strconv.Unquote(imp.Path.Value)
		name := path.Base(p)
		if name == "v2" || name == "v3" {
			name = path.Base(path.Dir(p))
		}
		if imp.Name != nil {
			name = imp.Name.Name
		}
		names[name] = p
	}
	return names
}

// checkSeam enforces the one way to the outside world.
func checkSeam(s *source) (out []string) {
	if s.isTest() {
		return checkTestSleep(s)
	}
	banned := map[string]string{} // import path or path.Func → what to use
	for _, r := range seam {
		if !within(s.pkg(), r.allowed) {
			for _, n := range r.names {
				banned[n] = r.instead
			}
		}
	}
	for _, imp := range s.ast.Imports {
		p, _ := strconv.Unquote(imp.Path.Value)
		if instead, ok := banned[p]; ok {
			out = append(out, s.finding(imp.Pos(), "imports %s outside the seam; use %s", p, instead))
		}
		if imp.Name != nil && imp.Name.Name == "." {
			out = append(out, s.finding(imp.Pos(), "imports %s with a dot, which hides what is called", p))
		}
	}
	return append(out, s.selectors(func(name string) (string, bool) {
		instead, ok := banned[name]
		return "uses " + name + " outside the seam; use " + instead, ok
	})...)
}

// checkTestSleep: a test that sleeps is slow or flaky, mostly both. Packages
// that measure the outside world, and benchmarks, may pace themselves; in a
// bubble of synctest a sleep takes no time.
func checkTestSleep(s *source) (out []string) {
	if !strings.HasPrefix(s.name, "internal/") || path.Base(s.name) == "bench_test.go" || within(s.pkg(), seam[0].allowed) {
		return nil
	}
	names := s.importNames()
	is := func(e ast.Expr, want string) bool {
		sel, ok := e.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		id, ok := sel.X.(*ast.Ident)
		return ok && names[id.Name]+"."+sel.Sel.Name == want
	}
	ast.Inspect(s.ast, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && is(call.Fun, "testing/synctest.Test") {
			return false
		}
		if e, ok := n.(ast.Expr); ok && is(e, "time.Sleep") {
			out = append(out, s.finding(e.Pos(), "sleeps in a test; wait for the event, move a fake clock, or use synctest"))
		}
		return true
	})
	return out
}

// selectors visits each use of a name of an imported package.
func (s *source) selectors(bad func(name string) (string, bool)) (out []string) {
	names := s.importNames()
	ast.Inspect(s.ast, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if id, ok := sel.X.(*ast.Ident); ok && names[id.Name] != "" {
			if msg, ok := bad(names[id.Name] + "." + sel.Sel.Name); ok {
				out = append(out, s.finding(sel.Pos(), "%s", msg))
			}
		}
		return true
	})
	return out
}

// checkGoroutines enforces noGoroutines.
func checkGoroutines(s *source) (out []string) {
	if s.isTest() || !slices.Contains(noGoroutines, s.pkg()) {
		return nil
	}
	ast.Inspect(s.ast, func(n ast.Node) bool {
		if g, ok := n.(*ast.GoStmt); ok {
			out = append(out, s.finding(g.Pos(), "starts a goroutine; %s may not", s.pkg()))
		}
		return true
	})
	return out
}

// checkForm enforces length, names, marks and gofmt.
func checkForm(s *source) (out []string) {
	if s.generated() {
		return nil
	}
	if n := bytes.Count(s.text, []byte("\n")); n > maxLines {
		out = append(out, fmt.Sprintf("%s: %d lines; split it (at most %d)", s.name, n, maxLines))
	}
	if name := strings.TrimSuffix(s.ast.Name.Name, "_test"); slices.Contains(badNames, name) {
		out = append(out, s.finding(s.ast.Name.Pos(), "package name %s does not say what is in it", name))
	}
	for _, group := range s.ast.Comments {
		for _, c := range group.List {
			for _, m := range marks {
				if strings.Contains(c.Text, m) {
					out = append(out, s.finding(c.Pos(), "carries the mark %s: finish it, or write down the limit", m))
				}
			}
		}
	}
	formatted, err := format.Source(s.text)
	if err != nil {
		out = append(out, s.name+": "+err.Error())
	} else if !bytes.Equal(formatted, s.text) {
		out = append(out, s.name+": is not formatted; run make fmt")
	}
	return out
}
