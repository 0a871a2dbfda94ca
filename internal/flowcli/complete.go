package flowcli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

const completeTime = 700 * time.Millisecond // a shell must not hang on a server that is away

// completeIDs gives the newest flows that a query finds, for the shell.
func (a *app) completeIDs(query string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
		defer cancel()
		c, err := a.connect(ctx, false)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer c.Close()
		full := query
		if begin != "" && !strings.ContainsAny(begin, `"\`) {
			full = `id ^= "` + begin + `"`
			if query != "" {
				full += " and " + query
			}
		}
		var ids []string
		for i, err := range c.Search(ctx, full, 50) {
			if err != nil {
				break
			}
			ids = append(ids, cobra.CompletionWithDesc(i.ID, i.Type+", "+i.Status.String()))
		}
		return ids, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeNames completes a flag by fixed words.
func completeNames(c *cobra.Command, flag string, names ...string) {
	// It fails only for a flag that is not there.
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}
