package blob

import (
	"crypto/sha256"
	"fmt"
)

// ContentToken is a token made of the content alone: its length and 128 bits
// of its SHA-256.
func ContentToken(data []byte) Token {
	sum := sha256.Sum256(data)
	return Token(fmt.Sprintf("%x-%x", len(data), sum[:16]))
}
