// Package lint holds the rules of style that a machine can check, as ordinary
// tests: import direction, the seam to the outside world, purity of the core,
// file length, names, formatting. The tables are in rules_test.go; change them
// there, with a reason.
package lint
