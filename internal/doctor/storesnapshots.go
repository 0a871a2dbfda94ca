package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/state"
)

const (
	tablesAtOnce = 4
	// surveyTries bounds how often the snapshots are read again because the one
	// being read was replaced by a newer one.
	surveyTries = 5
)

// snapshotSurvey is one look at a partition's snapshots. Its findings count only
// if nothing was replaced meanwhile.
type snapshotSurvey struct {
	p         *partitionCheck
	prefix    string
	ids       []state.SnapshotID
	objects   map[string]int64 // table objects by key
	foreign   []blob.Info
	all       []blob.Info
	manifests map[state.SnapshotID]state.Manifest
	broken    map[state.SnapshotID]error
	named     map[string]state.ManifestFile
	bad       map[string]error // objects that are not as they are named
}

// snapshots reads the manifests and every table file that they name.
func (p *partitionCheck) snapshots(ctx context.Context) error {
	for try := 1; ; try++ {
		s := &snapshotSurvey{
			p: p, prefix: p.prefix + "/snapshot", objects: map[string]int64{},
			manifests: map[state.SnapshotID]state.Manifest{}, broken: map[state.SnapshotID]error{},
			named: map[string]state.ManifestFile{}, bad: map[string]error{},
		}
		if err := s.read(ctx); err != nil {
			return err
		}
		if len(s.broken)+len(s.bad) > 0 && try < surveyTries {
			ids, err := state.ListSnapshots(ctx, p.store, s.prefix)
			if err != nil {
				return err
			}
			if !slices.Equal(ids, s.ids) {
				continue
			}
		}
		s.report()
		return nil
	}
}

func (s *snapshotSurvey) read(ctx context.Context) error {
	err := s.p.walk(ctx, s.prefix+"/", func(i blob.Info) (string, error) {
		s.all = append(s.all, i)
		switch id, manifest, table := state.SnapshotKey(s.prefix, i.Key); {
		case manifest:
			s.ids = append(s.ids, id)
		case table:
			s.objects[i.Key] = i.Size
		default:
			s.foreign = append(s.foreign, i)
		}
		return "", nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(s.ids, state.SnapshotID.Compare)
	for _, id := range s.ids {
		if err := s.manifest(ctx, id); err != nil {
			return err
		}
	}
	return s.tables(ctx)
}

func (s *snapshotSurvey) manifest(ctx context.Context, id state.SnapshotID) error {
	data, err := s.p.get(ctx, state.ManifestKey(s.prefix, id))
	if err != nil && !isGone(err) {
		return err
	}
	var m state.Manifest
	if err == nil {
		m, err = state.DecodeManifest(data, id)
	}
	if err != nil {
		s.broken[id] = err
		return nil
	}
	s.manifests[id] = m
	for _, f := range m.Files {
		if f.IsTable() {
			s.named[state.TableKey(s.prefix, f)] = f
		}
	}
	return nil
}

// tables reads what is named, each once.
func (s *snapshotSurvey) tables(ctx context.Context) error {
	keys := make([]string, 0, len(s.named))
	for key := range s.named {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	errs, sizes := make([]error, len(keys)), make([]int, len(keys))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(tablesAtOnce)
	for n, key := range keys {
		g.Go(func() error {
			f := s.named[key]
			o, err := s.p.store.Get(gctx, key)
			switch {
			case err != nil && !isGone(err):
				return err
			case err == nil && !f.Matches(o.Data):
				err = fmt.Errorf("%d bytes that are not as the checksum says", len(o.Data))
			}
			errs[n], sizes[n] = err, len(o.Data)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for n, key := range keys {
		if s.p.count(sizes[n]); errs[n] != nil {
			s.bad[key] = errs[n]
		}
	}
	return nil
}

// report turns what was read into findings.
func (s *snapshotSurvey) report() {
	p := s.p
	for _, i := range s.all {
		p.add(i)
	}
	for _, i := range s.foreign {
		p.find(Warning, i.Key, "is nothing that perdure has written, by its key; %d bytes", i.Size)
	}
	p.Snapshots, p.Tables = len(s.ids), len(s.named)
	for n, id := range s.ids {
		s.judge(id, n == len(s.ids)-1)
	}
	var unnamed, bytes int64
	for key, size := range s.objects {
		if _, ok := s.named[key]; !ok {
			unnamed, bytes = unnamed+1, bytes+size
		}
	}
	if p.Unnamed = int(unnamed); unnamed > 0 {
		p.find(Harmless, s.prefix, "%s with %s that no snapshot names; the owner deletes them in time", count(p.Unnamed, "table file"), sizeText(uint64(bytes)))
	}
}

// judge says what is wrong with one snapshot. The newest is the one that
// counts; a former owner may have left an older one that is not whole.
func (s *snapshotSurvey) judge(id state.SnapshotID, newest bool) {
	severity, key := Warning, state.ManifestKey(s.prefix, id)
	if newest {
		severity = Damage
	}
	if err := s.broken[id]; err != nil {
		if !errors.Is(err, state.ErrDamaged) && !isGone(err) {
			severity = Warning // of a newer program
		}
		s.p.find(severity, key, "cannot be read: %v", err)
		return
	}
	m, whole := s.manifests[id], true
	for _, f := range m.Files {
		if !f.IsTable() {
			continue
		}
		object := state.TableKey(s.prefix, f)
		if err := s.bad[object]; err != nil {
			s.p.find(severity, object, "snapshot %v is not whole: %v", id, err)
			whole = false
		}
	}
	if whole {
		s.p.SnapshotLSN = m.AppliedLSN // ids ascend: the newest whole one stays
	}
}
