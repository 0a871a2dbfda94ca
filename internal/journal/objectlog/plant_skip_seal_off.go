//go:build !plant_skip_seal

package objectlog

// plantSkipSeal takes a log over without putting a seal: a mistake that the
// checkers must find when a test is built with the tag plant_skip_seal.
const plantSkipSeal = false
