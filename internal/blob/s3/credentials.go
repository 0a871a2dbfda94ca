package s3

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
)

const (
	// fetchTimeout bounds one search for credentials, which may ask the network.
	fetchTimeout = 5 * time.Second
	// fetchPause is how long a search that failed is not repeated while the
	// former credentials are still good.
	fetchPause = 10 * time.Second
	// renewAhead is how long before their end credentials are renewed; those
	// that live shorter than twice that, at half of their life.
	renewAhead = 10 * time.Minute
)

// keyring gives credentials and renews them behind the requests' back: only
// the first request, or one after an outage longer than the credentials' life,
// waits for a search.
type keyring struct {
	clock env.Clock
	fetch func(ctx context.Context) (credentials.Value, error)

	mu       sync.Mutex        // guards all below
	value    credentials.Value // empty: none yet, or refused by the store
	renewAt  time.Time         // zero: never
	fetching chan struct{}     // not nil while a search runs, closed at its end
	fetchErr error             // of the last search
	found    bool              // some search has found some
}

// newKeyring takes the fixed credentials of the configuration or, without
// them, searches along the chain with client.
func newKeyring(c Credentials, clock env.Clock, client *http.Client) (*keyring, error) {
	if c != (Credentials{}) {
		if c.AccessKey == "" || c.SecretKey == "" {
			return nil, fmt.Errorf("%w: credentials: access key and secret key are needed, or neither", blob.ErrInvalid)
		}
		return &keyring{clock: clock, value: credentials.Value{
			AccessKeyID: string(c.AccessKey), SecretAccessKey: string(c.SecretKey), SessionToken: string(c.SessionToken),
		}}, nil
	}
	// The chain keeps its state to itself: each search goes along all of it.
	fetch := func(ctx context.Context) (credentials.Value, error) {
		chain := &credentials.Chain{Providers: []credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{},
		}}
		return chain.RetrieveWithCredContext(&credentials.CredContext{Client: client, Context: ctx})
	}
	return &keyring{clock: clock, fetch: fetch}, nil
}

// get returns credentials that are good now. Its error matches blob.ErrDenied
// (there are none), blob.ErrUnavailable (there were some) or is the context's.
func (k *keyring) get(ctx context.Context) (credentials.Value, error) {
	for {
		k.mu.Lock()
		now := k.clock.Now()
		value := k.value
		good := value.AccessKeyID != "" && (value.Expiration.IsZero() || now.Before(value.Expiration))
		if k.fetch != nil && k.fetching == nil && (!good || (!k.renewAt.IsZero() && !now.Before(k.renewAt))) {
			k.fetching = make(chan struct{})
			go k.search(k.fetching)
		}
		fetching := k.fetching
		k.mu.Unlock()
		if good {
			return value, nil
		}
		select {
		case <-fetching:
		case <-ctx.Done():
			return value, fmt.Errorf("while searching for credentials: %w", ctx.Err())
		}
		k.mu.Lock()
		err := k.fetchErr
		k.mu.Unlock()
		if err != nil {
			return value, err
		}
	}
}

var (
	errNoCredentials    = fmt.Errorf("%w: no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine or container a role", blob.ErrDenied)
	errCredentialsEnded = fmt.Errorf("%w: the credentials have ended and no new ones are to be had: see to the source they came from (role, shared file, web identity)", blob.ErrUnavailable)
)

// search asks for credentials once, and ends by closing done.
func (k *keyring) search(done chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	timer := k.clock.AfterFunc(fetchTimeout, cancel)
	value, err := k.fetch(ctx)
	timer.Stop()
	cancel()

	k.mu.Lock()
	defer k.mu.Unlock()
	defer close(done)
	k.fetching = nil
	now := k.clock.Now()
	switch {
	case (err != nil || value.AccessKeyID == "") && k.found: // the text of err may hold what it read
		k.fetchErr, k.renewAt = errCredentialsEnded, now.Add(fetchPause)
		return
	case err != nil || value.AccessKeyID == "":
		k.fetchErr = errNoCredentials
		return
	case !value.Expiration.IsZero():
		left := value.Expiration.Sub(now)
		k.value, k.fetchErr, k.renewAt = value, nil, now.Add(max(left/2, left-renewAhead))
	default:
		k.value, k.fetchErr, k.renewAt = value, nil, time.Time{}
	}
	k.found = true
}

// reject notes that the store called value expired: the next request searches.
func (k *keyring) reject(value credentials.Value) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fetch != nil && k.value == value {
		k.value = credentials.Value{}
	}
}
