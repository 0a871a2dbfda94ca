package lint

// levels is the order of the packages. A package may import only packages of a
// lower level; packages of the same level never import each other. A package
// that is not here fails the test: put it where it belongs.
var levels = []struct {
	pkg   string
	level int
}{
	{"internal/env", 0},
	{"internal/jsontext", 0},
	{"internal/lint", 0},
	{"api", 0},
	{"internal/wire", 5},
	{"internal/admit", 5},
	{"internal/config", 5},
	{"internal/query", 6},
	{"internal/mux", 8},
	{"flow", 10},
	{"client", 15},

	{"internal/blob", 10},
	{"internal/blob/fs", 12},
	{"internal/blob/mem", 12},
	{"internal/blob/s3", 12},
	{"internal/blob/s3/s3proxy", 13},
	{"internal/blob/s3/versitygw", 13},
	{"internal/blob/blobtest", 14},
	{"internal/journal", 15},
	{"internal/journal/objectlog", 17},
	{"internal/cluster", 32},

	{"internal/core", 20},
	{"internal/oracle", 22},
	{"internal/state", 25},
	{"internal/partition", 30},

	{"internal/effect/model/http1", 33},
	{"internal/effect/model/sse", 33},
	{"internal/effect/model", 35},
	{"internal/effect/tool", 35},
	{"internal/stream", 38},
	{"internal/effect/worker", 40},
	{"internal/dispatch", 40},
	{"internal/tracing", 40},
	{"internal/search", 45},

	{"internal/agent", 45},
	{"internal/session", 50},
	{"internal/schedule", 45},
	{"internal/flows", 50},
	{"internal/sink", 52},
	{"internal/httpapi", 55},
	{"internal/grpcapi", 55},
	{"internal/doctor", 60},
	{"internal/backup", 60},
	{"internal/mockllm", 60},
	{"internal/load", 60},
	{"internal/chat", 60},
	{"internal/flowcli", 60},
	{"internal/server", 70},
	{"internal/bench", 75},
	{"perduretest", 75},
	{"internal/sim", 80},
	{"cmd/perdure", 100},
	{"deploy", 110},
	{"e2e/clients", 110},
	{"e2e/crash", 110},
	{"e2e/docs", 110},
	{"e2e/flows", 110},
	{"e2e/objects", 110},
	{"examples", 110},
}

// seam is what only the packages at the edge may import or call. An entry
// "time.Now" is a call, one without a dot after the path is an import. A
// package under an allowed one is allowed too.
var seam = []struct {
	names   []string
	allowed []string
	instead string
}{
	{
		names: []string{"time.Now", "time.Since", "time.Until", "time.Sleep", "time.After", "time.AfterFunc", "time.NewTimer", "time.NewTicker", "time.Tick"},
		allowed: []string{
			"internal/env",
			"internal/mockllm", "internal/load", "internal/chat", "internal/bench", "internal/flowcli", "flow", "client", "examples", "cmd", // measure or imitate the outside world
		},
		instead: "env.Clock",
	},
	{
		names:   []string{"context.WithTimeout", "context.WithDeadline", "context.WithTimeoutCause", "context.WithDeadlineCause"},
		allowed: []string{"internal/env", "internal/mockllm", "internal/load", "internal/chat", "internal/bench", "internal/flowcli", "flow", "client", "examples", "cmd", "internal/server"},
		instead: "env.Clock.AfterFunc with context.WithCancelCause",
	},
	{
		names:   []string{"math/rand", "math/rand/v2", "crypto/rand"},
		allowed: []string{"internal/env", "internal/mockllm", "internal/load", "internal/bench", "flow", "client"},
		instead: "env.Rand",
	},
	{
		names:   []string{"os", "os/exec", "os/signal", "io/ioutil"},
		allowed: []string{"internal/env", "internal/load", "internal/chat", "internal/bench", "internal/flowcli", "flow", "client", "examples", "cmd", "internal/blob/s3/versitygw"},
		instead: "env.FS, or a value that cmd/perdure passes in",
	},
	{
		names: []string{"syscall", "golang.org/x/sys/unix"},
		allowed: []string{
			"internal/env", "internal/load", "internal/chat", "internal/bench", "cmd",
			"internal/doctor",             // ulimit -n
			"internal/effect/model/http1", // peeks whether an idle connection was closed
		},
		instead: "env",
	},
	{
		names:   []string{"net"},
		allowed: []string{"internal/env", "internal/effect", "internal/blob/s3", "internal/httpapi", "internal/grpcapi", "internal/server", "internal/mockllm", "internal/load", "internal/chat", "internal/bench", "internal/flowcli", "flow", "client", "examples", "internal/doctor", "cmd"},
		instead: "env.Dialer",
	},
	{
		names:   []string{"net/http", "net/http/httputil", "net/http/pprof"},
		allowed: []string{"internal/effect", "internal/blob/s3", "internal/httpapi", "internal/server", "internal/mockllm", "internal/load", "internal/chat", "internal/bench", "internal/doctor", "cmd"},
		instead: "the adapters at the edge",
	},
}

// pure is the packages that are one function of their input: no goroutine, no
// channel, no lock, no iteration over a map.
var pure = []string{"internal/core"}

// noGoroutines is the packages that start none, but may lock.
var noGoroutines = []string{"internal/admit", "internal/config", "internal/core", "internal/wire"}

// impureImports may not be used by a pure package.
var impureImports = []string{"sync", "sync/atomic", "context", "runtime", "unsafe", "log", "log/slog"}

const maxLines = 700

// badNames say nothing about what a package holds.
var badNames = []string{"util", "utils", "common", "helper", "helpers", "type", "types", "manager", "managers", "misc", "shared", "base"}

// marks of unfinished work, split so that this file does not carry them.
var marks = []string{"TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"}
