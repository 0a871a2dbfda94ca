package bench

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"time"
)

// With --profile each process's CPU profile of the window is kept. Profiling
// costs a few percent: the figures of such a run are for looking at, not for
// quoting.

// profileName is the file of a process's profile.
func (j *Job) profileName(process string) string {
	return filepath.Join(j.Profile, fmt.Sprintf("%s-%s-%d.%s.pprof", j.Scenario, j.Durability, j.Clients, process))
}

// startProfile profiles this process; the returned function ends it. Without a
// folder for profiles neither does anything.
func (j *Job) startProfile(process string) (stop func(), err error) {
	if j.Profile == "" {
		return func() {}, nil
	}
	f, err := os.Create(j.profileName(process))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close()
	}, nil
}

// fetchProfile keeps the server's profile of the window, which begins now.
func (t *trial) fetchProfile(ctx context.Context) error {
	seconds := max(int(t.job.Duration/time.Second), 1)
	url := "http://" + t.admin + "/debug/pprof/profile?seconds=" + strconv.Itoa(seconds)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("profile of the server: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("profile of the server: %s", res.Status)
	}
	f, err := os.Create(t.job.profileName("server"))
	if err != nil {
		return err
	}
	_, err = io.Copy(f, res.Body)
	if err := f.Close(); err != nil {
		return err
	}
	return err
}
