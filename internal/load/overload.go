package load

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"
)

// OverloadConfig is one run of `load overload`.
type OverloadConfig struct {
	// Config is what both phases share. Concurrency (default 64) should be
	// the server's own limit of turns, so that the calibration fills it and
	// is not refused. Rate and Sweep are not used.
	Config
	// Factor times the calibrated rate is offered, default 10.
	Factor float64
	// For is how long the overload lasts, default 10 s.
	For time.Duration
	// MaxWorkers caps the overload's connections, default 4,096.
	MaxWorkers int
	// UpstreamLimit, when positive, is the provider's concurrency limit that
	// the mock's max_concurrent must not exceed.
	UpstreamLimit int
	// MaxRejectedP99 bounds the time of a refusal, from its sending, default
	// 5 ms; MaxRecovery that of the recovery, default 2 s.
	MaxRejectedP99, MaxRecovery time.Duration
}

// OverloadReport is the outcome, as --json prints it.
type OverloadReport struct {
	AcceptedPerS float64 `json:"accepted_per_s"` // calibrated
	Factor       float64 `json:"factor"`
	Calibration  Point   `json:"calibration"`
	Overload     Point   `json:"overload"`
	// GoodputRatio is the accepted rate under overload by the calibrated one.
	GoodputRatio float64 `json:"goodput_ratio"`
	// RecoveryMS is the time from the overload's end to the acceptance of a
	// probe turn that is tried every 20 ms.
	RecoveryMS float64 `json:"recovery_ms"`
	Checks     []Check `json:"checks"`
	Pass       bool    `json:"pass"` // every check is ok
}

// Check is one thing that must hold.
type Check struct {
	Name string  `json:"name"`
	Got  float64 `json:"got"`
	Want string  `json:"want"`
	OK   bool    `json:"ok"`
}

// Overload calibrates the rate that the server accepts with a closed loop,
// offers Factor times as much in an open loop, and then measures how soon a
// probe is accepted. The error is as Run's; failed checks are in the report.
func Overload(ctx context.Context, cfg OverloadConfig) (OverloadReport, error) {
	def(&cfg.Concurrency, 64)
	def(&cfg.Factor, 10)
	def(&cfg.For, 10*time.Second)
	def(&cfg.MaxWorkers, 4096)
	def(&cfg.MaxRejectedP99, 5*time.Millisecond)
	def(&cfg.MaxRecovery, 2*time.Second)
	if !(cfg.Factor > 1 && cfg.Factor <= 1000) || cfg.For < 0 || cfg.MaxWorkers < 1 || cfg.MaxWorkers > maxConcurrency {
		return OverloadReport{}, fmt.Errorf("overload: factor %g, for %v, %d workers: want a factor in (1, 1000], a time and 1 to %d workers",
			cfg.Factor, cfg.For, cfg.MaxWorkers, maxConcurrency)
	}
	cfg.Rate, cfg.Sweep = 0, nil
	r, err := newRun(ctx, cfg.Config)
	if err != nil {
		return OverloadReport{}, err
	}
	rep := OverloadReport{Factor: cfg.Factor}
	if rep.Calibration, err = r.closed(ctx, cfg.Concurrency); err != nil {
		return rep, err
	}
	if rep.AcceptedPerS = rep.Calibration.TurnsPerS; rep.AcceptedPerS == 0 {
		return rep, fmt.Errorf("overload: no turn was accepted in the calibration (%v)", rep.Calibration.ErrorKinds)
	}
	r.cfg.Duration = cfg.For
	var recovery attempt
	var end int64
	rep.Overload, err = r.offer(ctx, cfg.MaxWorkers, rep.AcceptedPerS*cfg.Factor, func(t1 int64) {
		end = t1
		recovery = r.recover(ctx)
	})
	if err != nil {
		return rep, err
	}
	rep.GoodputRatio = roundTo(rep.Overload.TurnsPerS/rep.AcceptedPerS, 1000)
	rep.RecoveryMS = millis(recovery.accepted - end)
	rep.judge(cfg, recovery)
	return rep, r.reportOverload(rep)
}

// recover tries a turn until one is accepted, for at most half a minute.
func (r *run) recover(ctx context.Context) attempt {
	const every, limit = 20 * time.Millisecond, 30 * time.Second
	w := r.newWorker()
	defer w.c.close()
	defer context.AfterFunc(ctx, w.c.abort)()
	for began := r.now(); ; {
		a := w.try(ctx)
		if a.accepted != 0 || ctx.Err() != nil || r.now()-began > int64(limit) {
			w.shut(ctx)
			return a
		}
		if a.class != "" {
			r.col.fail(a.class, a.detail)
		}
		sleep(ctx, r.cfg.Env.Clock, every)
	}
}

func (rep *OverloadReport) judge(cfg OverloadConfig, recovery attempt) {
	check := func(name string, got float64, want string, ok bool) {
		rep.Checks = append(rep.Checks, Check{name, got, want, ok})
	}
	o := &rep.Overload
	check("errors", float64(o.Errors), "0", o.Errors == 0)
	check("broken_streams", float64(o.BrokenStreams), "0", o.BrokenStreams == 0)
	check("rejected", float64(o.Rejected), "> 0", o.Rejected > 0)
	if q := o.RejectedOwnMS; q != nil {
		most := millis(int64(cfg.MaxRejectedP99))
		check("rejected_p99_ms", q.P99, fmt.Sprintf("< %g", most), q.P99 < most)
	}
	most := millis(int64(cfg.MaxRecovery))
	check("recovery_ms", rep.RecoveryMS, fmt.Sprintf("< %g, and the probe's turn completes", most),
		recovery.accepted != 0 && recovery.class == "" && rep.RecoveryMS < most)
	if cfg.UpstreamLimit > 0 {
		got := -1.0 // the upstream keeps no stats: not shown, so not held
		if o.Mock != nil {
			got = float64(o.Mock.MaxConcurrent)
		}
		check("upstream_max_concurrent", got, fmt.Sprintf("1 to %d", cfg.UpstreamLimit), got >= 1 && got <= float64(cfg.UpstreamLimit))
	}
	rep.Pass = true
	for _, c := range rep.Checks {
		rep.Pass = rep.Pass && c.OK
	}
}

func (r *run) reportOverload(rep OverloadReport) error {
	if r.cfg.JSON {
		return writeLine(r.cfg.Out, rep)
	}
	if err := WriteTable(r.cfg.Out, []Point{rep.Calibration, rep.Overload}); err != nil {
		return err
	}
	tw := tabwriter.NewWriter(r.cfg.Out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintf(tw, "\noffered %g/s, accepted %g/s (%.0f %% of the calibrated rate)\n\ncheck\tgot\twant\t\n",
		rep.Overload.OfferedPerS, rep.Overload.TurnsPerS, rep.GoodputRatio*100)
	for _, c := range rep.Checks {
		verdict := "ok"
		if !c.OK {
			verdict = "FAILED"
		}
		_, _ = fmt.Fprintf(tw, "%s\t%g\t%s\t%s\n", c.Name, c.Got, c.Want, verdict)
	}
	return tw.Flush()
}
