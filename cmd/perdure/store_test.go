package main

import (
	"bytes"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	blobfs "github.com/perdure-dev/perdure/internal/blob/fs"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
	"github.com/perdure-dev/perdure/internal/wire"
)

// run gives the output and the exit code of a command line.
func run(t *testing.T, args ...string) (string, int) {
	t.Helper()
	var out bytes.Buffer
	c := root()
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(&out)
	err := c.ExecuteContext(t.Context())
	var ee *exitError
	switch {
	case err == nil:
		return out.String(), exitOK
	case errors.As(err, &ee):
		return out.String() + err.Error(), ee.code
	}
	return out.String() + err.Error(), exitUsage
}

// storeOf makes a store of one partition with one entry.
func storeOf(t *testing.T, folder string) {
	t.Helper()
	s, err := blobfs.Open(env.Real().FS, folder)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := (&wire.Entry{Lsn: 1, TimeUs: 1_800_000_000_000_000}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	frame := journal.Frame{Epoch: 1, Nonce: 1, Seq: 1, FirstLSN: 1, Count: 1, Body: journal.AppendEntry(nil, entry)}
	for key, data := range map[string][]byte{
		"layout.json":               []byte(`{"format":1,"partitions":1}`),
		cluster.OwnerKey(0):         []byte(`{"format":1,"epoch":1,"node":"n","address":"","nonce":"00000000000000aa","window":4,"head_seq":1,"head_lsn":1,"released":false,"tail_seq":0}`),
		objectlog.Key("p000", 1):    journal.AppendFrame(nil, frame),
		"blobs/00/a.owner":          []byte("f"),
		cluster.NodeKey("n"):        []byte("x"), // damaged: a warning
		objectlog.Key("p000", 3):    []byte("x"), // never acknowledged
		"types/default":             nil,
		"p000/snapshot/table/other": nil,
	} {
		if _, err := s.Put(t.Context(), key, data, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStoreCommands(t *testing.T) {
	dir := t.TempDir()
	store, copied, back := filepath.Join(dir, "data", "objects"), filepath.Join(dir, "copy"), filepath.Join(dir, "back")
	storeOf(t, store)
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"doctor", "store", filepath.Join(dir, "data")}, exitOK, "0 damage, 2 warnings, 1 harmless"},
		{[]string{"doctor", "store", filepath.Join(dir, "data"), "--json"}, exitOK, `{"status":"warning"`},
		{[]string{"doctor", "store", "file://" + store}, exitOK, "0 damage"},
		{[]string{"doctor", "store", filepath.Join(dir, "none")}, exitUsage, "holds no store"},
		{[]string{"doctor", "store", "s4://user:secret@bucket/x"}, exitUsage, `stores of kind "s4"`},
		{[]string{"backup", "--from", store}, exitUsage, "--from and --to"},
		{[]string{"backup", "--from", store, "--to", copied}, exitOK, "1 partitions with entries up to 2027-01-15T08:00:00Z"},
		{[]string{"backup", "--from", store, "--to", copied}, exitUsage, "not empty"},
		{[]string{"doctor", "store", copied}, exitOK, "0 damage, 0 warnings, 0 harmless"},
		{[]string{"restore", "--from", copied, "--to", back, "--json"}, exitOK, `"last_lsn":1`},
		{[]string{"doctor", "store", back}, exitOK, "epoch 3 of backup, released"},
	} {
		out, code := run(t, tt.args...)
		if code != tt.code || !strings.Contains(out, tt.want) || strings.Contains(out, "secret") {
			t.Errorf("%v: code %d, want %d with %q:\n%s", tt.args, code, tt.code, tt.want, out)
		}
	}
	s, err := blobfs.Open(env.Real().FS, copied)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Put(t.Context(), objectlog.Key("p000", 1), []byte("x"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if out, code := run(t, "doctor", "store", copied); code != exitFailed || !strings.Contains(out, "damage    p000/log/0000000000000001") {
		t.Errorf("code %d: %s", code, out)
	}
	held, err := env.Real().FS.Lock(filepath.Join(copied, "LOCK"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if out, code := run(t, "doctor", "store", copied); code != exitUsage || !strings.Contains(out, "is in use") {
		t.Errorf("code %d: %s", code, out)
	}
}
