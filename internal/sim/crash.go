package sim

import (
	"bytes"
	"maps"
	"slices"
	"strings"
)

// sector is what a disk writes as a whole, mostly: see loss.tear.
const sector = 512

// loss decides what a power failure leaves of what was not synced. It draws by
// place, not in turn, so that no order of asking matters.
type loss struct {
	seed uint64
	keep int // percent of sectors and names that had reached the disk
	tear int // percent of those sectors that were cut while being written
}

func (l *loss) roll(a, b uint64) uint64 { return mix(mix(l.seed^mix(a)) ^ b) }

func (l *loss) keeps(a, b uint64) bool { return int(l.roll(a, b)%100) < l.keep }

func hashName(name string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * 1099511628211
	}
	return h
}

// clone gives the disk as the next process finds it: after a mere end of the
// process (nil) as it is, after a power failure without what was lost. d.mu is
// held.
func (d *disk) clone(l *loss) *disk {
	out := &disk{locks: map[string]bool{}, ids: d.ids, lies: d.lies}
	c := cloner{l, map[*inode]*inode{}}
	out.root = c.inode(d.root, "/")
	return out
}

// crash is clone for callers without the lock.
func (d *disk) crash(l *loss) *disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clone(l)
}

type cloner struct {
	l    *loss
	done map[*inode]*inode // links stay links
}

func (c *cloner) inode(n *inode, path string) *inode {
	if m := c.done[n]; m != nil {
		return m
	}
	m := &inode{id: n.id, dir: n.dir}
	c.done[n] = m
	switch {
	case n.dir:
		c.dir(n, m, path)
	case c.l == nil:
		m.data, m.kept = bytes.Clone(n.data), bytes.Clone(n.kept)
		m.dirty, m.limbo = slices.Clone(n.dirty), slices.Clone(n.limbo)
	default:
		m.data = c.l.file(n)
		m.kept = bytes.Clone(m.data)
	}
	return m
}

func (c *cloner) dir(n, m *inode, path string) {
	m.names, m.keptNames = map[string]*inode{}, map[string]*inode{}
	if c.l == nil {
		for _, name := range sortedNames(n.names) {
			m.names[name] = c.inode(n.names[name], path+name+"/")
		}
		for _, name := range sortedNames(n.keptNames) {
			m.keptNames[name] = c.inode(n.keptNames[name], path+name+"/")
		}
		for _, op := range n.ops {
			if op.n != nil {
				op.n = c.inode(op.n, path+op.name+"/")
			}
			m.ops = append(m.ops, op)
		}
		return
	}
	left := maps.Clone(n.keptNames)
	for i := range c.l.names(n, path) {
		if op := n.ops[i]; op.n == nil {
			delete(left, op.name)
		} else {
			left[op.name] = op.n
		}
	}
	for _, name := range sortedNames(left) {
		one := c.inode(left[name], path+name+"/")
		m.names[name], m.keptNames[name] = one, one
	}
}

// names says how many of a directory's operations had reached the disk. In a
// folder of tables those whose sync may be untimely do not decide.
func (l *loss) names(n *inode, path string) int {
	tables := strings.HasSuffix(path, "/tables/")
	for i, op := range n.ops {
		if tables && (op.n == nil || strings.HasSuffix(op.name, ".log")) {
			continue
		}
		if !l.keeps(hashName(path), hashName(op.name)) {
			return i
		}
	}
	return len(n.ops)
}

// file gives what is left of a file: each sector old or new, some cut within,
// and the length old, new, or between.
func (l *loss) file(n *inode) []byte {
	size := len(n.kept)
	if len(n.data) > size {
		switch l.roll(n.id, 1<<62) % 3 {
		case 0:
			if l.keep > 0 {
				size = len(n.data)
			}
		case 1:
			if l.keep > 0 {
				size += int(l.roll(n.id, 1<<61)%uint64(len(n.data)-size+1)) / sector * sector
			}
		}
		if l.keep == 100 {
			size = len(n.data)
		}
	}
	out := make([]byte, size)
	copy(out, n.kept)
	for _, s := range slices.Concat(n.limbo, n.dirty) {
		for i := s.from / sector; i*sector < s.to; i++ {
			l.sector(n, i, s, out)
		}
	}
	return out
}

func (l *loss) sector(n *inode, i int, s span, out []byte) {
	if !l.keeps(n.id, uint64(i)) {
		return
	}
	from, to := max(s.from, i*sector), min(s.to, (i+1)*sector, len(out))
	if r := l.roll(n.id, uint64(i)|1<<60); int(r%100) < l.tear {
		to = min(to, i*sector+int(r/100%sector))
	}
	if from < to {
		copy(out[from:to], n.data[from:to])
	}
}
