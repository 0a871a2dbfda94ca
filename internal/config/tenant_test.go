package config

import (
	"crypto/sha256"
	"errors"
	"testing"
)

func TestTenantOfAKey(t *testing.T) {
	if got, err := (Auth{}).Tenant(""); got != DefaultTenant || err != nil {
		t.Errorf("without keys: %q, %v", got, err)
	}
	a := Auth{Keys: []*APIKey{{Tenant: "acme", Digest: sha256.Sum256([]byte("k1"))}, {Tenant: "zeta", Digest: sha256.Sum256([]byte("k2"))}}}
	for header, want := range map[string]string{"Bearer k1": "acme", "bearer  k2 ": "zeta"} {
		if got, err := a.Tenant(header); got != want || err != nil {
			t.Errorf("%q is %q, %v", header, got, err)
		}
	}
	for header, want := range map[string]error{"": ErrNoKey, "Bearer": ErrNoKey, "Bearer ": ErrNoKey, "Basic k1": ErrNoKey, "k1": ErrNoKey, "Bearer k3": ErrBadKey} {
		if got, err := a.Tenant(header); !errors.Is(err, want) || got != "" {
			t.Errorf("%q is %q, %v", header, got, err)
		}
	}
}
