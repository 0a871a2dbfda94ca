package schedule

import (
	"fmt"
	"math/bits"
	"strings"
	"time"
	_ "time/tzdata" // zones must not depend on the machine

	"github.com/robfig/cron/v3"
)

// Bounds of what a schedule can say of its times.
const (
	maxCron = 256 // bytes
	minStep = time.Second
	maxStep = 366 * 24 * time.Hour
	// maxYears is how far ahead the next instant is looked for: the 29th of
	// February may be eight years away, on a given weekday up to 40.
	maxYears = 41
)

// Times is when a schedule fires: a cron expression in a time zone, or a fixed
// interval. Instants are whole seconds. It never changes.
//
// Local times are those of the wall clock. Where clocks go back, an hour comes
// twice: schedules for every hour fire in both, those for certain hours in the
// first one only. Where clocks go forward, schedules for certain hours that are
// left out fire once, at the first instant after the gap.
//
// Intervals count from the beginning of 1970 in UTC: @every 10m fires at every
// full ten minutes, whenever the schedule was made.
type Times struct {
	every time.Duration // or:
	spec  *cron.SpecSchedule
	zone  *time.Location
}

// fields of a cron expression, by name and bounds.
var fields = [...]string{"minute", "hour", "day of month", "month", "day of week"}

const parseFields = cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor

// everyHour is the mark of * in a field of the parsed expression.
const everyHour = 1 << 63

// ParseTimes reads a cron expression of five fields, @hourly, @daily, @weekly,
// @monthly, @yearly or @every and a duration, and an IANA time zone (empty:
// UTC). Errors are an *Invalid.
func ParseTimes(expr, zone string) (*Times, error) {
	loc, err := loadZone(zone)
	if err != nil {
		return nil, err
	}
	expr = strings.TrimSpace(expr)
	switch {
	case expr == "":
		return nil, invalid("write five fields, for example 0 3 * * 1-5, or @daily or @every 10m", "the cron expression is empty")
	case len(expr) > maxCron:
		return nil, invalid("", "the cron expression has %d bytes, at most %d", len(expr), maxCron)
	case strings.Contains(expr, "TZ="):
		return nil, invalid("set time_zone beside it", "the cron expression has a time zone in it")
	}
	if rest, ok := strings.CutPrefix(expr, "@every"); ok {
		return parseEvery(strings.TrimSpace(rest), loc)
	}
	spec, err := parseCron(expr)
	if err != nil {
		return nil, err
	}
	t := &Times{spec: spec, zone: loc}
	if at := t.Next(time.Unix(0, 0)); at.IsZero() {
		return nil, invalid("check day and month", "the cron expression %q never fires", expr)
	}
	return t, nil
}

func loadZone(name string) (*time.Location, error) {
	if name == "" {
		return time.UTC, nil
	}
	loc, err := time.LoadLocation(name)
	if err != nil || name == "Local" || len(name) > 64 {
		return nil, invalid("write an IANA name, for example Europe/Berlin, or leave it empty for UTC", "time zone %q is not known", clip(name))
	}
	return loc, nil
}

func parseEvery(s string, loc *time.Location) (*Times, error) {
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		return nil, invalid("write for example @every 10m or @every 1h30m", "@every %q is not a duration", clip(s))
	case d < minStep || d > maxStep:
		return nil, invalid("", "@every %s must be from %s to %s", d, minStep, maxStep)
	case d%time.Second != 0:
		return nil, invalid("", "@every %s is not of whole seconds", d)
	}
	return &Times{every: d, zone: loc}, nil
}

// parseCron tells which field is wrong, and how.
func parseCron(expr string) (spec *cron.SpecSchedule, err error) {
	parser := cron.NewParser(parseFields)
	parts := strings.Fields(expr)
	if !strings.HasPrefix(expr, "@") {
		if len(parts) != len(fields) {
			return nil, invalid("the fields are minute, hour, day of month, month, day of week", "the cron expression %q has %d fields, must have five", clip(expr), len(parts))
		}
		for i, part := range parts {
			alone := []string{"*", "*", "*", "*", "*"}
			alone[i] = part
			if _, err := parser.Parse(strings.Join(alone, " ")); err != nil || strings.HasSuffix(part, "/") {
				return nil, invalid(fieldHints[i], "field %d of the cron expression (%s) is wrong: %q: %s", i+1, fields[i], clip(part), reason(err))
			}
		}
	}
	s, err := parser.Parse(strings.Join(parts, " "))
	spec, ok := s.(*cron.SpecSchedule)
	if err != nil || !ok {
		return nil, invalid("write @hourly, @daily, @weekly, @monthly, @yearly or @every 10m", "%q is not known", clip(expr))
	}
	return spec, nil
}

var fieldHints = [...]string{
	"0 to 59, *, lists 0,30, ranges 0-15 and steps */5",
	"0 to 23, *, lists 8,20, ranges 9-17 and steps */2",
	"1 to 31, *, lists 1,15, ranges 1-7 and steps */2",
	"1 to 12 or jan to dec, *, lists, ranges and steps",
	"0 (Sunday) to 6 or sun to sat, *, lists and ranges mon-fri",
}

func reason(err error) string {
	switch {
	case err == nil:
		return "it has no end"
	case strings.Contains(err.Error(), "strconv"):
		return "it is not a number"
	}
	return strings.TrimPrefix(err.Error(), "failed to parse ")
}

// Next is the first instant after t, or zero when there is none.
func (t *Times) Next(after time.Time) time.Time {
	if t.every > 0 {
		step := int64(t.every / time.Second)
		sec := after.Unix()
		n := sec - mod(sec, step)
		return time.Unix(n+step, 0).UTC()
	}
	local := after.In(t.zone)
	date := civil{local.Year(), local.Month(), local.Day()}
	for last := date.year + maxYears; date.year <= last; {
		if !t.inMonth(date) {
			date = date.nextMonth()
			continue
		}
		if t.onDay(date) {
			if at := t.inDay(date, after); !at.IsZero() {
				return at.UTC()
			}
		}
		date = date.next()
	}
	return time.Time{}
}

func mod(a, b int64) int64 { return (a%b + b) % b }

// civil is a day of the calendar.
type civil struct {
	year  int
	month time.Month
	day   int
}

func (c civil) next() civil {
	y, m, d := time.Date(c.year, c.month, c.day+1, 0, 0, 0, 0, time.UTC).Date()
	return civil{y, m, d}
}

func (c civil) nextMonth() civil {
	y, m, d := time.Date(c.year, c.month+1, 1, 0, 0, 0, 0, time.UTC).Date()
	return civil{y, m, d}
}

func (t *Times) inMonth(c civil) bool { return t.spec.Month>>uint(c.month)&1 != 0 }

// onDay is as cron has always had it: where both days are given, either will do.
func (t *Times) onDay(c civil) bool {
	weekday := time.Date(c.year, c.month, c.day, 0, 0, 0, 0, time.UTC).Weekday()
	dom, dow := t.spec.Dom>>uint(c.day)&1 != 0, t.spec.Dow>>uint(weekday)&1 != 0
	if t.spec.Dom&everyHour != 0 || t.spec.Dow&everyHour != 0 {
		return dom && dow
	}
	return dom || dow
}

// inDay is the first instant of a day that is after an instant, or zero.
func (t *Times) inDay(c civil, after time.Time) time.Time {
	wall := time.Date(c.year, c.month, c.day, 0, 0, 0, 0, time.UTC)
	before, behind := t.offset(wall.Add(-24*time.Hour)), t.offset(wall.Add(48*time.Hour))
	if before == behind {
		return t.inPlainDay(wall, before, after)
	}
	var first time.Time
	for h := t.spec.Hour &^ everyHour; h != 0; h &= h - 1 {
		for m := t.spec.Minute &^ everyHour; m != 0; m &= m - 1 {
			w := wall.Add(time.Duration(bits.TrailingZeros64(h))*time.Hour + time.Duration(bits.TrailingZeros64(m))*time.Minute)
			for _, at := range t.instants(w, before, behind) {
				if at.After(after) && (first.IsZero() || at.Before(first)) {
					first = at
				}
			}
		}
	}
	return first
}

// offset is that of the zone at an instant.
func (t *Times) offset(at time.Time) time.Duration {
	_, sec := at.In(t.zone).Zone()
	return time.Duration(sec) * time.Second
}

// inPlainDay is inDay where clocks are not changed.
func (t *Times) inPlainDay(wall time.Time, offset time.Duration, after time.Time) time.Time {
	from := 0 // minute of the day
	if since := after.Add(offset).Sub(wall); since >= 0 {
		from = int(since/time.Minute) + 1
	}
	for h := from / 60; h < 24; h++ {
		if t.spec.Hour>>uint(h)&1 == 0 {
			continue
		}
		minutes := t.spec.Minute &^ everyHour
		if h == from/60 {
			minutes &= ^uint64(0) << uint(from%60)
		}
		if minutes != 0 {
			at := time.Duration(h)*time.Hour + time.Duration(bits.TrailingZeros64(minutes))*time.Minute
			return wall.Add(at - offset)
		}
	}
	return time.Time{}
}

// instants is when clocks show a time of the day on which they are changed from
// one offset to the other: see Times.
func (t *Times) instants(wall time.Time, before, behind time.Duration) []time.Time {
	var out []time.Time
	for _, offset := range []time.Duration{before, behind} {
		if at := wall.Add(-offset); t.offset(at) == offset {
			out = append(out, at)
		}
	}
	every := t.spec.Hour&everyHour != 0
	switch {
	case len(out) == 0 && !every: // left out
		return []time.Time{t.change(wall.Add(-max(before, behind)-time.Minute), wall.Add(-min(before, behind)+time.Minute))}
	case len(out) == 2 && out[1].Before(out[0]):
		out[0], out[1] = out[1], out[0]
	}
	if len(out) == 2 && !every {
		return out[:1]
	}
	return out
}

// change is the first second of the new offset between two instants.
func (t *Times) change(from, to time.Time) time.Time {
	old := t.offset(from)
	for to.Sub(from) > time.Second {
		mid := from.Add(to.Sub(from) / 2).Truncate(time.Second)
		if !mid.After(from) {
			break
		}
		if t.offset(mid) == old {
			from = mid
		} else {
			to = mid
		}
	}
	return to
}

// clip bounds what of a request goes into an error.
func clip(s string) string {
	if len(s) <= 80 {
		return s
	}
	return strings.ToValidUTF8(s[:80], "") + "…"
}

// Invalid says what is wrong with a request, and what to write instead.
type Invalid struct{ Message, Hint string }

func (e *Invalid) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + " (" + e.Hint + ")"
}

func invalid(hint, format string, args ...any) error {
	return &Invalid{Message: fmt.Sprintf(format, args...), Hint: hint}
}
