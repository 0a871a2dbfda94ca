//go:build !plant_reuse_epoch

package objectlog

// PlantReuseEpoch makes whoever takes a partition over keep the former epoch
// instead of the next one: a mistake that the checkers must find when a test is
// built with the tag plant_reuse_epoch. The code that chooses the epoch asks it.
const PlantReuseEpoch = false
