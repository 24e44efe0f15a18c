/*
 * core_cluster.h: N engine cores, their front ends, a coordinator's relay and a trainer in one
 * process: null executors, in-memory collectives and transfers, a virtual clock, and a seeded
 * scheduler that picks which message, vote or engine goes next.
 *
 * Every token is checked as it arrives: it must be the one that the null executor makes from the
 * weights of the epoch it is labelled with and from all tokens before it.
 */
#ifndef LK_TESTS_CORE_CLUSTER_H
#define LK_TESTS_CORE_CLUSTER_H

#include "base/prng.h"
#include "engine_core/engine_core.h"
#include "tests/lib/allreduce_mem.h"
#include "tests/lib/ep_mem.h"
#include "transfer/backends/mem/mem_stream.h"
#include "transfer/backends/transfer_sender.h"

#define CC_MAX_RANKS     4
#define CC_MAX_FRONTENDS 2
#define CC_MAX_REQUESTS  256
#define CC_MAX_CALLS     128
#define CC_MAX_EPOCHS    64
#define CC_MAX_TOKENS    256
#define CC_TRAINER       "core-cluster-trainer"
#define CC_TOKEN         "a session token"

typedef struct {
    uint32_t n_ranks, n_frontends, sync_interval;
    bool moe; /* experts over the ranks: lockstep */
    bool doorbell, reject_while_paused, no_transfer, shadow;
    uint32_t num_blocks;
    uint64_t seed;
} cc_config_t;

typedef struct {
    uint32_t frontend, rank, n_prompt, n_tokens;
    uint32_t tokens[CC_MAX_TOKENS];
    uint64_t epochs[CC_MAX_TOKENS]; /* of output token i */
    finish_reason_t finish;
    int64_t error_status;
    char error[512], version[64];
    char span_version[64]; /* of the first weight span */
    uint32_t n_snapshots, n_weight_spans, n_kv_spans;
    epoch_span_t weight_spans[16], kv_spans[16];
} cc_request_t;

typedef struct {
    uint32_t frontend;
    uint64_t generation, number;
    unsigned seen, done;
    lk_status_t status[CC_MAX_RANKS];
    char text[CC_MAX_RANKS][512], body[CC_MAX_RANKS][512];
    unsigned repeats;
} cc_call_t;

typedef struct {
    uint32_t frontend;
    msg_t msg;
    char *spec;       /* owned */
    uint32_t *prompt; /* owned */
} cc_queued_t;

typedef struct {
    cc_queued_t items[512];
    size_t head, n;
    bool blocked;
} cc_link_t;

typedef struct cc {
    cc_config_t config;
    lk_prng_t prng;
    uint64_t now_ns;
    lk_env_t env;
    model_config_t model;
    allreduce_mem_t *hub;
    ep_mem_t *ep;
    executor_t *executors[CC_MAX_RANKS];
    engine_core_t *engines[CC_MAX_RANKS];
    struct cc_host {
        struct cc *cc;
        uint32_t rank;
    } hosts[CC_MAX_RANKS];
    digest_t digests[CC_MAX_EPOCHS]; /* by epoch, modulo their number */

    cc_link_t links[CC_MAX_FRONTENDS][CC_MAX_RANKS];
    uint64_t starts[CC_MAX_RANKS][64];
    size_t n_starts[CC_MAX_RANKS];
    uint64_t group_epoch;
    uint64_t generation[CC_MAX_FRONTENDS], next_number[CC_MAX_FRONTENDS];
    cc_request_t requests[CC_MAX_REQUESTS]; /* handle = index + 1 */
    size_t n_requests;
    cc_call_t calls[CC_MAX_CALLS];
    size_t n_calls;
    char utility[CC_MAX_RANKS][2048];
    lk_status_t utility_status[CC_MAX_RANKS];
    char dead[CC_MAX_RANKS][512], left[CC_MAX_RANKS][512]; /* newest ENGINE_DEAD, LEFT */
    msg_group_t group;
    uint64_t beats[CC_MAX_FRONTENDS], missed[CC_MAX_FRONTENDS]; /* HEARTBEAT, MISSED to it */
    uint64_t loads, heartbeats, silences;                       /* silences: announced */
    uint64_t silence_ms[CC_MAX_RANKS];                          /* of the newest heartbeat */
    msg_load_t load[CC_MAX_RANKS];
    size_t outputs_messages;

    mem_listener_t *listener;
    transfer_sender_t *sender;
    bool sending;
    void **data; /* of the trainer's tensors, [weight table count] */
    tensor_desc_t *descs;
    size_t n_tensors;
} cc_t;

cc_t *cc_new(const cc_config_t *config);
void cc_destroy(cc_t **self_p);

/* Returns the request's index. The prompt is a function of the index. */
size_t cc_add(cc_t *self, uint32_t frontend, uint32_t rank, uint32_t n_prompt, uint32_t max_tokens);
void cc_abort(cc_t *self, size_t request);
/* A message as it is, to one rank. Its strings are borrowed until it is delivered. */
void cc_send(cc_t *self, uint32_t frontend, uint32_t rank, const msg_t *msg);

/* A call to the ranks in mask. value: mode, target or verb. spec may be NULL. */
size_t cc_call(cc_t *self, uint32_t frontend, uint64_t kind, uint64_t value, bool clear_cache,
               const char *spec, unsigned mask);
/* Sends the call again (or for the first time) to the ranks in mask, from a copy without a spec. */
void cc_resend(cc_t *self, size_t call, uint64_t kind, uint64_t value, bool clear_cache,
               unsigned mask);
/* Calls, settles, and returns the status that all ranks answered. */
lk_status_t cc_do(cc_t *self, uint64_t kind, uint64_t value, bool clear_cache, const char *spec);
lk_status_t cc_status(const cc_t *self, size_t call);
void cc_utility(cc_t *self, const char *method, const char *args);

/* One random event; false when everything rests (the clock stands still). */
bool cc_event(cc_t *self);
/* Everything once, in order: what a run of bad luck at random would miss. */
bool cc_sweep(cc_t *self);
void cc_run(cc_t *self, size_t events);
void cc_settle(cc_t *self);
void cc_advance(cc_t *self, uint64_t ns);

/* The trainer: INIT with a fresh sender; one update_weights of tensors [first, first + n) with new
 * random values, packed; the whole session with all tensors. */
lk_status_t cc_init_transfer(cc_t *self);
lk_status_t cc_update(cc_t *self, size_t first, size_t n);
lk_status_t cc_finish(cc_t *self, const char *version);
lk_status_t cc_session(cc_t *self, const char *version);
/* The spec of such an update. Valid until the next one. */
const char *cc_update_spec(cc_t *self, size_t first, size_t n);
void cc_new_values(cc_t *self, size_t first, size_t n);
void cc_start_sending(cc_t *self, size_t first, size_t n);
/* The trainer dies. */
void cc_kill_trainer(cc_t *self);
/* Notes the digest of the weights in force, by epoch; shadow: and checks that it never changes
 * within one. After every event while a FINISH is under way. */
void cc_note_epoch(cc_t *self);

/* The ranks in mask die; their requests end. The others leave, naming `why`. */
void cc_kill(cc_t *self, unsigned mask, const char *why);
/* Those that were killed are started again, and all form the next group epoch. */
void cc_form(cc_t *self, uint64_t weight_floor);

uint64_t cc_steps(const cc_t *self);
size_t cc_unfinished(const cc_t *self);
void cc_verify(const cc_t *self);

#endif
