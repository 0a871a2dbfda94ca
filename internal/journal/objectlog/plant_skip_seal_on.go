//go:build plant_skip_seal

package objectlog

const plantSkipSeal = true
