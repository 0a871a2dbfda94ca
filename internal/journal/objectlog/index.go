package objectlog

import (
	"slices"
	"sort"

	"github.com/perdure-dev/perdure/internal/blob"
)

// Index remembers the frames of a log from its head on: what a trim gives up
// and what the log weighs. Not safe for concurrent use. It takes 24 bytes per
// frame that is not trimmed.
type Index struct {
	frames []indexed // rising
	lsn    uint64    // behind the last frame
	bytes  int64
	seals  []uint64 // kept only for a planted mistake
}

type indexed struct {
	seq, lsn uint64 // lsn: of the first entry
	bytes    int64
}

// NewIndex makes an index of no frames; lsn is the next entry's.
func NewIndex(lsn uint64) *Index { return &Index{lsn: lsn} }

// Add appends a frame of n bytes and count entries, which begin at lsn.
func (x *Index) Add(seq, lsn uint64, count uint32, n int) {
	x.frames = append(x.frames, indexed{seq: seq, lsn: lsn, bytes: int64(n)})
	x.lsn = lsn + uint64(count)
	x.bytes += int64(n)
}

// Bytes is the size of all frames.
func (x *Index) Bytes() int64 { return x.bytes }

// Frames counts them.
func (x *Index) Frames() int { return len(x.frames) }

// sealed notes a seal.
func (x *Index) sealed(seq uint64) {
	if plantTrimSeal {
		x.seals = append(x.seals, seq)
	}
}

// covered is how many frames hold no entry above upTo.
func (x *Index) covered(upTo uint64) int {
	return sort.Search(len(x.frames), func(i int) bool {
		end := x.lsn // behind the frame's last entry
		if i+1 < len(x.frames) {
			end = x.frames[i+1].lsn
		}
		return end-1 > upTo // LSNs start at 1
	})
}

// Head is where the log begins once the entries up to upTo are given up: the
// first frame with another one. The newest frame always stays, since it tells a
// next owner what time it is; next and the next entry are the answer of an index
// of no frames.
func (x *Index) Head(upTo, next uint64) (seq, lsn uint64) {
	if len(x.frames) == 0 {
		return next, x.lsn
	}
	f := x.frames[min(x.covered(upTo), len(x.frames)-1)]
	return f.seq, f.lsn
}

// Cut forgets the frames below head and returns their sequences: what may be
// deleted when the head is durable. Seals are never among them.
func (x *Index) Cut(head uint64) []uint64 {
	var doomed []uint64
	if n := x.at(head); n > 0 {
		for _, f := range x.frames[:n] {
			doomed = append(doomed, f.seq)
			x.bytes -= f.bytes
		}
		x.frames = slices.Clone(x.frames[n:]) // gives the memory back
	}
	for len(x.seals) > 0 && x.seals[0] < head {
		doomed = append(doomed, x.seals[0])
		x.seals = x.seals[1:]
	}
	return doomed
}

// at is the position of the first frame with a sequence of seq or more.
func (x *Index) at(seq uint64) int {
	return sort.Search(len(x.frames), func(i int) bool { return x.frames[i].seq >= seq })
}

// holding is the first frame with an entry at or above lsn.
func (x *Index) holding(lsn uint64) (seq, first uint64, ok bool) {
	if lsn == 0 {
		lsn = 1
	}
	if n := x.covered(lsn - 1); n < len(x.frames) {
		return x.frames[n].seq, x.frames[n].lsn, true
	}
	return 0, 0, false
}

// cutFrom forgets the frames at and above seq, whose first LSN is lsn.
func (x *Index) cutFrom(seq, lsn uint64) {
	n := x.at(seq)
	for _, f := range x.frames[n:] {
		x.bytes -= f.bytes
	}
	x.frames, x.lsn = x.frames[:n], lsn
}

func (x *Index) clone() *Index {
	c := *x
	c.frames, c.seals = slices.Clone(x.frames), slices.Clone(x.seals)
	return &c
}

// Sweep picks from a list of a log's objects what lies below head and may be
// deleted: what an earlier trim did not get to. The size tells seals, which
// stay, from frames.
func Sweep(prefix string, infos []blob.Info, head uint64) []uint64 {
	var doomed []uint64
	for _, i := range infos {
		if seq, ok := ParseKey(prefix, i.Key); ok && seq < head && (i.Size >= maxSealSize || plantTrimSeal) {
			doomed = append(doomed, seq)
		}
	}
	return doomed
}
