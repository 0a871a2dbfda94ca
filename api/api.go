// Package api holds the description of the HTTP API.
package api

import _ "embed"

// OpenAPI is the description of the HTTP API in OpenAPI 3.1, as JSON. It is
// written by hand; tests of package httpapi hold it to the handlers.
//
//go:embed openapi.json
var OpenAPI []byte
