package query

import "strings"

// Field is what a comparison looks at.
type Field uint8

// The fields. Attribute goes with a name.
const (
	Attribute Field = iota
	ID
	Type
	Run
	Fault // error
	Status
	Created
	Updated
	Closed
	Priority
)

var fieldNames = [...]string{
	ID: "id", Type: "type", Run: "run", Fault: "error", Status: "status",
	Created: "created", Updated: "updated", Closed: "closed", Priority: "priority",
}

// statusNames are in the order of wire.Status.
var statusNames = [...]string{"running", "completed", "failed", "cancelled", "terminated", "timed_out"}

func fieldByName(name string) (Field, bool) {
	for f, n := range fieldNames {
		if n != "" && strings.EqualFold(n, name) {
			return Field(f), true
		}
	}
	return Attribute, false
}

func statusByName(name string) (int64, bool) {
	for i, n := range statusNames {
		if strings.EqualFold(n, name) {
			return int64(i), true
		}
	}
	return 0, false
}

// class says what may be compared with a field.
type class uint8

const (
	classAny class = iota
	classText
	classStatus
	classTime
	classNumber
)

func (f Field) class() class {
	switch f {
	case ID, Type, Run, Fault:
		return classText
	case Status:
		return classStatus
	case Created, Updated, Closed:
		return classTime
	case Priority:
		return classNumber
	}
	return classAny
}

// allows says whether a comparison makes sense for a class.
func (c class) allows(o op) bool {
	switch o {
	case opEq, opNe, opIn:
		return true
	case opPrefix, opContains:
		return c == classText || c == classAny
	}
	return c != classStatus
}
