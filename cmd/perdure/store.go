package main

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/perdure-dev/perdure/internal/blob"
	blobfs "github.com/perdure-dev/perdure/internal/blob/fs"
	"github.com/perdure-dev/perdure/internal/config"
	"github.com/perdure-dev/perdure/internal/doctor"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/server"
)

// doctorStoreCommand is "perdure doctor store".
func doctorStoreCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "store URL", Args: cobra.ExactArgs(1),
		Short: "Read a whole store and verify it; exit 1 when something is lost",
		Long: `Read a whole store and verify it: owner manifests, every object of the logs,
every table file of the snapshots. Nothing is changed, and servers may work on an
object store meanwhile. A finding is damage, a warning, or harmless: what crashes
and take-overs leave.

URL is s3://BUCKET/PREFIX, as "perdure serve --store" takes it, or a folder (of a
store, or of a data directory whose server is stopped).`,
		Example: `  perdure doctor store s3://bucket/prefix
  perdure doctor store ./data
  perdure doctor store file:///backups/monday --json`,
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		store, done, err := openStore(env.Real(), args[0], false)
		if err != nil {
			return exitWith(exitUsage, err)
		}
		defer done()
		line := newProgressLine(cmd.ErrOrStderr(), "read")
		report, err := doctor.Store(cmd.Context(), store, line.tell)
		line.clear()
		if err != nil {
			return exitWith(exitFailed, err)
		}
		write := report.WriteText
		if asJSON {
			write = report.WriteJSON
		}
		if err := write(cmd.OutOrStdout()); err != nil {
			return exitWith(exitFailed, err)
		}
		if code := report.ExitStatus(); code != exitOK {
			return exitWith(code, errors.New("the store is damaged, see above"))
		}
		return nil
	}
	return c
}

// openStore opens the store at an address and gives what to call at the end.
// Without create a folder has to be there. It is locked meanwhile.
func openStore(world env.Env, address string, create bool) (blob.Store, func(), error) {
	if strings.HasPrefix(address, "s3://") {
		store, err := server.OpenStore(address, world, os.Getenv)
		return store, func() {}, err
	}
	folder, err := storeFolder(world.FS, address)
	if err != nil {
		return nil, nil, err
	}
	at, lock := folder, folder // a data directory has its lock beside the store
	if inner := world.FS.PathJoin(folder, "objects"); isDir(world.FS, world.FS.PathJoin(inner, "objects")) {
		at = inner
	}
	if !create && !isDir(world.FS, world.FS.PathJoin(at, "objects")) {
		return nil, nil, fmt.Errorf("%s holds no store", folder)
	}
	if err := world.FS.MkdirAll(lock, 0o750); err != nil {
		return nil, nil, err
	}
	held, err := world.FS.Lock(world.FS.PathJoin(lock, config.LockFile))
	if err != nil {
		return nil, nil, fmt.Errorf("%s is in use: %w; stop the server that works on it", folder, err)
	}
	store, err := blobfs.Open(world.FS, at)
	if err != nil {
		_ = held.Close()
		return nil, nil, err
	}
	return store, func() { _ = held.Close() }, nil // the process ends soon, and the lock with it
}

// storeFolder is the folder that an address means.
func storeFolder(files env.FS, address string) (string, error) {
	scheme, _, found := strings.Cut(address, "://")
	switch {
	case address == "":
		return "", errors.New("the address of a store is empty")
	case !found:
		return files.PathJoin(address), nil
	case scheme != "file":
		return "", fmt.Errorf("stores of kind %q cannot be opened here; name s3://BUCKET/PREFIX or a folder", scheme)
	}
	u, err := url.Parse(address)
	if err != nil || u.Host != "" || u.Path == "" {
		return "", errors.New("the address of a folder is its path, or file:///PATH")
	}
	return u.Path, nil
}

func isDir(files env.FS, path string) bool {
	info, err := files.Stat(path)
	return err == nil && info.IsDir()
}

// progressLine tells people at a terminal how far it is, twice a second.
type progressLine struct {
	w     io.Writer
	verb  string
	last  time.Time
	shown bool
}

const progressEvery = 500 * time.Millisecond

func newProgressLine(w io.Writer, verb string) *progressLine {
	if !term.IsTerminal(int(os.Stderr.Fd())) {
		w = io.Discard
	}
	return &progressLine{w: w, verb: verb, last: time.Now()}
}

func (p *progressLine) tell(objects, bytes int64) {
	if now := time.Now(); now.Sub(p.last) >= progressEvery {
		p.last, p.shown = now, true
		fmt.Fprintf(p.w, "\r%d objects, %.1f MiB %s ", objects, float64(bytes)/(1<<20), p.verb)
	}
}

func (p *progressLine) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\033[K")
	}
}
