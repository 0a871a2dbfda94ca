package sink

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/perdure-dev/perdure/internal/env"
)

// segment is one file of a log.
type segment struct {
	seq   uint64
	start time.Time
	size  int64 // bytes of whole lines
}

// segmentLog is one log of JSONL segments. Writing is for whoever holds the
// Sinks' turn; readers take mu for the list alone.
//
// The bytes of a failed write are kept and written again, the same ones at the
// same offset, before any other: what the failure left in the file is
// overwritten, and what the page cache dropped is written anew.
type segmentLog struct {
	logOptions
	mu   sync.Mutex
	segs []segment // oldest first

	file    vfs.File // of the newest segment; nil until the first write
	torn    bool     // bytes behind the newest segment's size wait to be cut
	foreign bool     // the newest segment is of another store: begin one
	rotated bool     // since segments were last removed
	expired time.Time
	pending []byte  // whole lines that are not written
	lines   int     // in pending
	places  []place // of the newest line by partition, pending ones included
	written []place // the same, without the pending ones
}

// tmpSuffix marks the copy that is to replace a torn segment.
const tmpSuffix = ".tmp"

type logOptions struct {
	fs           env.FS
	dir          string
	kind         Kind
	store        string // names the data directory; "" = the lines have no place
	partitions   int
	segmentBytes int64
	retention    time.Duration // 0 = for ever
	maxBytes     int64         // 0 = no bound
}

// tracked reports whether lines come from partitions: they have places, and
// each write is synced since the outbox forgets them then.
func (l *segmentLog) tracked() bool { return l.store != "" }

// openLog reads what is there. It writes nothing but the directory.
func openLog(o logOptions) (*segmentLog, error) {
	l := &segmentLog{logOptions: o, places: make([]place, o.partitions), written: make([]place, o.partitions)}
	if err := makeDir(o.fs, o.dir); err != nil {
		return nil, fmt.Errorf("directory of %s: %w", o.kind, err)
	}
	names, err := o.fs.List(o.dir)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", o.dir, err)
	}
	for _, name := range names {
		name = o.fs.PathBase(name)
		whole, left := strings.CutSuffix(name, tmpSuffix)
		if start, seq, ok := parseSegmentName(o.kind, whole); ok && !left {
			l.segs = append(l.segs, segment{seq: seq, start: start})
		} else if ok {
			_ = o.fs.Remove(o.fs.PathJoin(o.dir, name)) // of a cut that a crash ended
		}
	}
	slices.SortFunc(l.segs, func(a, b segment) int { return cmp.Compare(a.seq, b.seq) })
	for i := range l.segs {
		info, err := o.fs.Stat(l.path(l.segs[i]))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.path(l.segs[i]), err)
		}
		l.segs[i].size = info.Size()
	}
	if len(l.segs) == 0 {
		return l, nil
	}
	return l, l.takeUp(&l.segs[len(l.segs)-1])
}

func (l *segmentLog) path(s segment) string {
	return l.fs.PathJoin(l.dir, segmentName(l.kind, s.start, s.seq))
}

func (l *segmentLog) placesPath(s segment) string {
	return l.fs.PathJoin(l.dir, placesName(segmentName(l.kind, s.start, s.seq)))
}

// takeUp finds the end of the newest segment and the places written up to it.
func (l *segmentLog) takeUp(s *segment) error {
	if l.tracked() && !l.readPlaces(*s) {
		l.foreign = true
	}
	good, err := l.scan(*s)
	if err != nil {
		return fmt.Errorf("read %s: %w", l.path(*s), err)
	}
	l.torn, s.size = good < s.size, good
	if l.foreign {
		clear(l.places)
	}
	copy(l.written, l.places)
	return nil
}

// readPlaces reads the places from before a segment; false when there are none
// of this store: nothing may be taken for written then.
func (l *segmentLog) readPlaces(s segment) bool {
	raw, err := readAll(l.fs, l.placesPath(s), maxPlacesBytes)
	if err != nil {
		return false
	}
	store, places, err := decodePlaces(raw)
	if err != nil || store != l.store {
		return false
	}
	copy(l.places, places)
	return true
}

func readAll(fsys env.FS, path string, limit int64) ([]byte, error) {
	f, err := fsys.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit+1))
}

// scan gives the length of the whole lines of a segment. Lines with places end
// at the first that is damaged: a crash may lose any part of what was not
// synced, and all of that comes again from the outbox.
func (l *segmentLog) scan(s segment) (good int64, err error) {
	f, err := l.fs.Open(l.path(s))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	r := lineReader{r: io.NewSectionReader(f, 0, s.size)}
	for {
		line, err := r.next()
		if errors.Is(err, io.EOF) {
			return good, nil
		}
		if err != nil {
			return 0, err
		}
		if l.tracked() {
			part, p, ok := linePlace(line)
			if !ok {
				return good, nil
			}
			if part < len(l.places) && l.places[part].less(p) {
				l.places[part] = p
			}
		}
		good = r.offset
	}
}

// seen reports whether the line of a place is written or pending, and takes
// the place if it is not.
func (l *segmentLog) seen(part int, p place) bool {
	if !l.places[part].less(p) {
		return true
	}
	l.places[part] = p
	return false
}

// add takes a line, without its end, to be written with the next flush.
func (l *segmentLog) add(line []byte) {
	l.pending = append(append(l.pending, line...), '\n')
	l.lines++
}

// flush writes the pending lines and, if they come from partitions, syncs
// them. After an error the same bytes are tried again by the next call.
func (l *segmentLog) flush(now time.Time) error {
	if len(l.pending) == 0 {
		return nil
	}
	err := l.write(now)
	if err != nil {
		l.closeFile() // a file that failed to sync is not to be trusted
		return fmt.Errorf("%s: %w", l.kind, err)
	}
	copy(l.written, l.places)
	l.pending, l.lines = l.pending[:0], 0
	return nil
}

func (l *segmentLog) write(now time.Time) error {
	if err := l.ready(now); err != nil {
		return err
	}
	s := &l.segs[len(l.segs)-1] // only the writer changes the list
	if _, err := l.file.WriteAt(l.pending, s.size); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if l.tracked() {
		if err := l.file.SyncData(); err != nil {
			return fmt.Errorf("sync: %w", err)
		}
	}
	l.mu.Lock()
	s.size += int64(len(l.pending))
	l.mu.Unlock()
	return nil
}

// ready makes the newest segment one that can be appended to.
func (l *segmentLog) ready(now time.Time) error {
	if err := l.cut(); err != nil {
		return fmt.Errorf("cut torn end: %w", err)
	}
	if l.full(now) {
		if err := l.rotate(now); err != nil {
			return fmt.Errorf("begin segment: %w", err)
		}
	}
	if l.file == nil {
		f, err := l.fs.OpenReadWrite(l.path(l.segs[len(l.segs)-1]), vfs.WriteCategoryUnspecified)
		if err != nil {
			return err
		}
		l.file = f
	}
	return nil
}

func (l *segmentLog) full(now time.Time) bool {
	if len(l.segs) == 0 || l.foreign {
		return true
	}
	s := l.segs[len(l.segs)-1]
	return s.size >= l.segmentBytes || s.size > 0 && !sameDay(s.start, now)
}

func sameDay(a, b time.Time) bool {
	ay, am, ad := a.UTC().Date()
	by, bm, bd := b.UTC().Date()
	return ay == by && am == bm && ad == bd
}

// rotate begins a new segment. The places are durable before the segment is
// there: a crash between leaves a file of places that the next try replaces.
func (l *segmentLog) rotate(now time.Time) error {
	next := segment{seq: 1, start: now.UTC().Truncate(time.Second)}
	if n := len(l.segs); n > 0 {
		next.seq = l.segs[n-1].seq + 1
		if l.file != nil && !l.tracked() {
			if err := l.file.SyncData(); err != nil {
				return err
			}
		}
	}
	l.closeFile()
	if l.tracked() {
		raw, err := encodePlaces(l.store, l.written)
		if err != nil {
			return err
		}
		if err := writeFile(l.fs, l.dir, l.placesPath(next), raw); err != nil {
			return err
		}
	}
	f, err := l.fs.OpenReadWrite(l.path(next), vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	if err := syncDir(l.fs, l.dir); err != nil {
		return errors.Join(err, f.Close())
	}
	l.mu.Lock()
	l.segs = append(l.segs, next)
	l.mu.Unlock()
	l.file, l.foreign, l.rotated = f, false, true
	if n := len(l.segs); n > 1 && l.tracked() {
		_ = l.fs.Remove(l.placesPath(l.segs[n-2])) // not needed any more; harmless if it stays
	}
	return nil
}

// cut takes away what a crash left behind the last whole line, by a copy that
// replaces the file: the seam has no truncation.
func (l *segmentLog) cut() error {
	if !l.torn {
		return nil
	}
	s := l.segs[len(l.segs)-1]
	tmp := l.path(s) + tmpSuffix
	if err := l.copyHead(s, tmp); err != nil {
		_ = l.fs.Remove(tmp) // the next try makes it anew
		return err
	}
	if err := l.fs.Rename(tmp, l.path(s)); err != nil {
		return err
	}
	if err := syncDir(l.fs, l.dir); err != nil {
		return err
	}
	l.torn = false
	return nil
}

func (l *segmentLog) copyHead(s segment, to string) error {
	from, err := l.fs.Open(l.path(s))
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := l.fs.Create(to, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = io.Copy(struct{ io.Writer }{f}, io.NewSectionReader(from, 0, s.size))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// expire removes the oldest segments that are over the age or the size. A
// segment's lines are older than the begin of the next one.
func (l *segmentLog) expire(now time.Time) error {
	l.expired, l.rotated = now, false
	var total int64
	for _, s := range l.segs {
		total += s.size
	}
	for len(l.segs) > 1 {
		old := l.retention > 0 && !l.segs[1].start.After(now.Add(-l.retention))
		if !old && (l.maxBytes <= 0 || total <= l.maxBytes) {
			return nil
		}
		gone := l.segs[0]
		if err := l.fs.Remove(l.path(gone)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove old segment of %s: %w", l.kind, err)
		}
		total -= gone.size
		l.mu.Lock()
		l.segs = slices.Delete(l.segs, 0, 1)
		l.mu.Unlock()
	}
	return nil
}

// list is the segments as of now, oldest first.
func (l *segmentLog) list() []segment {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.segs)
}

func (l *segmentLog) closeFile() {
	if l.file != nil {
		_ = l.file.Close() // what matters was synced, or is written again
		l.file = nil
	}
}

// idle gives memory back that the next lines can do without.
func (l *segmentLog) idle() {
	if len(l.pending) == 0 {
		l.pending = nil
	}
}

// makeDir makes a directory, durably when it was not there.
func makeDir(fsys env.FS, dir string) error {
	if _, err := fsys.Stat(dir); err == nil {
		return nil
	}
	if err := fsys.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	return syncDir(fsys, fsys.PathDir(dir))
}

// writeFile makes a file durable, its name too.
func writeFile(fsys env.FS, dir, path string, data []byte) error {
	f, err := fsys.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(bytes.Clone(data)) // a vfs.File may change what it writes
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return syncDir(fsys, dir)
}

func syncDir(fsys env.FS, dir string) error {
	d, err := fsys.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// lineReader reads whole lines of at most maxLine bytes.
type lineReader struct {
	r      io.Reader
	buf    []byte // read and not given
	from   int    // of buf, where the next line begins
	offset int64  // behind the last line given
	eof    bool
}

// next gives a line without its end, valid until the next call. io.EOF comes
// behind the last whole line, also when bytes without an end follow.
func (l *lineReader) next() ([]byte, error) {
	seen := 0
	for {
		if i := bytes.IndexByte(l.buf[l.from+seen:], '\n'); i >= 0 {
			line := l.buf[l.from : l.from+seen+i]
			l.from += len(line) + 1
			l.offset += int64(len(line)) + 1
			return line, nil
		}
		seen = len(l.buf) - l.from
		if l.eof || seen > maxLine {
			return nil, io.EOF
		}
		if err := l.fill(); err != nil {
			return nil, err
		}
	}
}

func (l *lineReader) fill() error {
	l.buf = append(l.buf[:0], l.buf[l.from:]...)
	l.from = 0
	n := len(l.buf)
	l.buf = slices.Grow(l.buf, max(readChunk, n))
	l.buf = l.buf[:cap(l.buf)]
	m, err := l.r.Read(l.buf[n:])
	l.buf = l.buf[:n+m]
	if errors.Is(err, io.EOF) {
		l.eof, err = true, nil
	}
	return err
}
