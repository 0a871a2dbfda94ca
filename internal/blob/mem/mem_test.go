package mem_test

import (
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/blob/blobtest"
	"github.com/perdure-dev/perdure/internal/blob/mem"
)

func TestConformance(t *testing.T) {
	blobtest.Run(t, func(*testing.T) blob.Store { return mem.New(mem.Options{}) })
}

func TestImmutableKeysAreHeldTo(t *testing.T) {
	s := mem.New(mem.Options{Immutable: func(key string) bool { return strings.HasPrefix(key, "log/") }})
	put := func(key, data string) (panicked bool) {
		defer func() { panicked = recover() != nil }()
		if _, err := s.Put(t.Context(), key, []byte(data), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		return false
	}
	for _, c := range []struct {
		key, data string
		want      bool
	}{{"log/1", "a", false}, {"log/1", "a", false}, {"log/1", "b", true}, {"other", "a", false}, {"other", "b", false}} {
		if got := put(c.key, c.data); got != c.want {
			t.Errorf("%v: panicked %v", c, got)
		}
	}
	if err := s.Delete(t.Context(), "log/1", blob.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if !put("log/1", "b") {
		t.Error("another content after a delete was taken")
	}
}
