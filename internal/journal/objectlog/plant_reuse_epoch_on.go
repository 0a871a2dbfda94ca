//go:build plant_reuse_epoch

package objectlog

// PlantReuseEpoch is on.
const PlantReuseEpoch = true
