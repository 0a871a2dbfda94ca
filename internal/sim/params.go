package sim

import (
	"fmt"
	"slices"
)

// params is what one run draws before it begins. The production default of
// each limit is far above; small ones meet their edges often.
type params struct {
	scenario string

	sessions, clients int
	opsPerClient      int
	lengthUs          int64 // until faults end and no new operation begins
	partitions        int
	machines          int

	// Engine.
	batchBytes, batchEntries int
	hotFlows, tailBytes      int
	hotBytes                 int
	idleUs                   int64
	segmentBytes             int64
	queueBound               int // requests waiting for a partition
	pageEvents               int // a watcher's page of the log
	subBytes                 int // a watcher may fall behind

	// Faults, in percent of their occasions.
	requestLost, answerLost, requestTwice int
	watcherDrops                          int
	crashEveryUs                          int64 // mean; 0 = never
	powerLoss                             int   // of crashes; the rest are kills
	tripped                               int   // of crashes: within a disk operation
	appendFails                           int   // per thousand appends
	storeFaults                           int
	slowAppend                            int
	slowAppendUs                          int64
	clockJumps                            bool
	stops                                 int // of crashes: an orderly stop instead
	startCrash                            int // of starts: they end within
	upkeepEveryUs                         int64
	snapshots                             bool
	loseTables                            int // of power losses: with the tables' folder

	// The object store, and nodes that share it.
	window       int   // most frames in flight of a partition
	ttlUs        int64 // of a lease
	storeUs      int64 // a request's way there or back, at most
	giveUpUs     int64 // a request without an answer
	faultEveryUs int64 // mean time between what happens to nodes
	// liars is that leases seem to hold for ever, as with clocks that are badly
	// wrong: what is read may be old then, what is written must not be lost.
	liars bool

	// Actors.
	cancels, deletes int
	toolCalls        int // of answers
	modelRetryable   int
	modelPermanent   int
	modelHangs       int
	toolRetryable    int
	resultTwice      int

	// Flows of users.
	flowClients, flowOps int
	workers, workerSlots int
	mailboxes            int   // and as many counters
	workerEveryUs        int64 // mean time between the ends of workers and streams
	workerHangs          int   // of attempts
	handlerFails         int
	sendTwice            int
}

// flows reports whether there are any.
func (p *params) flows() bool { return p.workers > 0 }

// Scenarios names what Options.Scenario can be.
func Scenarios() []string {
	return []string{"default", "crash", "cancel", "slowdisk", "snapshot", "flows", "flowcrash", "flowslots", "objects"}
}

func draw(scenario string, s *source) (params, error) {
	if !slices.Contains(Scenarios(), scenario) {
		return params{}, fmt.Errorf("scenario %q is unknown; there are %v", scenario, Scenarios())
	}
	p := params{
		scenario: scenario, machines: 1,
		sessions: 2 + s.intn(4), clients: 2 + s.intn(4), opsPerClient: 15 + s.intn(30),
		lengthUs: s.between(10_000_000, 30_000_000), partitions: 1 + s.intn(2),

		batchBytes: pick(s, 1<<10, 8<<10, 1<<20), batchEntries: pick(s, 1, 3, 16, 4096),
		hotFlows: pick(s, 1, 2, 4, 1000), tailBytes: pick(s, 1, 600, 4<<10, 256<<10),
		hotBytes: pick(s, 2<<10, 64<<20),
		idleUs:   pick(s, int64(200_000), 2_000_000, 300_000_000), segmentBytes: pick(s, int64(8<<10), 16<<10, 64<<10),
		queueBound: pick(s, 2, 8, 4096), pageEvents: pick(s, 3, 16, 256), subBytes: pick(s, 1<<10, 8<<10, 1<<20),

		requestLost: pick(s, 0, 3, 10), answerLost: pick(s, 0, 3, 10), requestTwice: pick(s, 0, 3, 10),
		watcherDrops: pick(s, 2, 10, 30),
		crashEveryUs: pick(s, int64(0), 4_000_000, 10_000_000), powerLoss: pick(s, 0, 50, 100), tripped: 50,
		appendFails: pick(s, 0, 0, 5), slowAppend: pick(s, 0, 2), slowAppendUs: 300_000,
		clockJumps: s.percent(40), stops: 20, startCrash: 5,
		upkeepEveryUs: pick(s, int64(700_000), 3_000_000), snapshots: s.percent(40), loseTables: 20,
		storeFaults: pick(s, 0, 0, 3),

		cancels: 8, deletes: pick(s, 0, 3), toolCalls: pick(s, 20, 45, 70),
		modelRetryable: 8, modelPermanent: 3, modelHangs: 3, toolRetryable: 8, resultTwice: pick(s, 0, 5),
	}
	p.shape(s)
	return p, nil
}

// shape bends what was drawn to the scenario.
func (p *params) shape(s *source) {
	switch p.scenario {
	case "crash":
		p.crashEveryUs, p.tripped, p.powerLoss = pick(s, int64(300_000), 800_000, 1_500_000), 70, 70
		p.appendFails, p.startCrash = pick(s, 0, 10), 30
	case "cancel":
		p.cancels, p.modelHangs, p.toolRetryable, p.modelRetryable = 35, 20, 20, 20
		p.sessions = 1 + s.intn(2)
	case "slowdisk":
		p.slowAppend, p.slowAppendUs = pick(s, 20, 60), pick(s, int64(50_000), 1_000_000)
		p.queueBound = pick(s, 1, 2, 8)
	case "snapshot":
		p.snapshots, p.upkeepEveryUs, p.segmentBytes = true, 300_000, 8<<10
		p.crashEveryUs, p.powerLoss, p.loseTables = pick(s, int64(1_000_000), 3_000_000), 80, 50
		p.storeFaults = pick(s, 0, 4)
	case "flows", "flowcrash", "flowslots":
		p.shapeFlows(s)
	case "objects":
		p.shapeFlows(s)
		p.shapeObjects(s)
	}
}

// shapeFlows puts flows of users in the place of most sessions.
func (p *params) shapeFlows(s *source) {
	p.sessions, p.clients, p.opsPerClient = 1, 1, 5
	p.lengthUs = s.between(4_000_000, 10_000_000)
	p.flowClients, p.flowOps = 2+s.intn(5), 20+s.intn(30)
	p.workers, p.workerSlots = 1+s.intn(3), pick(s, 1, 4, 20)
	p.mailboxes = 1 + s.intn(2)
	p.workerEveryUs = pick(s, int64(400_000), 3_000_000)
	p.workerHangs, p.handlerFails, p.sendTwice = pick(s, 0, 2), pick(s, 0, 5), pick(s, 0, 20)
	switch p.scenario {
	case "flowcrash":
		p.crashEveryUs, p.tripped, p.powerLoss = pick(s, int64(400_000), 1_000_000, 2_000_000), 50, 60
		p.appendFails = pick(s, 0, 5)
		p.slowAppend, p.slowAppendUs = pick(s, 0, 20, 60), pick(s, int64(20_000), 300_000) // ASYNC steps run far ahead
	case "flowslots":
		p.workers, p.workerSlots, p.crashEveryUs = 1+s.intn(2), 1, pick(s, int64(0), 3_000_000)
		p.queueBound = pick(s, 2, 10, 100)
	}
}

// shapeObjects has several nodes on one object store.
func (p *params) shapeObjects(s *source) {
	p.machines, p.partitions = 2+s.intn(2), 1+s.intn(2)
	p.sessions, p.clients, p.opsPerClient = 1+s.intn(2), 1+s.intn(2), 10+s.intn(10)
	p.flowClients, p.flowOps, p.workers = 1+s.intn(3), 15+s.intn(20), 1+s.intn(2)
	p.lengthUs = s.between(5_000_000, 12_000_000)
	p.window = pick(s, 1, 2, 4, 8)
	p.ttlUs = pick(s, int64(1_000_000), 1_500_000, 2_000_000)
	p.storeUs, p.giveUpUs = pick(s, int64(1_000), 10_000, 60_000), p.ttlUs/4
	p.storeFaults = pick(s, 0, 2, 10)
	p.faultEveryUs = pick(s, int64(500_000), 1_500_000, 3_000_000)
	p.crashEveryUs, p.appendFails, p.slowAppend, p.snapshots = 0, 0, 0, true
	p.upkeepEveryUs = pick(s, int64(150_000), 600_000)
	p.loseTables = 50
	if p.liars = s.percent(30); p.liars {
		p.upkeepEveryUs, p.faultEveryUs = 100_000, 700_000
	}
}
