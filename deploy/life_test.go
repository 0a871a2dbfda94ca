package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestLifeOfARun launches, measures and tears down, twice, on a cloud that is not
// there: programs of the test's own stand in for aws, ssh, scp and ssh-keygen.
func TestLifeOfARun(t *testing.T) {
	root, fake := t.TempDir(), t.TempDir()
	for from, to := range map[string]string{"aws": "deploy/aws", "systemd": "deploy/systemd"} {
		files, err := filepath.Glob(from + "/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if info, err := os.Stat(f); err == nil && !info.IsDir() {
				put(t, filepath.Join(root, to, filepath.Base(f)), read(t, f))
			}
		}
	}
	put(t, filepath.Join(fake, "bin/aws"), read(t, "testdata/aws.sh"))
	put(t, filepath.Join(fake, "bin/scp"), "#!/bin/sh\necho \"scp $*\" >>\"$FAKE/log\"\n")
	put(t, filepath.Join(fake, "bin/ssh"), "#!/bin/sh\necho \"ssh $*\" >>\"$FAKE/log\"\ncase \"$*\" in *perdure-restart*) cat >>\"$FAKE/environment\";; esac\n")
	put(t, filepath.Join(fake, "bin/ssh-keygen"), "#!/bin/sh\nexit 0\n")

	step := func(wantOK bool, input, name string, args ...string) {
		t.Helper()
		cmd := exec.Command("bash", append([]string{filepath.Join(root, "deploy/aws", name), "--run", "t1"}, args...)...)
		cmd.Env = []string{"PATH=" + filepath.Join(fake, "bin") + ":/usr/bin:/bin", "FAKE=" + fake, "AWS_REGION=us-east-1"}
		cmd.Stdin = strings.NewReader(input)
		if out, err := cmd.CombinedOutput(); (err == nil) != wantOK {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
	}
	there := func(name string) bool {
		_, err := os.Stat(filepath.Join(fake, name))
		return err == nil
	}
	step(true, "", "launch.sh", "--ssh-cidr", "192.0.2.1/32")
	step(false, "", "launch.sh", "--ssh-cidr", "192.0.2.1/32")
	key := read(t, filepath.Join(root, "deploy/aws/run/t1/api.key"))
	step(true, "", "reproduce.sh", "--binary", "/bin/true", "--clients", "1", "--scenarios", "flow-start", "--rounds", "1",
		"--stores", "s3", "--out", filepath.Join(root, "results"))
	environment := settings(read(t, filepath.Join(fake, "environment")))
	if len(key) != 64 || environment["PERDURE_KEY_MAIN"][0] != key || !strings.HasPrefix(environment["PERDURE_STORE"][0], "s3://perdure-bench-t1-123456789012/bench/") {
		t.Errorf("the server got %d variables, not its key and its bucket", len(environment))
	}
	step(false, "no\n", "teardown.sh")
	if !there("up") || !there("bucket") {
		t.Error("teardown went on after a no")
	}
	step(true, "t1\n", "teardown.sh")
	step(true, "", "teardown.sh", "--yes")
	if there("up") || there("bucket") {
		t.Error("teardown left something")
	}
	if _, err := os.Stat(filepath.Join(root, "deploy/aws/run/t1")); err == nil {
		t.Error("teardown left the run's keys")
	}
	if strings.Contains(read(t, filepath.Join(fake, "log")), key) {
		t.Error("the key is in a command line")
	}
}

// put writes a program or a file, with its folders.
func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
}
