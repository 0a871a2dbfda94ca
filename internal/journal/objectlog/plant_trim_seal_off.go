//go:build !plant_trim_seal

package objectlog

// plantTrimSeal lets a trim delete seals: a mistake that the
// checkers must find when a test is built with the tag plant_trim_seal.
const plantTrimSeal = false
