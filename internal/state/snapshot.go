package state

type snapshotter struct{}

func checkpointDir(dir string) string { return dir + ".checkpoint" }
