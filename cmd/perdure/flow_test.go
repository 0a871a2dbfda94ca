package main

import (
	"errors"
	"testing"

	"github.com/perdure-dev/perdure/internal/flowcli"
)

// TestFlowExitCodes: what flowcli says reaches the process.
func TestFlowExitCodes(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
	}{
		{[]string{"flow", "list", "--address", "127.0.0.1:1"}, flowcli.ExitUnavailable},
		{[]string{"flow", "set", "f", "--address", "127.0.0.1:1", "--key-file", "/nowhere/key"}, flowcli.ExitUsage},
		{[]string{"schedule", "nothing"}, 0}, // main itself takes what has no code for usage
		{[]string{"flow", "describe"}, 0},
	} {
		c := root()
		c.SetArgs(tt.args)
		err := c.Execute()
		var ee *exitError
		code := 0
		if errors.As(err, &ee) {
			code = ee.code
		}
		if err == nil || code != tt.code {
			t.Errorf("%v: code %d, %v, want %d", tt.args, code, err, tt.code)
		}
	}
}
