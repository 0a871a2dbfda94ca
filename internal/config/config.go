// Package config is the one place where Perdure's settings are named,
// described, bounded and read.
//
// The struct tags of Config are the single table: key names, defaults, ranges,
// documentation, flags, environment variables, the commented default file and
// the error messages all come from them. Tags:
//
//	key      name in YAML (a section, a map of named entries or a leaf)
//	default  value when nothing sets it ("" is the zero value)
//	min,max  inclusive range of an int, a size or a duration
//	enum     allowed words, separated by |
//	check    named extra check (see checks in values.go)
//	flag     a second, shorter flag name
//	example  value shown in the generated file for a named entry
//	doc      one line for people
//
// The package never touches the outside world by itself: files come from an
// env.FS, variables from a slice, both given to Load.
package config

import "time"

// Config is one effective, checked configuration. Treat it as read-only after
// Load; it is then safe for concurrent use.
type Config struct {
	Listen       string        `key:"listen" default:"127.0.0.1:8080" check:"hostport" doc:"Address of the API. Anything but loopback needs auth.keys (or insecure: true)."`
	GRPCListen   string        `key:"grpc_listen" check:"hostport" doc:"A further address for workers and clients of flows (gRPC), with TLS when flows.cert_file is set. Empty = off: listen serves them too."`
	AdminListen  string        `key:"admin_listen" check:"hostport" doc:"Address of the admin server (pprof), which has no authentication. Empty = off."`
	Insecure     bool          `key:"insecure" default:"false" doc:"Allow a non-loopback address without authentication."`
	Data         string        `key:"data" default:"./data" check:"nonempty" doc:"Directory of the journal, the state and the sinks. One process at a time."`
	Store        string        `key:"store" check:"store" doc:"Where the journal lives: empty = local segments with fdatasync in data; s3://bucket/prefix?endpoint=URL&region=R&path_style=true = an object store, with data as its cache; mem: = nothing is persisted."`
	DrainTimeout time.Duration `key:"drain_timeout" default:"30s" min:"0s" max:"1h" doc:"On SIGTERM: how long running turns may go on before they are left to the next start."`
	JSONLDir     string        `key:"jsonl_dir" doc:"Also write transcripts and events as JSONL files into this directory, for export. Empty = off."`

	Kernel    Kernel               `key:"kernel" doc:"Scheduling of turns."`
	Flows     Flows                `key:"flows" doc:"Flows of users' own programs."`
	Limits    Limits               `key:"limits" doc:"What one client may send. Over a limit: a 4xx answer that names it."`
	Auth      Auth                 `key:"auth" doc:"Who may call the API."`
	Providers map[string]*Provider `key:"providers" example:"main" doc:"Model providers by name. With no agent configured, provider demo is there by itself."`
	Tools     map[string]*Tool     `key:"tools" example:"weather" doc:"Tools by name, called as durable steps over HTTP."`
	Agents    map[string]*Agent    `key:"agents" example:"helper" doc:"Agents by name. With none, agent demo answers on provider demo."`
	Journal   Journal              `key:"journal" doc:"The journal."`
	Cluster   Cluster              `key:"cluster" doc:"Processes that share an object store."`
	State     State                `key:"state" doc:"The tables (Pebble)."`
	Sink      Sink                 `key:"sink" doc:"Background writers of transcripts, events and the access log."`
	Metrics   Metrics              `key:"metrics" doc:"Prometheus metrics at /metrics."`
	Log       Log                  `key:"log" doc:"The server's own log, on standard error."`

	origins map[string]Origin // by key path; absent = default
	env     map[string]string // the environment given to Load, for ${NAME} and key_env
}

// Environ reads a variable of the environment that was given to Load; "" when it
// is not set.
func (c *Config) Environ(name string) string { return c.env[name] }

// Kernel bounds the scheduling of turns. Partitions is fixed when a data
// directory is made.
type Kernel struct {
	Partitions               int           `key:"partitions" default:"4" min:"1" max:"256" doc:"Single-writer partitions. Fixed for the life of a data directory."`
	MaxInFlightTurns         int           `key:"max_in_flight_turns" default:"0" min:"0" max:"1000000" doc:"Turns that run at the same time; over it: 429 with Retry-After. 0 = off."`
	SessionTTLSecs           int           `key:"session_ttl_secs" default:"300" min:"1" max:"31536000" doc:"Seconds after which an idle session leaves memory (it stays on disk)."`
	MaxSessionsInMemory      int           `key:"max_sessions_in_memory" default:"20000" min:"16" max:"10000000" doc:"Decoded sessions kept in memory; over it the longest idle leaves before its TTL."`
	MaxSessionBytes          ByteSize      `key:"max_session_bytes" default:"256MiB" min:"1MiB" max:"1024GiB" doc:"Bytes of conversations kept in memory; over it the longest idle session leaves before its TTL."`
	TurnTimeout              time.Duration `key:"turn_timeout" default:"10m" min:"1s" max:"24h" doc:"A turn that runs longer fails, visibly."`
	MaxQueuedTurnsPerSession int           `key:"max_queued_turns_per_session" default:"16" min:"0" max:"1024" doc:"Turns waiting on one session (on_busy: enqueue); over it: 429."`
	MaxToolRounds            int           `key:"max_tool_rounds" default:"16" min:"1" max:"1000" doc:"Model calls with tool calls in one turn before it fails."`
	MaxToolCallsPerRound     int           `key:"max_tool_calls_per_round" default:"32" min:"1" max:"256" doc:"Tool calls taken from one model answer; the rest are answered with an error."`
}

// Flows bounds the flows of users' own programs and their workers.
type Flows struct {
	Retention       time.Duration `key:"retention" default:"168h" min:"1s" max:"876000h" doc:"How long a closed flow is kept when its start says nothing."`
	AttemptTimeout  time.Duration `key:"attempt_timeout" default:"10m" min:"100ms" max:"8760h" doc:"Longest attempt of a step that names no timeout."`
	CallTimeout     time.Duration `key:"call_timeout" default:"60s" min:"100ms" max:"24h" doc:"Longest call of a client that names no timeout, waits apart."`
	WorkerHeartbeat time.Duration `key:"worker_heartbeat" default:"5s" min:"100ms" max:"10m" doc:"A worker that is silent for three of these is lost; its tasks are handed out again."`
	CertFile        string        `key:"cert_file" doc:"Certificate of grpc_listen (PEM). Empty = no TLS."`
	KeyFile         string        `key:"key_file" doc:"Private key of cert_file (PEM)."`
	TraceEndpoint   string        `key:"trace_endpoint" doc:"OpenTelemetry collector (OTLP over gRPC, host:port) that gets spans of flows. Empty = off."`
	TraceRatio      string        `key:"trace_ratio" check:"ratio" default:"0.01" doc:"Share of flows that are traced when the caller did not decide, 0 to 1."`
}

// Limits bounds what one client may send and how long it may stall.
type Limits struct {
	MaxBodyBytes      ByteSize      `key:"max_body_bytes" default:"1MiB" min:"1KiB" max:"256MiB" doc:"Request body; over it: 413."`
	MaxHeaderBytes    ByteSize      `key:"max_header_bytes" default:"32KiB" min:"4KiB" max:"1MiB" doc:"Request line and headers; over it: 431."`
	MaxPromptBytes    ByteSize      `key:"max_prompt_bytes" default:"256KiB" min:"1" max:"64MiB" doc:"Input of one turn; over it: 413."`
	MaxConnections    int           `key:"max_connections" default:"16384" min:"16" max:"1000000" doc:"Open client connections; more wait in the listen queue."`
	MaxRequests       int           `key:"max_requests" default:"16384" min:"16" max:"1000000" doc:"Requests being served, open streams included; over it: 503 with Retry-After."`
	ReadHeaderTimeout time.Duration `key:"read_header_timeout" default:"10s" min:"100ms" max:"10m" doc:"Time for a client to send its headers."`
	ReadBodyTimeout   time.Duration `key:"read_body_timeout" default:"60s" min:"100ms" max:"1h" doc:"Time for a client to send its body."`
	IdleTimeout       time.Duration `key:"idle_timeout" default:"2m" min:"1s" max:"24h" doc:"Keep-alive connections without a request are closed after it."`
	StreamHeartbeat   time.Duration `key:"stream_heartbeat" default:"15s" min:"100ms" max:"10m" doc:"Comment frame on a stream that has nothing to say."`
	StreamStall       time.Duration `key:"stream_stall" default:"30s" min:"100ms" max:"10m" doc:"A reader that takes no byte for this long is closed; it resumes from its cursor."`
	StreamBufferBytes ByteSize      `key:"stream_buffer_bytes" default:"256KiB" min:"4KiB" max:"64MiB" doc:"Frames waiting for one slow reader; over it the reader is closed; it resumes from its cursor."`
}

// Auth lists the API keys. With none, every caller is tenant "default".
type Auth struct {
	Keys []*APIKey `key:"keys" doc:"API keys. Each has exactly one of key_env, key_file, sha256."`
}

// APIKey is one key and the tenant it speaks for.
type APIKey struct {
	Name    string `key:"name" check:"name" example:"ci" doc:"Name in logs; never the key itself."`
	Tenant  string `key:"tenant" default:"default" check:"name" doc:"Tenant whose sessions this key sees."`
	KeyEnv  string `key:"key_env" check:"envname" example:"PERDURE_KEY_CI" doc:"Environment variable that holds the key."`
	KeyFile string `key:"key_file" doc:"File that holds the key."`
	SHA256  string `key:"sha256" check:"sha256" doc:"SHA-256 of the key, 64 hex digits."`

	// Digest is the SHA-256 of the key, filled in by Load.
	Digest [32]byte
}

// Provider is one upstream that answers model calls.
type Provider struct {
	Type             string        `key:"type" enum:"openai|demo" example:"openai" doc:"openai = any OpenAI-compatible API; demo = built in, deterministic, no key."`
	BaseURL          string        `key:"base_url" check:"baseurl" example:"https://api.openai.com/v1" doc:"URL in front of /chat/completions."`
	Model            string        `key:"model" example:"gpt-4o-mini" doc:"Model for agents that name none."`
	APIKeyEnv        string        `key:"api_key_env" check:"envname" example:"OPENAI_API_KEY" doc:"Environment variable that holds the API key."`
	APIKeyFile       string        `key:"api_key_file" doc:"File that holds the API key (instead of api_key_env)."`
	ConcurrencyLimit int           `key:"concurrency_limit" default:"0" min:"0" max:"1000000" doc:"Upstream calls at the same time; more wait. 0 = no limit."`
	ConnectTimeout   time.Duration `key:"connect_timeout" default:"10s" min:"10ms" max:"5m" doc:"Time to connect."`
	FirstByteTimeout time.Duration `key:"first_byte_timeout" default:"60s" min:"10ms" max:"1h" doc:"Time from the request to the answer's first byte."`
	IdleTimeout      time.Duration `key:"idle_timeout" default:"60s" min:"10ms" max:"1h" doc:"Longest silence inside an answer."`
	MaxResponseBytes ByteSize      `key:"max_response_bytes" default:"512KiB" min:"1KiB" max:"64MiB" doc:"Longest answer of one model call."`
	Retry            Retry         `key:"retry" doc:"Retry on 429, 5xx and reset, never after text was shown."`

	// APIKey is filled in by Load from api_key_env or api_key_file.
	APIKey Secret
}

// Retry is an exponential backoff. The provider's Retry-After is honoured as
// long as the turn's time-out allows.
type Retry struct {
	MaxAttempts     int           `key:"max_attempts" default:"4" min:"1" max:"100" doc:"Tries in all."`
	InitialInterval time.Duration `key:"initial_interval" default:"500ms" min:"1ms" max:"1h" doc:"Wait before the second try; doubles after."`
	MaxInterval     time.Duration `key:"max_interval" default:"30s" min:"1ms" max:"1h" doc:"Longest wait between two tries, unless the provider asks for more with Retry-After."`
}

// Agent is one agent: a provider, a text that sets its behaviour, and tools.
type Agent struct {
	Provider           string   `key:"provider" check:"name" example:"main" doc:"Name under providers."`
	Model              string   `key:"model" doc:"Model; empty = the provider's."`
	Instructions       string   `key:"instructions" example:"You are a helpful assistant." doc:"System message."`
	Parameters         JSON     `key:"parameters" example:"{temperature: 0.2}" doc:"Sent with each model call, as given."`
	Tools              []string `key:"tools" example:"[weather]" doc:"Names under tools."`
	MaxContextMessages int      `key:"max_context_messages" default:"200" min:"2" max:"100000" doc:"Newest messages sent to the model; a tool call is never cut from its result."`
}

// Tool is one function the model may call.
type Tool struct {
	Description string   `key:"description" example:"Weather of a city" doc:"What the tool does, for the model."`
	Parameters  JSON     `key:"parameters" example:"{type: object, properties: {city: {type: string}}, required: [city]}" doc:"JSON Schema of the arguments."`
	HTTP        HTTPTool `key:"http" doc:"The request made for a call. GET and DELETE send the arguments as query, the others as a JSON body."`
}

// HTTPTool is how a tool's call goes out.
type HTTPTool struct {
	Method           string        `key:"method" default:"POST" enum:"GET|POST|PUT|PATCH|DELETE" doc:"HTTP method."`
	URL              string        `key:"url" check:"httpurl" example:"https://tools.example.com/weather" doc:"Address of the tool."`
	Headers          Headers       `key:"headers" example:"{X-Team: demo}" doc:"Extra headers. ${NAME} is replaced from the environment. Never shown."`
	Timeout          time.Duration `key:"timeout" default:"30s" min:"1ms" max:"1h" doc:"Whole call."`
	MaxResponseBytes ByteSize      `key:"max_response_bytes" default:"256KiB" min:"1" max:"64MiB" doc:"Longest answer; a longer one is an error result."`
	AllowHosts       []string      `key:"allow_hosts" check:"hosts" example:"[tools.example.com]" doc:"Hosts that the call and its redirects may reach. Empty = only the host of url."`
	AllowPrivate     bool          `key:"allow_private" default:"false" doc:"Allow loopback, private and link-local addresses."`
}

// Journal tunes the journal.
type Journal struct {
	SegmentBytes  ByteSize      `key:"segment_bytes" default:"16MiB" min:"64KiB" max:"4GiB" doc:"Preallocated size of a segment file."`
	MaxBatchBytes ByteSize      `key:"max_batch_bytes" default:"1MiB" min:"4KiB" max:"64MiB" doc:"Largest batch of one sync, or one object."`
	AddedLatency  time.Duration `key:"added_latency" flag:"store-latency" default:"0s" min:"0s" max:"10s" doc:"For tests: each sync, or each PUT to the object store, takes this much longer (a distribution around it)."`
	MaxInFlight   int           `key:"max_in_flight" default:"4" min:"1" max:"16" doc:"Object store: batches of a partition on their way at once, at most. A near store gets fewer by itself."`
	MaxPuts       int           `key:"max_puts_per_second" default:"0" min:"0" max:"100000" doc:"Object store: batches this process puts in a second, all partitions together; what comes meanwhile is gathered. 0 = as many as it takes."`
	Linger        time.Duration `key:"linger" default:"0s" min:"0s" max:"1s" doc:"Object store: least time between the starts of two batches of a partition. More = fewer, larger batches."`
	SnapshotBytes ByteSize      `key:"snapshot_bytes" default:"64MiB" min:"64KiB" max:"1024GiB" doc:"Journal size of a partition at which its tables are snapshot and the journal is trimmed."`
	SnapshotEvery time.Duration `key:"snapshot_every" default:"10m" min:"100ms" max:"24h" doc:"The same by age, so that a quiet partition does not pin its journal."`
}

// Cluster is about processes that share an object store: one is active, the others
// stand by.
type Cluster struct {
	NodeID    string        `key:"node_id" check:"name" doc:"Name of this process in the store, unique there. Empty = one that is made once and kept in data."`
	Advertise string        `key:"advertise" flag:"advertise" check:"hostport" doc:"Address under which the other processes and people find this one. Empty = listen."`
	LeaseTTL  time.Duration `key:"lease_ttl" default:"10s" min:"1s" max:"60s" doc:"How long a process that died is waited for. Its lease is renewed in 0.35 of it, a PUT each time."`
	// FollowEvery costs a GET for each partition.
	FollowEvery time.Duration `key:"follow_every" default:"1s" min:"50ms" max:"1m" doc:"How often a process that stands by looks for new batches: a GET for each partition."`
}

// State tunes the tables.
type State struct {
	CacheBytes    ByteSize `key:"cache_bytes" default:"16MiB" min:"1MiB" max:"64GiB" doc:"Block cache and memory tables, shared by all partitions."`
	MemtableBytes ByteSize `key:"memtable_bytes" default:"1MiB" min:"256KiB" max:"1GiB" doc:"Memory table before a flush."`
}

// Sink bounds the background writers. They are off the request path: events and
// transcripts wait in the tables, so they are never lost to a full queue.
type Sink struct {
	QueueRecords  int           `key:"queue_records" default:"8192" min:"16" max:"1000000" doc:"Access records waiting in memory; more are dropped and counted."`
	BatchRecords  int           `key:"batch_records" default:"512" min:"1" max:"100000" doc:"Records of one write."`
	FlushInterval time.Duration `key:"flush_interval" default:"200ms" min:"1ms" max:"1m" doc:"Longest wait before a write."`
	Retention     time.Duration `key:"retention" default:"720h" min:"0s" max:"87600h" doc:"Age at which access log and events are removed. 0 = never."`
	MaxBytes      ByteSize      `key:"max_bytes" default:"1GiB" min:"1MiB" max:"16384GiB" doc:"Size of access log and events at which the oldest is removed."`
}

// Metrics names the metrics.
type Metrics struct {
	Namespace string `key:"namespace" default:"perdure" check:"metric" doc:"First word of each metric's name."`
}

// Log sets the server's own log.
type Log struct {
	Level  string `key:"level" default:"info" enum:"debug|info|warn|error" flag:"log-level" doc:"Least level that is written."`
	Format string `key:"format" default:"text" enum:"text|json" flag:"log-format" doc:"Form of a line."`
}

// ByteSize is a number of bytes, written 65536, 64KiB, 1MiB or 1GiB.
type ByteSize int64

// JSON is a free-form YAML mapping, kept as compact JSON in the order of the
// file. Nil when not set.
type JSON []byte

// Headers are HTTP headers whose values may hold secrets.
type Headers map[string]Secret

// Secret is a value that never prints. Use Reveal where it is sent.
type Secret struct{ value string }

// NewSecret wraps a value.
func NewSecret(v string) Secret { return Secret{v} }

// Reveal returns the value; only for putting it on the wire.
func (s Secret) Reveal() string { return s.value }

// IsSet reports whether there is a value.
func (s Secret) IsSet() bool { return s.value != "" }

const redacted = "[redacted]"

// String hides the value.
func (s Secret) String() string {
	if s.value == "" {
		return ""
	}
	return redacted
}

// GoString hides the value from %#v.
func (s Secret) GoString() string { return s.String() }

// MarshalText hides the value from JSON, YAML and slog.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
