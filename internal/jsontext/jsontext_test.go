package jsontext

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "plain", "quote\" back\\ line\n\r\t\x00\x1f", "grüße 你好 \U0001F600", "bad \xff\xc3 end\xe4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := AppendString([]byte("x"), s)[1:]
		if !bytes.Equal(got, AppendString(nil, []byte(s))) {
			t.Fatal("string and bytes differ")
		}
		if bytes.ContainsAny(got, "\n\r\x00") {
			t.Fatalf("%q is not on one line", got)
		}
		var back string
		if err := json.Unmarshal(got, &back); err != nil {
			t.Fatalf("%q: %v", got, err)
		}
		if want := strings.ToValidUTF8(s, "\ufffd"); strings.ToValidUTF8(back, "") != back || len([]rune(back)) < len([]rune(want)) {
			t.Fatalf("%q came back as %q", s, back)
		}
		std, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var wanted string
		if err := json.Unmarshal(std, &wanted); err != nil || wanted != back {
			t.Fatalf("%q: encoding/json gives %q", back, wanted)
		}
	})
}

func TestAppendField(t *testing.T) {
	if got := string(AppendField(nil, "a", `b"`)); got != `"a":"b\""` {
		t.Fatal(got)
	}
}
