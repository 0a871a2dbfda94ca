// Package examples shows flows as programs use them. Each file is one of them,
// whole: its steps, its definition, and a run of it on perduretest with the
// output that it must have.
//
//	order       wait for a payment or for a deadline, and ask for the state meanwhile
//	approval    people decide; reminders until they do
//	saga        undo what was done when a later step fails for good
//	fanout      work in parallel, and a step that waits for all of it
//	polling     ask another system until it is done, slower each time
//	reminder    a loop that sleeps for days
//	account     a durable object: no steps, only state and RPCs
//	agent       a model that calls tools, and streams what it says
//	subflow     a flow that waits for others, and what it sees when one fails
//	batch       thousands of children, a window of them at a time
//	ratelimit   at most two calls at a time, whatever flow they are of
//	report      a report each night
//	progress    text that those who watch see at once
//	import      a long step that goes on where a lost worker was
//	cancel      clean up when somebody cancels
//	inbox       a channel for each sender
//	search      find flows by their attributes
//	pipeline    steps that do not wait for the disk
//	queue       work off a channel, and end when it is empty
//	payment     do something outside once, although the step runs twice
//	documents   messages, inputs and outputs of megabytes
//
// A program runs the same definitions with flow.NewWorker, and starts them with
// package client.
package examples
