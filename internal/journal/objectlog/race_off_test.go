//go:build !race

package objectlog

const raceDetector = false
