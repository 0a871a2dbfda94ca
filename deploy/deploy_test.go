// Package deploy holds what Perdure is deployed with. Its tests hold those files to
// the product: configurations are loaded, scripts take their dry run.
package deploy

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
)

const sampleKey = "0123456789abcdef0123456789abcdef"

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// load puts a file through the loader of perdure serve; a warning is a failure.
func load(t *testing.T, file string, environ ...string) *config.Config {
	t.Helper()
	cfg, warnings, err := config.Load(config.Input{FS: env.Real().FS, Environ: append(environ, "PERDURE_CONFIG="+file)})
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%s: %v, warnings %q", file, err, warnings)
	}
	return cfg
}

// settings reads NAME=value lines; comments are left out.
func settings(text string) map[string][]string {
	out := map[string][]string{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && !strings.HasPrefix(name, "#") {
			out[name] = append(out[name], value)
		}
	}
	return out
}

func TestSystemdUnit(t *testing.T) {
	unit := settings(read(t, "systemd/perdure.service"))
	for name, want := range map[string]string{
		"DynamicUser": "yes", "StateDirectory": "perdure", "ProtectSystem": "strict", "NoNewPrivileges": "yes",
		"CapabilityBoundingSet": "", "KillSignal": "SIGTERM", "Restart": "always", "LimitCORE": "0",
		"EnvironmentFile": "-/etc/perdure/perdure.env",
	} {
		if got := unit[name]; len(got) != 1 || got[0] != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	// The variables of the example, those that are commented out too.
	lines := strings.ReplaceAll(read(t, "systemd/perdure.env.example"), "\n#", "\n")
	var environ []string
	for name, values := range settings(lines) {
		value := values[0]
		if name == "PERDURE_KEY_MAIN" {
			value = sampleKey
		}
		environ = append(environ, name+"="+value)
	}
	cfg := load(t, "systemd/perdure.yaml", environ...)
	if !strings.HasPrefix(cfg.Store, "s3://") || cfg.Cluster.NodeID != "node-1" {
		t.Errorf("store %q, node %q: the example's variables do not count", cfg.Store, cfg.Cluster.NodeID)
	}
	stop, err := time.ParseDuration(unit["TimeoutStopSec"][0])
	if err != nil || stop < cfg.DrainTimeout+30*time.Second {
		t.Errorf("TimeoutStopSec %v (%v) is not well above drain_timeout %v", stop, err, cfg.DrainTimeout)
	}
}

func TestSystemdVerify(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not on this machine")
	}
	text := strings.ReplaceAll(read(t, "systemd/perdure.service"), "/usr/local/bin/perdure", "/bin/true")
	unit := filepath.Join(t.TempDir(), "perdure.service")
	if err := os.WriteFile(unit, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(analyze, "verify", unit).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

type probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
}

type variable struct {
	Name, Value string
	ValueFrom   struct {
		ConfigMapKeyRef struct{ Name, Key string } `yaml:"configMapKeyRef"`
		FieldRef        struct {
			FieldPath string `yaml:"fieldPath"`
		} `yaml:"fieldRef"`
	} `yaml:"valueFrom"`
}

type container struct {
	Args            []string
	Env             []variable
	StartupProbe    probe `yaml:"startupProbe"`
	LivenessProbe   probe `yaml:"livenessProbe"`
	ReadinessProbe  probe `yaml:"readinessProbe"`
	SecurityContext struct {
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
	} `yaml:"securityContext"`
	Resources struct{ Requests, Limits map[string]string }
	EnvFrom   []struct {
		SecretRef struct{ Name string } `yaml:"secretRef"`
	} `yaml:"envFrom"`
}

type manifest struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name, Namespace string }
	Data       map[string]string
	Spec       struct {
		Replicas int
		Strategy struct {
			RollingUpdate struct {
				MaxUnavailable int `yaml:"maxUnavailable"`
			} `yaml:"rollingUpdate"`
		}
		Template struct {
			Spec struct {
				Grace           int   `yaml:"terminationGracePeriodSeconds"`
				ServiceLinks    *bool `yaml:"enableServiceLinks"`
				SecurityContext struct {
					RunAsNonRoot bool `yaml:"runAsNonRoot"`
				} `yaml:"securityContext"`
				Containers []container
			}
		}
	}
}

func manifests(t *testing.T) map[string]manifest {
	t.Helper()
	out := map[string]manifest{}
	dec := yaml.NewDecoder(strings.NewReader(read(t, "kubernetes/perdure.yaml")))
	for {
		var m manifest
		if err := dec.Decode(&m); err != nil {
			if err.Error() != "EOF" {
				t.Fatal(err)
			}
			return out
		}
		if m.APIVersion == "" || m.Metadata.Name != "perdure" || m.Metadata.Namespace != "" {
			t.Errorf("%s: version %q, name %q, namespace %q", m.Kind, m.APIVersion, m.Metadata.Name, m.Metadata.Namespace)
		}
		out[m.Kind] = m
	}
}

func TestKubernetes(t *testing.T) {
	all := manifests(t)
	for _, kind := range []string{"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"} {
		if all[kind].Kind == "" {
			t.Fatalf("there is no %s", kind)
		}
	}
	spec := all["Deployment"].Spec
	pod, c := spec.Template.Spec, spec.Template.Spec.Containers[0]
	if spec.Replicas != 2 || spec.Strategy.RollingUpdate.MaxUnavailable != 0 {
		t.Errorf("%d replicas of which %d may be away: a roll-out must keep a standby", spec.Replicas, spec.Strategy.RollingUpdate.MaxUnavailable)
	}
	if c.StartupProbe.HTTPGet.Path != "/healthz" || c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
		t.Errorf("probes ask %q, %q and %q", c.StartupProbe.HTTPGet.Path, c.LivenessProbe.HTTPGet.Path, c.ReadinessProbe.HTTPGet.Path)
	}
	s := c.SecurityContext
	if !pod.SecurityContext.RunAsNonRoot || !s.ReadOnlyRootFilesystem || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation {
		t.Errorf("the container may more than it needs: %+v %+v", pod.SecurityContext, s)
	}
	if c.Resources.Limits["memory"] == "" || c.Resources.Requests["cpu"] == "" {
		t.Errorf("resources are %+v", c.Resources)
	}
	if pod.ServiceLinks == nil || *pod.ServiceLinks {
		t.Error("enableServiceLinks is on: PERDURE_PORT and the like would be taken for settings")
	}
	if len(c.EnvFrom) != 1 || c.EnvFrom[0].SecretRef.Name != "perdure" {
		t.Errorf("variables come from %+v, want the Secret", c.EnvFrom)
	}
	cfg := podConfig(t, all["ConfigMap"].Data, c.Env)
	if grace := time.Duration(pod.Grace) * time.Second; grace < cfg.DrainTimeout+30*time.Second {
		t.Errorf("terminationGracePeriodSeconds %v is not well above drain_timeout %v", grace, cfg.DrainTimeout)
	}
	if !strings.HasPrefix(cfg.Store, "s3://") || cfg.Cluster.NodeID == "" || len(cfg.Auth.Keys) == 0 {
		t.Errorf("store %q, node %q, %d keys", cfg.Store, cfg.Cluster.NodeID, len(cfg.Auth.Keys))
	}
}

// podConfig is the configuration that a pod comes to.
func podConfig(t *testing.T, data map[string]string, variables []variable) *config.Config {
	t.Helper()
	fields := map[string]string{"metadata.name": "perdure-5f6c7d8b9c-x2x4z", "status.podIP": "10.0.0.11"}
	environ := []string{"PERDURE_KEY_MAIN=" + sampleKey}
	for _, v := range variables {
		value := v.Value
		if key := v.ValueFrom.ConfigMapKeyRef.Key; key != "" {
			value = data[key]
		} else if path := v.ValueFrom.FieldRef.FieldPath; path != "" {
			value = fields[path]
		}
		value = strings.ReplaceAll(value, "$(POD_IP)", fields["status.podIP"])
		if value == "" {
			t.Errorf("variable %s is empty", v.Name)
		}
		environ = append(environ, v.Name+"="+value)
	}
	file := filepath.Join(t.TempDir(), "perdure.yaml")
	if err := os.WriteFile(file, []byte(data["perdure.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	return load(t, file, environ...)
}

func TestContainerfile(t *testing.T) {
	text := read(t, "container/Containerfile")
	for _, want := range []string{"FROM scratch\n", "CGO_ENABLED=0", "ca-certificates.crt", "USER 65532:65532", "VOLUME /var/lib/perdure", "ARG VERSION", `ENTRYPOINT ["/perdure"]`} {
		if !strings.Contains(text, want) {
			t.Errorf("Containerfile has no %q", want)
		}
	}
}

// script takes the dry run of a script with programs on the PATH that must not be
// called, and returns the commands that it printed.
func script(t *testing.T, name string, args ...string) string {
	t.Helper()
	bin := t.TempDir()
	for _, program := range []string{"aws", "ssh", "scp", "ssh-keygen", "curl", "go"} {
		if err := os.WriteFile(filepath.Join(bin, program), []byte("#!/bin/sh\necho CALLED >&2\nexit 99\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("bash", append([]string{"aws/" + name, "--dry-run", "--run", "dry-run-test", "--region", "eu-central-1"}, args...)...)
	if name == "reproduce.sh" {
		cmd.Args = slices.DeleteFunc(cmd.Args, func(a string) bool { return a == "--region" || a == "eu-central-1" })
	}
	cmd.Env = []string{"PATH=" + bin + ":/usr/bin:/bin", "AWS_SECRET_ACCESS_KEY=" + sampleKey}
	var out, words bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &words
	if err := cmd.Run(); err != nil || strings.Contains(words.String(), "CALLED") {
		t.Fatalf("%s: %v\n%s", name, err, words.String())
	}
	if strings.Contains(out.String()+words.String(), sampleKey) {
		t.Errorf("%s prints a secret", name)
	}
	if _, err := os.Stat("aws/run/dry-run-test"); err == nil {
		t.Errorf("the dry run of %s left files", name)
	}
	return out.String()
}

// inOrder checks that the words come one after the other.
func inOrder(t *testing.T, text string, words ...string) {
	t.Helper()
	at := 0
	for _, w := range words {
		i := strings.Index(text[at:], w)
		if i < 0 {
			t.Fatalf("%q does not come where it should in:\n%s", w, text)
		}
		at += i + len(w)
	}
}

func TestLaunchDryRun(t *testing.T) {
	out := script(t, "launch.sh")
	inOrder(t, out, "create-bucket", "put-bucket-tagging", "put-public-access-block", "create-role", "put-role-policy",
		"create-instance-profile", "create-security-group", "--port 22 --cidr 192.0.2.1/32", "--port 8080 --source-group",
		"import-key-pair", "run-instances", "run-instances", "wait instance-running")
	for line := range strings.Lines(out) {
		for _, made := range []string{"put-bucket-tagging", "create-role", "create-instance-profile", "create-security-group", "import-key-pair", "run-instances"} {
			if strings.Contains(line, " "+made+" ") && !strings.Contains(line, "Key=perdure-run,Value=dry-run-test") {
				t.Errorf("made without the tag: %s", line)
			}
		}
	}
	if strings.Contains(out, "0.0.0.0/0") || strings.Contains(out, `"s3:*"`) || strings.Contains(out, `"Resource":"*"`) {
		t.Error("the run allows more than it needs")
	}
}

func TestReproduceDryRun(t *testing.T) {
	out := script(t, "reproduce.sh", "--scenarios", "flow-start", "--clients", "1,64", "--rounds", "1", "--stores", "s3")
	inOrder(t, out, "go build", "scp ", "perdure-install", "api.key", "perdure-restart", "perdure bench flow-start", "--clients 1 ",
		"perdure-restart", "--clients 64 ", "systemctl stop perdure", "scp -r")
}

func TestTeardownDryRun(t *testing.T) {
	out := script(t, "teardown.sh")
	inOrder(t, out, "terminate-instances", "wait instance-terminated", "delete-security-group", "delete-key-pair",
		"remove-role-from-instance-profile", "delete-instance-profile", "delete-role-policy", "delete-role",
		"s3 rm", "delete-bucket", "rm -rf")
	for _, listed := range []string{"describe-instances", "describe-security-groups", "describe-key-pairs"} {
		inOrder(t, out, listed, "Name=tag:perdure-run,Values=dry-run-test")
	}
}

func TestScriptsRefuse(t *testing.T) {
	for _, args := range [][]string{
		{"launch.sh", "--run", "../x"}, {"launch.sh", "--ssh-cidr", "0.0.0.0/0"}, {"launch.sh", "--hours", "0"}, {"launch.sh", "--nothing"},
		{"reproduce.sh", "--scenarios", "a;b"}, {"reproduce.sh", "--server-env", "PATH=x"}, {"teardown.sh", "--run", "A"},
	} {
		cmd := exec.Command("bash", append([]string{"aws/" + args[0], "--dry-run"}, args[1:]...)...)
		if out, err := cmd.CombinedOutput(); err == nil || bytes.Contains(out, []byte("+ aws")) {
			t.Errorf("%v was taken:\n%s", args, out)
		}
	}
}
