package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/agent"
	"github.com/perdure-dev/perdure/internal/core"
	"github.com/perdure-dev/perdure/internal/partition"
)

func TestSessionLife(t *testing.T) {
	w := newWorld(t, 0)
	s, err := w.svc.Create(w.ctx, tenant, CreateRequest{ID: "x", Agent: "a", Metadata: json.RawMessage(`{"k":1}`),
		History: []json.RawMessage{UserMessage([]byte(`"before"`)), json.RawMessage(`{"role":"assistant","content":"yes"}`)}})
	if err != nil {
		t.Fatal(err)
	}
	if s.ID != "x" || s.Agent != "a" || s.Status != "idle" || s.Messages != 2 || string(s.Metadata) != `{"k":1}` {
		t.Fatalf("%+v", s)
	}
	watch := w.start("x", "hold", enqueue)
	w.awaitHeld()
	next := w.start("x", "next", enqueue)
	if s, err = w.svc.Get(w.ctx, tenant, "x"); err != nil || s.Status != "running" || s.ActiveTurn != watch.Turn() || s.Queued != 1 {
		t.Fatalf("%+v %v", s, err)
	}
	w.release <- struct{}{}
	w.await(agent.EventCompleted)
	w.await(agent.EventCompleted)
	if s, err = w.svc.Get(w.ctx, tenant, "x"); err != nil || s.Status != "idle" || s.ActiveTurn != "" || s.Queued != 0 || s.Messages != 6 {
		t.Fatalf("%+v %v", s, err)
	}
	if err := w.svc.Delete(w.ctx, tenant, "x"); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"get":    second(w.svc.Get(w.ctx, tenant, "x")),
		"delete": w.svc.Delete(w.ctx, tenant, "x"),
		"cancel": second(w.svc.Cancel(w.ctx, tenant, "x", "", "")),
		"watch":  second(w.svc.Watch(w.ctx, tenant, "x", "")),
		"turn":   second(w.svc.StartTurn(w.ctx, tenant, "x", turnRequest("hi", enqueue))),
	} {
		if code(err) != core.NotFound || !strings.Contains(err.Error(), `session "x"`) {
			t.Errorf("%s after delete: %v", what, err)
		}
	}
	watch.Close()
	next.Close()
	if n := w.hub.Watched(); n != 0 {
		t.Errorf("%d flows are watched", n)
	}
}

func second[T any](_ T, err error) error { return err }

func TestRefusals(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	for what, c := range map[string]struct {
		err, want error
	}{
		"no such agent": {second(w.svc.Create(w.ctx, tenant, CreateRequest{Agent: "none"})), agent.ErrNoAgent},
		"bad id":        {second(w.svc.Create(w.ctx, tenant, CreateRequest{ID: "a/b", Agent: "a"})), ErrBadID},
		"long id":       {second(w.svc.Get(w.ctx, tenant, strings.Repeat("a", 129))), ErrBadID},
		"no id":         {second(w.svc.Get(w.ctx, tenant, "")), ErrBadID},
		"bad cursor":    {second(w.svc.Watch(w.ctx, tenant, "x", "twelve")), ErrBadCursor},
		"cursor ahead":  {second(w.svc.Watch(w.ctx, tenant, "x", "99999.0")), ErrCursorAhead},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v", what, c.err)
		}
	}
	if _, err := w.svc.Create(w.ctx, tenant, CreateRequest{ID: "x", Agent: "a"}); code(err) != core.Exists {
		t.Errorf("second create: %v", err)
	}
	if _, err := w.svc.Create(w.ctx, tenant, CreateRequest{Agent: "a", Metadata: make([]byte, 17<<10)}); code(err) != core.LimitReached {
		t.Errorf("metadata: %v", err)
	}
	if _, err := w.svc.Get(w.ctx, "other", "x"); code(err) != core.NotFound {
		t.Errorf("another tenant: %v", err)
	}
}

func TestListPagesOverAllPartitions(t *testing.T) {
	w := newWorld(t, 0)
	var want []string
	used := map[int]bool{}
	for i := range 23 {
		id := fmt.Sprintf("s_%03d", i*7%23)
		w.create(id)
		want = append(want, id)
		used[partition.Of(tenant+"/s/"+id, len(w.set))] = true
	}
	if len(used) != len(w.set) {
		t.Fatal("the sessions are all in one partition")
	}
	slices.Sort(want)
	slices.Reverse(want)
	for _, id := range []string{"s_000", "z"} {
		if _, err := w.svc.Create(w.ctx, "other", CreateRequest{ID: id, Agent: "a"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.svc.Create(w.ctx, tenant, CreateRequest{Agent: "a", Stateless: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: "mine", Provider: "p"}); err != nil {
		t.Fatal(err)
	}
	for _, limit := range []int{1, 2, 5, 22, 23, 24, 0, -1, MaxPage + 1} {
		var got []string
		after := ""
		for {
			page, more, err := w.svc.List(w.ctx, tenant, after, limit)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range page {
				got = append(got, s.ID)
			}
			if !more {
				break
			}
			if limit > 0 && len(page) != limit || len(got) > len(want) {
				t.Fatalf("limit %d: page of %d, %d so far", limit, len(page), len(got))
			}
			after = page[len(page)-1].ID
		}
		if !slices.Equal(got, want) {
			t.Fatalf("limit %d: %v\nwant %v", limit, got, want)
		}
	}
	for _, after := range []string{"s_000", "a", "\x00", "/", "../../other/s/zz"} {
		if page, more, err := w.svc.List(w.ctx, tenant, after, 10); err != nil || more || len(page) > 0 {
			t.Errorf("after %q: %v %t %v", after, page, more, err)
		}
	}
	if page, _, err := w.svc.List(w.ctx, tenant, "~\xff", 100); err != nil || len(page) != len(want) {
		t.Errorf("from beyond the end: %d %v", len(page), err)
	}
}

func TestMessagesPage(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	var want []string
	for i := range 7 {
		text := fmt.Sprint("message ", i)
		w.rest(w.start("x", text, enqueue))
		want = append(want, "user "+text, "assistant "+text)
	}
	for _, limit := range []int{1, 2, 3, 13, 14, 15, 0} {
		var got []string
		after := ""
		for pages := 0; ; pages++ {
			list, next, err := w.svc.Messages(w.ctx, tenant, "x", after, limit)
			if err != nil {
				t.Fatal(err)
			}
			if limit > 0 && len(list) > limit || pages > len(want) {
				t.Fatalf("limit %d: a page of %d, page %d", limit, len(list), pages)
			}
			for _, m := range list {
				var msg struct{ Role, Content string }
				if err := json.Unmarshal(m.Message, &msg); err != nil {
					t.Fatal(err)
				}
				if m.TurnID == "" || m.EventID == "" || m.At.IsZero() || m.Partial {
					t.Errorf("%+v", m)
				}
				got = append(got, msg.Role+" "+msg.Content)
			}
			if next == "" {
				break
			}
			after = next
		}
		if !slices.Equal(got, want) {
			t.Fatalf("limit %d: %q", limit, got)
		}
	}
}

func TestPartialMessageIsMarked(t *testing.T) {
	w := newWorld(t, 0)
	w.create("x")
	watch := w.start("x", "hold", enqueue)
	w.awaitHeld()
	if _, err := w.svc.Cancel(w.ctx, tenant, "x", "", "enough"); err != nil {
		t.Fatal(err)
	}
	w.rest(watch)
	list, _, err := w.svc.Messages(w.ctx, tenant, "x", "", 0)
	if err != nil || len(list) != 2 || list[0].Partial || !list[1].Partial {
		t.Fatalf("%+v %v", list, err)
	}
}

func TestAgentsAreDurable(t *testing.T) {
	w := newWorld(t, 0)
	for _, name := range []string{"one", "two", "three"} {
		if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: name, Provider: "p", Instructions: "first"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: "two", Provider: "p", Instructions: "second"}); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.DeleteAgent(w.ctx, tenant, "three"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: "a", Provider: "p"}); !errors.Is(err, agent.ErrConfigged) {
		t.Errorf("the config's agent: %v", err)
	}
	if err := w.svc.DeleteAgent(w.ctx, tenant, "a"); !errors.Is(err, agent.ErrConfigged) {
		t.Errorf("the config's agent: %v", err)
	}
	var de *agent.DefinitionError
	if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: "bad", Provider: "none"}); !errors.As(err, &de) {
		t.Errorf("bad definition: %v", err)
	}
	check := func() {
		t.Helper()
		var got []string
		for _, a := range w.svc.Agents().List(tenant) {
			got = append(got, a.Def.Name+" "+a.Def.Instructions)
		}
		if want := []string{"a ", "one first", "two second"}; !slices.Equal(got, want) {
			t.Fatalf("agents %q", got)
		}
		if n := len(w.svc.Agents().List("other")); n != 1 {
			t.Errorf("another tenant has %d agents", n)
		}
	}
	check()
	w.restart(0)
	if err := w.svc.LoadAgents([]string{tenant, "other"}, func(_, name string, err error) { t.Errorf("%s left out: %v", name, err) }); err != nil {
		t.Fatal(err)
	}
	check()
}

func TestAgentWhoseProviderIsGoneIsLeftOut(t *testing.T) {
	w := newWorld(t, 0)
	for _, name := range []string{"one", "two"} {
		if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: name, Provider: "p"}); err != nil {
			t.Fatal(err)
		}
	}
	w.restart(0)
	w.svc.cfg.Agents = agent.NewRegistry(map[string]*agent.Provider{"q": {Name: "q"}}, nil, nil)
	var skipped []string
	if err := w.svc.LoadAgents([]string{tenant}, func(_, name string, err error) { skipped = append(skipped, name) }); err != nil {
		t.Fatal(err)
	}
	slices.Sort(skipped)
	if !slices.Equal(skipped, []string{"one", "two"}) || len(w.svc.Agents().List(tenant)) != 0 {
		t.Fatalf("left out %v", skipped)
	}
	if err := w.svc.DeleteAgent(w.ctx, tenant, "one"); err != nil {
		t.Errorf("it cannot be deleted: %v", err)
	}
}

// A name that no agent can have must not reach the partition, which would take
// it for damage of its tables.
func TestDeleteAgentWithABadName(t *testing.T) {
	w := newWorld(t, 0)
	for _, name := range []string{"", "none", "a\x00b", strings.Repeat("x", 1000), "../s/x"} {
		if err := w.svc.DeleteAgent(w.ctx, tenant, name); !errors.Is(err, agent.ErrNoAgent) {
			t.Errorf("%.20q: %v", name, err)
		}
	}
	w.create("x")
}

// What the registry says is what was committed last.
func TestAgentsFollowTheOrderOfCommits(t *testing.T) {
	w := newWorld(t, 0)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := range 10 {
				if n%5 == 4 {
					if err := w.svc.DeleteAgent(w.ctx, tenant, "one"); err != nil && !errors.Is(err, agent.ErrNoAgent) {
						t.Error(err)
					}
					continue
				}
				if _, err := w.svc.PutAgent(w.ctx, tenant, agent.Definition{Name: "one", Provider: "p", Instructions: fmt.Sprint(i, n)}); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	was := w.svc.Agents().List(tenant)
	w.restart(0)
	if err := w.svc.LoadAgents([]string{tenant}, func(_, name string, err error) { t.Errorf("%s left out: %v", name, err) }); err != nil {
		t.Fatal(err)
	}
	is := w.svc.Agents().List(tenant)
	if len(was) != len(is) || was[len(was)-1].Def.Instructions != is[len(is)-1].Def.Instructions {
		t.Fatalf("before the restart %+v, after %+v", was, is)
	}
}

func TestRetentionOfStatelessSessions(t *testing.T) {
	w := newWorld(t, 0)
	watch, id, err := w.svc.CreateAndStart(w.ctx, tenant, CreateRequest{Agent: "a", Stateless: true}, turnRequest("hi", enqueue))
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	w.rest(watch)
	flow, err := flowID(tenant, id)
	if err != nil || !strings.HasPrefix(flow, tenant+"/c/") {
		t.Fatalf("%q %v", flow, err)
	}
	f, err := w.set.For(flow).Read(w.ctx, flow)
	if err != nil || f.RetentionUs != time.Hour.Microseconds() || f.ExpireUs == 0 {
		t.Fatalf("%+v %v", f, err)
	}
}
