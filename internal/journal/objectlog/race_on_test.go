//go:build race

package objectlog

// The race detector slows the random test down; nothing in it is concurrent.
const raceDetector = true
