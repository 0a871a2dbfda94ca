//go:build !unix

package doctor

// ThisSystem reads the limits from the operating system.
type ThisSystem struct{}

// OpenFiles implements System: there is no such limit here.
func (ThisSystem) OpenFiles() (n uint64, ok bool) { return 0, false }
