// Package bench measures the durable engine.
package bench
