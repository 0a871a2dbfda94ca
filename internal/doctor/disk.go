package doctor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	probeFile  = "perdure-doctor.tmp"
	syncRounds = 50
	syncBytes  = 4096
	syncBudget = 5 * time.Second

	slowSync   = 10 * time.Millisecond // a turn pays a few of them
	unlikely   = 15 * time.Microsecond // no disk with a durable cache is that fast
	leastSpace = 256 << 20
	wantSpace  = 2 << 30
)

// data checks the data directory: it can be written, has room, is not in use,
// and how long a sync takes.
func data(ctx context.Context, in Input) []Check {
	files, dir := in.Env.FS, in.Config.Data
	at, missing, err := existing(files, dir)
	if err != nil {
		return []Check{{"data", Fail, dir + ": " + err.Error(), "give data a directory that this user may write"}}
	}
	out := []Check{lock(files, dir, missing), space(files, at)}
	latencies, err := measureSync(ctx, in.Env, at)
	if err != nil {
		return append([]Check{{"data", Fail, at + " cannot be written: " + err.Error(), "give data a directory that this user may write"}}, out...)
	}
	detail := dir + " can be written"
	if missing {
		detail = dir + " does not exist yet and will be made"
	}
	return append(append([]Check{{"data", OK, detail, ""}}, out...), syncCheck(latencies))
}

// existing is the nearest directory that is there, and whether dir itself is
// missing.
func existing(files env.FS, dir string) (at string, missing bool, err error) {
	for at = dir; ; missing = true {
		info, err := files.Stat(at)
		switch {
		case err == nil && info.IsDir():
			return at, missing, nil
		case err == nil:
			return at, missing, fmt.Errorf("%s is not a directory", at)
		case !errors.Is(err, fs.ErrNotExist):
			return at, missing, errors.New("cannot be looked at")
		}
		up := files.PathDir(at)
		if up == at {
			return at, missing, errors.New("no part of the path exists")
		}
		at = up
	}
}

// lock tries the lock of the data directory for an instant.
func lock(files env.FS, dir string, missing bool) Check {
	path := files.PathJoin(dir, config.LockFile)
	if _, err := files.Stat(path); missing || err != nil {
		return Check{"data in use", OK, "no server has used it yet", ""}
	}
	held, err := files.Lock(path)
	if err != nil {
		return Check{"data in use", Warn, "another process holds the lock on " + dir, "fine if that is your server; a second one would refuse to start"}
	}
	if err := held.Close(); err != nil {
		return Check{"data in use", Warn, "the lock was taken but not given back: " + err.Error(), "look at the disk"}
	}
	return Check{"data in use", OK, "no process holds the lock", ""}
}

func space(files env.FS, dir string) Check {
	u, err := files.GetDiskUsage(dir)
	if err != nil {
		return Check{"free space", OK, "not known on this system", ""}
	}
	detail := fmt.Sprintf("%s of %s free", mib(u.AvailBytes), mib(u.TotalBytes))
	switch {
	case u.AvailBytes < leastSpace:
		return Check{"free space", Fail, detail, "make room; the journal needs at least " + mib(leastSpace)}
	case u.AvailBytes < wantSpace:
		return Check{"free space", Warn, detail, "make room; journal, state and sinks grow with use"}
	}
	return Check{"free space", OK, detail, ""}
}

func mib(n uint64) string {
	if n >= 10<<30 {
		return fmt.Sprintf("%d GiB", n>>30)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// measureSync writes and syncs small blocks as the journal does, in a file that
// it removes. It stops early when the disk is so slow that the budget is spent.
func measureSync(ctx context.Context, e env.Env, dir string) (took []time.Duration, err error) {
	path := e.FS.PathJoin(dir, probeFile)
	f, err := e.FS.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, bare(err)
	}
	defer func() {
		err = errors.Join(err, bare(f.Close()), bare(e.FS.Remove(path)))
	}()
	if err := f.Preallocate(0, syncRounds*syncBytes); err != nil {
		return nil, bare(err)
	}
	block := make([]byte, syncBytes)
	begin := e.Clock.Now()
	for range syncRounds {
		start := e.Clock.Now()
		if ctx.Err() != nil || len(took) > 0 && start.Sub(begin) > syncBudget {
			break
		}
		if _, err := f.Write(block); err != nil {
			return nil, bare(err)
		}
		if err := f.SyncData(); err != nil {
			return nil, bare(err)
		}
		took = append(took, e.Clock.Now().Sub(start))
	}
	return took, nil
}

// bare takes the path off an error: the caller names the directory.
func bare(err error) error {
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

func syncCheck(took []time.Duration) Check {
	if len(took) == 0 {
		return Check{"fdatasync", Warn, "was not measured", "run it again"}
	}
	slices.Sort(took)
	p50, worst := took[len(took)/2], took[len(took)-1]
	detail := fmt.Sprintf("p50 %v, slowest %v of %d", p50.Round(time.Microsecond), worst.Round(time.Microsecond), len(took))
	switch {
	case p50 > slowSync:
		return Check{"fdatasync", Warn, detail, "each turn waits for a few syncs; a disk with a protected write cache is faster"}
	case p50 < unlikely:
		return Check{"fdatasync", Warn, detail, "too fast for a disk: on a RAM disk nothing survives a power cut"}
	}
	return Check{"fdatasync", OK, detail, ""}
}

// leastMemory is what the idle server and its runtime need beside the caches.
const leastMemory = 64 << 20

// bytesPerTurn is the memory budget of one turn in flight.
const bytesPerTurn = 90 << 10

// memory compares what is free with what the configuration may take.
func memory(in Input) Check {
	c := in.Config
	need := uint64(leastMemory) + uint64(c.State.CacheBytes) + 2*uint64(c.Kernel.Partitions)*uint64(c.State.MemtableBytes)
	need += uint64(c.Kernel.MaxInFlightTurns) * bytesPerTurn
	have, ok := available(in.Env.FS)
	if !ok {
		return Check{"memory", OK, "not known on this system", ""}
	}
	detail := fmt.Sprintf("%s available; caches and turns may need %s", mib(have), mib(need))
	switch {
	case have < leastMemory:
		return Check{"memory", Fail, detail, "free some memory"}
	case have < need:
		return Check{"memory", Warn, detail, "lower state.cache_bytes, state.memtable_bytes or kernel.max_in_flight_turns"}
	}
	return Check{"memory", OK, detail, ""}
}

// available is the lesser of the machine's available memory and what the
// control group leaves.
func available(files env.FS) (n uint64, ok bool) {
	if kb, found := field(readSmall(files, "/proc/meminfo"), "MemAvailable:"); found {
		n, ok = kb<<10, true
	}
	limit, err1 := strconv.ParseUint(strings.TrimSpace(readSmall(files, "/sys/fs/cgroup/memory.max")), 10, 64)
	used, err2 := strconv.ParseUint(strings.TrimSpace(readSmall(files, "/sys/fs/cgroup/memory.current")), 10, 64)
	if err1 == nil && err2 == nil { // "max" is no number: no limit
		if left := limit - min(used, limit); !ok || left < n {
			n, ok = left, true
		}
	}
	return n, ok
}

func readSmall(files env.FS, path string) string {
	f, err := files.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return ""
	}
	return string(text)
}

func field(text, name string) (n uint64, ok bool) {
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) >= 2 && words[0] == name {
			n, err := strconv.ParseUint(words[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
