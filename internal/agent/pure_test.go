package agent

import (
	"testing"

	"github.com/perdure-dev/perdure/internal/wire"
)

func TestDecisionsAreThoseOfTheHandler(t *testing.T) {
	h := &Handler{Registry: NewRegistry(nil, nil, nil), Limits: Limits{MaxToolRounds: 2, MaxToolCalls: 3}}
	retry := &wire.RetryPolicy{MaxAttempts: 9}
	if got, want := NewDecisions(h.Limits, retry).p, h.policy(&Provider{Retry: retry}, nil); got != want {
		t.Fatalf("%+v, the handler's are %+v", got, want)
	}
}
