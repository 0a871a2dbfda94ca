package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
)

// Severity is the weight of a finding in a store.
type Severity string

const (
	// Damage means that something that was acknowledged is lost or cannot be
	// read.
	Damage Severity = "damage"
	// Warning means that all is there, and something is not as it should be or
	// could not be looked at.
	Warning Severity = "warning"
	// Harmless is what a crash or a take-over leaves; nothing needs to be done.
	Harmless Severity = "harmless"
)

// maxFindings bounds the findings in a report; all are counted.
const maxFindings = 1000

// Finding is one thing that Store has found.
type Finding struct {
	Severity Severity `json:"severity"`
	Key      string   `json:"key"` // of the object, or the prefix of what it is about
	Detail   string   `json:"detail"`
}

// StoreReport is what is in a store.
type StoreReport struct {
	Objects    int64             `json:"objects"` // listed
	Bytes      int64             `json:"bytes"`   // listed
	Read       int64             `json:"objects_read"`
	ReadBytes  int64             `json:"bytes_read"`
	Values     int64             `json:"values"` // objects of large values; counted, not read
	Nodes      int               `json:"nodes"`  // leases
	Partitions []PartitionReport `json:"partitions"`
	Counts     map[Severity]int  `json:"counts"`
	Findings   []Finding         `json:"findings"` // the first 1000, damage or not
}

// PartitionReport is what is in a store of one partition.
type PartitionReport struct {
	ID       int    `json:"id"`
	Epoch    uint64 `json:"epoch"` // of the owner manifest
	Node     string `json:"node"`
	Released bool   `json:"released"`
	// LocalLog: the log is in files beside the store and was not looked at; what
	// follows of it is zero.
	LocalLog bool `json:"local_log"`

	HeadSeq uint64 `json:"head_seq"` // the log begins here
	HeadLSN uint64 `json:"head_lsn"`
	TailSeq uint64 `json:"tail_seq"` // and goes on here
	TailLSN uint64 `json:"tail_lsn"`
	Frames  int64  `json:"frames"` // in the log
	Entries int64  `json:"entries"`
	Seals   int64  `json:"seals"`
	Left    int64  `json:"objects_left"` // of former owners and of trims that were cut short

	Snapshots   int    `json:"snapshots"`
	SnapshotLSN uint64 `json:"snapshot_lsn"` // of the newest that is whole
	Tables      int    `json:"tables"`       // that snapshots name
	Unnamed     int    `json:"tables_unnamed"`
}

// Status is the worst severity of the findings, "ok" without any but harmless
// ones.
func (r *StoreReport) Status() string {
	switch {
	case r.Counts[Damage] > 0:
		return string(Damage)
	case r.Counts[Warning] > 0:
		return string(Warning)
	}
	return "ok"
}

// ExitStatus is the exit status of the command: 1 when there is damage.
func (r *StoreReport) ExitStatus() int {
	if r.Counts[Damage] > 0 {
		return 1
	}
	return 0
}

// Store reads a whole store and looks whether what was acknowledged is there:
// owner manifests, every object of the logs from their heads on, every table
// file of the snapshots. It changes nothing. Servers may be at work meanwhile:
// what they write or delete under its eyes is no finding.
//
// progress, if not nil, is called with the objects and bytes read so far, by
// one goroutine at a time. An error is of the store or of ctx; what is wrong
// within the store is in the report.
func Store(ctx context.Context, store blob.Store, progress func(objects, bytes int64)) (StoreReport, error) {
	c := &storeCheck{store: store, progress: progress, report: StoreReport{
		Partitions: []PartitionReport{}, Counts: map[Severity]int{}, Findings: []Finding{},
	}}
	if err := c.run(ctx); err != nil {
		return StoreReport{}, fmt.Errorf("doctor: verify the store: %w", err)
	}
	return c.report, nil
}

type storeCheck struct {
	store    blob.Store
	progress func(objects, bytes int64)
	report   StoreReport
}

func (c *storeCheck) find(s Severity, key, format string, args ...any) {
	c.report.Counts[s]++
	if len(c.report.Findings) < maxFindings {
		c.report.Findings = append(c.report.Findings, Finding{s, key, fmt.Sprintf(format, args...)})
	}
}

// count is told of each object that was read.
func (c *storeCheck) count(bytes int) {
	c.report.Read++
	c.report.ReadBytes += int64(bytes)
	if c.progress != nil {
		c.progress(c.report.Read, c.report.ReadBytes)
	}
}

const (
	layoutKey        = "layout.json"
	unfinishedLayout = 1_000_000 // what internal/backup writes until it has copied all
)

// maxPartitions is more than a store may have; keys hold three digits.
const maxPartitions = 1000

func (c *storeCheck) run(ctx context.Context) error {
	have := map[int]bool{} // partitions with objects
	layout := false
	err := c.walk(ctx, "", func(i blob.Info) (skip string, err error) {
		if id, ok := partitionOf(i.Key); ok {
			have[id] = true
			return i.Key[:len("p000/")], nil
		}
		if i.Key == layoutKey {
			layout = true
			c.add(i)
			return "", nil
		}
		return "", c.other(ctx, i)
	})
	if err != nil {
		return err
	}
	partitions, err := c.layout(ctx, layout)
	if err != nil {
		return err
	}
	for id := range maxPartitions {
		switch {
		case id < partitions:
			if err := c.partition(ctx, id, have[id]); err != nil {
				return err
			}
		case have[id] && partitions > 0:
			c.find(Warning, fmt.Sprintf("p%03d", id), "the layout has %d partitions: nothing reads this one", partitions)
		}
	}
	return nil
}

func (c *storeCheck) add(i blob.Info) {
	c.report.Objects++
	c.report.Bytes += i.Size
}

// walk lists the keys that begin with prefix. When fn gives a prefix that ends
// with a slash, the keys that begin with it are passed over.
func (c *storeCheck) walk(ctx context.Context, prefix string, fn func(blob.Info) (skip string, err error)) error {
	for after := ""; ; {
		infos, err := c.store.List(ctx, prefix, after, blob.MaxList)
		if err != nil {
			return err
		}
		more := len(infos) == blob.MaxList
		for _, i := range infos {
			skip, err := fn(i)
			if err != nil {
				return err
			}
			if after = i.Key; skip != "" {
				after, more = strings.TrimSuffix(skip, "/")+"0", true // the character behind the slash
				break
			}
		}
		if !more {
			return nil
		}
	}
}

// partitionOf is the partition whose folder a key is in.
func partitionOf(key string) (id int, ok bool) {
	if len(key) < 5 || key[0] != 'p' || key[4] != '/' {
		return 0, false
	}
	for _, d := range []byte(key[1:4]) {
		if d < '0' || d > '9' {
			return 0, false
		}
		id = id*10 + int(d-'0')
	}
	return id, true
}

// layout gives the number of partitions.
func (c *storeCheck) layout(ctx context.Context, there bool) (int, error) {
	if !there {
		c.find(Damage, layoutKey, "is missing: this is no store of perdure, or the wrong prefix, or it is lost")
		return 0, nil
	}
	o, err := c.get(ctx, layoutKey)
	var l struct {
		Format, Partitions int
	}
	switch {
	case isGone(err):
		c.find(Damage, layoutKey, "cannot be read: %v", err)
		return 0, nil
	case err != nil:
		return 0, err
	}
	if err := json.Unmarshal(o, &l); err != nil || l.Format < 1 || l.Partitions < 1 || l.Partitions > maxPartitions {
		c.find(Damage, layoutKey, "is not as it was written")
		return 0, nil
	}
	if l.Format == unfinishedLayout {
		c.find(Damage, layoutKey, "is of a copy that was not finished: empty the target and copy again")
		return l.Partitions, nil
	}
	if l.Format > 1 {
		c.find(Warning, layoutKey, "has format %d, this program reads up to 1: use a newer one", l.Format)
	}
	return l.Partitions, nil
}

// isGone tells an object that is lost or broken from a store that fails.
func isGone(err error) bool {
	return errors.Is(err, blob.ErrNotFound) || errors.Is(err, blob.ErrCorrupt)
}

func (c *storeCheck) get(ctx context.Context, key string) ([]byte, error) {
	o, err := c.store.Get(ctx, key)
	if err == nil {
		c.count(len(o.Data))
	}
	return o.Data, err
}

// other looks at an object that is not a partition's.
func (c *storeCheck) other(ctx context.Context, i blob.Info) error {
	c.add(i)
	folder, _, _ := strings.Cut(i.Key, "/")
	var decode func([]byte) error
	switch folder {
	case "blobs":
		c.report.Values++
		return nil
	case "types":
		return nil // what workers declared: they declare it again
	case "proof":
		c.find(Harmless, i.Key, "is left of a start's proof of the store; it may be deleted")
		return nil
	case "nodes":
		c.report.Nodes++
		decode = func(b []byte) error { _, err := cluster.DecodeNode(i.Key, b); return err }
	case "cluster":
		if i.Key == cluster.ActiveKey {
			decode = func(b []byte) error { _, err := cluster.DecodeActive(b); return err }
		}
	}
	if decode == nil {
		c.find(Warning, i.Key, "is nothing that perdure has written, by its key; %d bytes", i.Size)
		return nil
	}
	data, err := c.get(ctx, i.Key)
	if errors.Is(err, blob.ErrNotFound) {
		return nil // just deleted
	}
	if err == nil {
		err = decode(data)
	}
	switch {
	case errors.Is(err, blob.ErrCorrupt), errors.Is(err, cluster.ErrDamaged):
		c.find(Warning, i.Key, "cannot be read, no state is in it: %v", err)
	case errors.Is(err, cluster.ErrTooNew):
		c.find(Warning, i.Key, "%v", err)
	case err != nil:
		return err
	}
	return nil
}
