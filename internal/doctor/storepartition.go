package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/cluster"
	"github.com/perdure-dev/perdure/internal/journal/objectlog"
)

// partitionCheck is the look at one partition.
type partitionCheck struct {
	*storeCheck
	PartitionReport
	prefix string
	// owner is the manifest as it was before anything else was read. One of format
	// 0 is of a log in files, not in the store.
	owner     cluster.Manifest
	tailKnown bool // TailLSN is
}

func (c *storeCheck) partition(ctx context.Context, id int, objects bool) error {
	p := &partitionCheck{storeCheck: c, PartitionReport: PartitionReport{ID: id}, prefix: fmt.Sprintf("p%03d", id)}
	owned, err := p.readOwner(ctx, objects)
	if err == nil && objects {
		err = p.objects(ctx, owned)
	}
	if err != nil {
		return err
	}
	c.report.Partitions = append(c.report.Partitions, p.PartitionReport)
	return nil
}

// readOwner reads the owner manifest; it gives false when there is none that can
// be read. objects says that the partition has some.
func (p *partitionCheck) readOwner(ctx context.Context, objects bool) (bool, error) {
	m, err := cluster.Read(ctx, p.store, p.ID)
	switch key := cluster.OwnerKey(p.ID); {
	case errors.Is(err, blob.ErrNotFound):
		if objects {
			p.find(Damage, key, "is missing, and there are objects of the partition: nobody can own it")
		}
		return false, nil
	case errors.Is(err, cluster.ErrTooNew):
		p.find(Warning, key, "%v", err)
		return false, nil
	case errors.Is(err, cluster.ErrDamaged), errors.Is(err, blob.ErrCorrupt):
		p.find(Damage, key, "cannot be read: %v", err)
		return false, nil
	case err != nil:
		return false, err
	}
	p.owner = m
	p.Epoch, p.Node, p.Released = m.Epoch, m.Node, m.Released
	if p.LocalLog = m.Format == 0; !p.LocalLog {
		p.HeadSeq, p.HeadLSN = m.HeadSeq, m.HeadLSN
	}
	return true, nil
}

// objects looks at all objects of the partition. Snapshots come before the log:
// then the log holds whatever a snapshot does, also while a server works.
func (p *partitionCheck) objects(ctx context.Context, owned bool) error {
	snapshots, log := p.prefix+"/snapshot/", objectlog.KeyPrefix(p.prefix)
	var logs bool
	err := p.walk(ctx, p.prefix+"/", func(i blob.Info) (string, error) {
		switch {
		case strings.HasPrefix(i.Key, snapshots):
			return snapshots, nil
		case strings.HasPrefix(i.Key, log):
			logs = true
			return log, nil
		}
		p.add(i)
		if i.Key != cluster.OwnerKey(p.ID) {
			p.find(Warning, i.Key, "is nothing that perdure has written, by its key; %d bytes", i.Size)
		}
		return "", nil
	})
	if err != nil {
		return err
	}
	if err := p.snapshots(ctx); err != nil || !owned {
		return err
	}
	if p.LocalLog {
		if logs {
			p.find(Warning, log, "the owner manifest is of a journal in local files, and there is a log")
		}
		return nil
	}
	if err := p.log(ctx); err != nil {
		return err
	}
	p.compare()
	return nil
}

// compare holds the snapshots against the log.
func (p *partitionCheck) compare() {
	switch {
	case p.SnapshotLSN+1 < p.owner.HeadLSN:
		p.find(Damage, p.prefix+"/snapshot", "the newest whole snapshot holds entries up to %d, the log begins at %d: those between are lost", p.SnapshotLSN, p.owner.HeadLSN)
	case p.tailKnown && p.SnapshotLSN+1 > p.TailLSN:
		p.find(Damage, p.prefix+"/log", "the log ends before entry %d, and a snapshot holds entries up to %d: the end of the log is lost", p.TailLSN, p.SnapshotLSN)
	}
}
