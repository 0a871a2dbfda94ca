package dispatch

// list is an intrusive list, oldest first: what is in it carries its own elem,
// so that putting and taking allocate nothing. The zero list is empty.
type list[T any] struct {
	head, tail *elem[T]
	n          int
}

// elem makes its holder able to be in one list at a time.
type elem[T any] struct {
	prev, next *elem[T]
	in         *list[T]
	of         *T
}

func (l *list[T]) push(e *elem[T], of *T) {
	e.in, e.of, e.prev, e.next = l, of, l.tail, nil
	if l.tail != nil {
		l.tail.next = e
	} else {
		l.head = e
	}
	l.tail = e
	l.n++
}

func (l *list[T]) pushFront(e *elem[T], of *T) {
	e.in, e.of, e.prev, e.next = l, of, nil, l.head
	if l.head != nil {
		l.head.prev = e
	} else {
		l.tail = e
	}
	l.head = e
	l.n++
}

// first gives the oldest, or nil.
func (l *list[T]) first() *T {
	if l.head == nil {
		return nil
	}
	return l.head.of
}

// leave takes the holder out of the list it is in, if any.
func (e *elem[T]) leave() {
	l := e.in
	if l == nil {
		return
	}
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		l.head = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		l.tail = e.prev
	}
	l.n--
	e.in, e.prev, e.next = nil, nil, nil
}

// byName is lists by a name, in the order in which the names came first. Those
// that are empty are dropped, so there are as many as names that wait.
type byName[T any] struct {
	lists []*named[T]
	n     int
}

type named[T any] struct {
	name string
	list list[T]
}

func (b *byName[T]) push(name string, e *elem[T], of *T) {
	b.n++
	for _, l := range b.lists {
		if l.name == name {
			l.list.push(e, of)
			return
		}
	}
	l := &named[T]{name: name}
	l.list.push(e, of)
	b.lists = append(b.lists, l)
}

// remove takes e out of the lists; it must be in one of them.
func (b *byName[T]) remove(e *elem[T]) {
	e.leave()
	b.n--
	for i, l := range b.lists {
		if l.list.n == 0 {
			b.lists = append(b.lists[:i], b.lists[i+1:]...)
			return
		}
	}
}

// next gives the oldest one of the first name that has accepts.
func (b *byName[T]) next(has map[string]bool) *T {
	for _, l := range b.lists {
		if has[l.name] {
			return l.list.first()
		}
	}
	return nil
}
