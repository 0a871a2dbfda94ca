package config

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"strings"
)

// DefaultTenant is who calls when no keys are configured.
const DefaultTenant = "default"

// Why Tenant knows nobody.
var (
	ErrNoKey  = errors.New("the API key is missing")
	ErrBadKey = errors.New("the API key is not known to this server")
)

// Tenant finds whom an Authorization header ("Bearer KEY") speaks for. All keys
// are compared, each in constant time, so that the time tells nothing about any
// of them. Errors are ErrNoKey and ErrBadKey.
func (a Auth) Tenant(authorization string) (string, error) {
	if len(a.Keys) == 0 {
		return DefaultTenant, nil
	}
	scheme, given, _ := strings.Cut(authorization, " ")
	given = strings.TrimSpace(given)
	if given == "" || !strings.EqualFold(scheme, "Bearer") {
		return "", ErrNoKey
	}
	digest := sha256.Sum256([]byte(given))
	match := -1
	for i, k := range a.Keys {
		match = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(digest[:], k.Digest[:]), i, match)
	}
	if match < 0 {
		return "", ErrBadKey
	}
	return a.Keys[match].Tenant, nil
}
