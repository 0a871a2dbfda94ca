package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// exportData maps import paths to their compiled form, so that types of
// imports are known without compiling them here.
func exportData(t *testing.T, pkgs ...string) map[string]string {
	t.Helper()
	args := []string{"list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}"}
	for _, p := range pkgs {
		args = append(args, "./"+p)
	}
	cmd := exec.Command("go", args...)
	cmd.Dir = "../.."
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, file, _ := strings.Cut(strings.TrimSpace(line), "\t")
		out[name] = file
	}
	return out
}

// typeCheck resolves the types of one package's files.
func typeCheck(files []*source, exports map[string]string) (*types.Info, error) {
	fset := token.NewFileSet()
	var asts []*ast.File
	for i, s := range files {
		again, err := parseInto(fset, s)
		if err != nil {
			return nil, err
		}
		files[i] = again
		asts = append(asts, again.ast)
	}
	lookup := func(p string) (io.ReadCloser, error) {
		if exports[p] == "" {
			return nil, fmt.Errorf("no export data for %s", p)
		}
		return os.Open(exports[p])
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", lookup)}
	_, err := conf.Check(files[0].pkg(), fset, asts, info)
	return info, err
}

// checkPure finds what makes a package more than a function of its input.
func checkPure(s *source, info *types.Info) (out []string) {
	for _, imp := range s.ast.Imports {
		if p, _ := strconv.Unquote(imp.Path.Value); slices.Contains(impureImports, p) {
			out = append(out, s.finding(imp.Pos(), "imports %s, but the package is pure", p))
		}
	}
	say := func(n ast.Node, what string) {
		out = append(out, s.finding(n.Pos(), "%s, but the package is pure", what))
	}
	ast.Inspect(s.ast, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			say(n, "starts a goroutine")
		case *ast.SelectStmt:
			say(n, "selects on channels")
		case *ast.SendStmt:
			say(n, "sends on a channel")
		case *ast.ChanType:
			say(n, "uses a channel")
		case *ast.RangeStmt:
			if isMap(info.TypeOf(n.X)) {
				say(n, "iterates over a map, whose order is random")
			}
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && len(n.Args) > 0 && isMap(info.TypeOf(n.Args[0])) {
				if id, ok := sel.X.(*ast.Ident); ok && id.Name == "maps" && slices.Contains([]string{"All", "Keys", "Values"}, sel.Sel.Name) {
					say(n, "iterates over a map, whose order is random")
				}
			}
		}
		return true
	})
	return out
}

func isMap(t types.Type) bool {
	if t == nil {
		return false
	}
	if p, ok := t.(*types.TypeParam); ok {
		t = p.Constraint()
	}
	_, ok := t.Underlying().(*types.Map)
	return ok
}
