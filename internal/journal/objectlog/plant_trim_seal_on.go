//go:build plant_trim_seal

package objectlog

const plantTrimSeal = true
