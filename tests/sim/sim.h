/*
 * sim.h: the deterministic simulator: a whole cluster in one thread, on virtual time, with one
 * seeded generator. The coordinator, the front ends' engine clients, the engines with all that is
 * inside them, and a trainer's sender are the product's own objects; what is simulated is what lies
 * between them: messages (net.h), the ranks' mesh (mesh.h), the time that things take, the people
 * who use it (client.c, caller.c, trainer.c).
 *
 * One event at a time, in the order (time, sequence); after it the checkers look (checkers.h). The
 * phases: a cluster starts; SAFETY with everybody active; HEAL: nobody asks for more, all that is
 * open has to end; PROBE: the cluster has to work as if nothing had happened; DONE.
 */
#ifndef LK_TESTS_SIM_SIM_H
#define LK_TESTS_SIM_SIM_H

#include "api_frontend/engine_client.h"
#include "base/prng.h"
#include "coordinator/coordinator.h"
#include "engine_core/dp/enrol.h"
#include "engine_core/engine_core.h"
#include "tests/sim/canary.h"
#include "tests/sim/options.h"

typedef struct sim sim_t;

/* name, meaning of (a, b, n) */
#define SIM_EVENT_TABLE(X)                                                                         \
    X(MESSAGE) /* a message arrives (from node a at node b) */                                     \
    X(MESH)    /* a frame of rank a arrives at rank b */                                           \
    X(RANK)    /* rank a runs */                                                                   \
    X(FRONT)   /* front end a looks at its clock */                                                \
    X(COORD)   /* the coordinator does */                                                          \
    X(CLIENT)  /* client a acts; b: it goes away, if it still waits for request n */               \
    X(CALLER)  /* caller a acts */                                                                 \
    X(TRAINER) /* trainer a acts; b: it moves bytes */                                             \
    X(PROBE)   /* the next question of the last phase */                                           \
    X(REFUSED) /* call n meets a front end that does not run */                                    \
    X(CARE)    /* while healing: is something left paused? */                                      \
    X(FAULT)   /* something goes wrong */                                                          \
    X(SCENE)   /* time goes on for a script (scene.h) */                                           \
    X(CONT)    /* node a, which was stopped, goes on (n: that life of it) */                       \
    X(DIE)     /* that life ends */                                                                \
    X(BORN)    /* the launcher starts node a again */                                              \
    X(TOLD)    /* it tells that life n of the coordinator that rank a is removed */

typedef enum {
#define X(name) SIM_EV_##name,
    SIM_EVENT_TABLE(X)
#undef X
        SIM_EV_COUNT
} sim_event_kind_t;

typedef struct {
    uint64_t at_ns, seq;
    sim_event_kind_t kind;
    uint32_t a, b;
    uint64_t n;
    void *data; /* owned by the event; malloc */
} sim_event_t;

typedef enum { SIM_START, SIM_SAFETY, SIM_HEAL, SIM_PROBE, SIM_DONE } sim_phase_t;
const char *sim_phase_name(sim_phase_t phase);

typedef struct sim_scenario sim_scenario_t;

typedef struct {
    uint64_t seed;
    sim_options_t options;
    uint64_t max_events;            /* of the safety phase */
    bool frontend_pause;            /* the old design: pause state in the front end */
    bool log;                       /* one line per event on standard output */
    sim_canary_t canary;            /* what is planted */
    const sim_scenario_t *scenario; /* scene.h; NULL: everybody does as drawn */
} sim_config_t;

/* Traffic, all processes together. */
typedef struct {
    uint64_t ns, steps, rounds;
    uint64_t messages[8], bytes[8]; /* by sim_link_t (net.h) */
    uint64_t votes, vote_bytes, exchanges, exchange_bytes;
} sim_figures_t;

typedef struct {
    uint64_t events, trace, virtual_ns;
    uint64_t requests, tokens, calls, steps, rounds, updates;
    /* steps of a rank from every rank's SEEN to its answer, over the pauses (but mode wait) */
    uint64_t pauses, pause_steps, pause_steps_most;
    uint64_t deaths, removals, breaks, epochs;
    sim_figures_t safety; /* of that phase */
    bool failed;
    char check[32], text[4096];
} sim_result_t;

/* ---- the parts; each file has the functions of one ---- */

typedef struct sim_net sim_net_t;
typedef struct sim_mesh sim_mesh_t;
/* Of all ranks. */
typedef struct {
    uint64_t votes, vote_bytes, exchanges, exchange_bytes;
} sim_mesh_stats_t;
typedef struct sim_trainer sim_trainer_t;
typedef struct sim_request sim_request_t;
typedef struct sim_call sim_call_t;
typedef struct sim_checks sim_checks_t;
typedef struct sim_scene sim_scene_t;

/* A process: `generation` is its life, 0 while there is none. */
typedef struct {
    sim_t *sim;
    uint32_t rank;
    uint64_t generation, sequence, weight_floor;
    lk_env_t env;
    enrol_t enrol;
    roster_t roster, opened; /* of the newest INIT; that the executor is open for */
    sim_mesh_t *mesh;
    uint64_t *said;        /* [frontends]: messages over the output connection to that life */
    uint64_t *front_lives; /* [frontends]: which the addresses in INIT belong to; 0: none yet */
    uint64_t loaded_ns;    /* when its weights are there */
    executor_t *executor;  /* exec.h around the null executor */
    engine_core_t *core;   /* NULL until the first group epoch */
    uint64_t wake_ns;      /* of the RANK event that counts; UINT64_MAX: none */
    uint64_t busy_ns;      /* the step under way is computed until then */
    uint64_t idle_looks;   /* looks at a transfer in a row that moved nothing */
    void *transfer;        /* of transfer.c: its connection with the collective backend */
} sim_rank_t;

typedef struct {
    sim_t *sim;
    uint32_t index;
    uint64_t generation, sequence, heartbeat_ns, hello_ns;
    engine_client_t *client; /* NULL before INIT */
    uint64_t *said;          /* [ranks]: messages to that life */
    uint64_t *known;         /* [ranks]: the life that said ENGINE_HERE; 0: none */
    bool paused;             /* of the old design only */
} sim_front_t;

typedef struct {
    sim_t *sim;
    coordinator_t *coordinator; /* NULL: it does not run */
    uint64_t wake_ns, life;
    uint64_t epoch, weight_epoch; /* the newest that its last INIT, STATS told */
} sim_coord_t;

#define SIM_DEAD_AFTER_NS (5 * LK_SECOND_NS)

struct sim {
    sim_config_t config;
    sim_options_t o;
    lk_prng_t prng;
    lk_env_t env;
    uint64_t now_ns, seq, events, trace;
    sim_event_t *heap;
    size_t heap_n, heap_cap;
    sim_phase_t phase;
    uint64_t phase_ns; /* when it began */
    bool planted;      /* the canary is out, and once is enough */

    model_config_t model;
    uint32_t max_model_len;
    sim_net_t *net;
    uint64_t *mesh_last_ns; /* [ranks * ranks]: when the newest frame of a pair arrives */
    uint64_t mesh_attempts, lives;
    sim_mesh_stats_t mesh_stats;
    sim_rank_t *ranks;
    sim_front_t *fronts;
    sim_coord_t coord;

    sim_request_t **requests;
    size_t n_requests, cap_requests;
    size_t *client_request; /* [clients]: 1 + index of the open one, or 0 */
    sim_call_t **calls;
    size_t n_calls, cap_calls;
    bool *caller_busy; /* [callers] */
    uint32_t mesh_breaks;
    uint64_t group_epoch, weight_epoch; /* the newest that a rank was in, held */
    bool *removed;                      /* [ranks]: for good */
    uint32_t n_members;                 /* ranks that are not */
    bool *stopped;                      /* [nodes] (net.h): by SIGSTOP; its clock runs on */
    sim_trainer_t *trainers;
    struct {
        uint32_t stage;
        size_t first_request;
        bool waiting;
        lk_status_t status;
    } probe;

    sim_checks_t *checks;
    sim_scene_t *scene; /* NULL: no scenario */
    sim_result_t result;
};

/* Runs a seed from start to end. */
void sim_run(const sim_config_t *config, sim_result_t *out);

/* The first failure ends the run. */
void sim_fail(sim_t *self, const char *check, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* One line of the log, if there is one. */
void sim_log(const sim_t *self, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void sim_post(sim_t *self, uint64_t delay_ns, sim_event_kind_t kind, uint32_t a, uint32_t b,
              uint64_t n, void *data);
/* An event that was put off happens now, before all that was posted after it. */
void sim_post_again(sim_t *self, const sim_event_t *event);
/* Adds to the trace hash what an event carried. */
void sim_trace(sim_t *self, uint64_t value);
static inline uint64_t sim_below(sim_t *self, uint64_t bound)
{
    return lk_prng_below(&self->prng, bound);
}
static inline bool sim_chance(sim_t *self, uint64_t percent)
{
    return lk_prng_below(&self->prng, 100) < percent;
}
/* True if the canary is to be planted now: while everybody is active, and once. */
bool sim_plants(sim_t *self, sim_canary_t canary);
/* Around `mean`: half to one and a half. */
static inline uint64_t sim_around(sim_t *self, uint64_t mean)
{
    return mean / 2 + lk_prng_below(&self->prng, mean + 1);
}
/* Of one message. */
uint64_t sim_latency_ns(sim_t *self);

/* The first rank that is not removed. */
uint32_t sim_first_member(const sim_t *self);

/* The generation of a new process: higher than all before. */
uint64_t sim_fresh_life(sim_t *self);

/* rank.c */
void sim_rank_start(sim_rank_t *self);
void sim_rank_kill(sim_rank_t *self);
/* The newest weight epoch that it held or heard of. */
uint64_t sim_rank_weights(const sim_rank_t *self);
void sim_rank_listen(sim_rank_t *self);
void sim_rank_wake(sim_rank_t *self, uint64_t at_ns);
void sim_rank_on_event(sim_rank_t *self, uint64_t at_ns);
void sim_rank_on_msg(sim_rank_t *self, uint32_t from_node, const msg_t *msg);
/* What it waits for, for reports: "in step 7, without rank 1". */
void sim_rank_describe(const sim_rank_t *self, char *out, size_t room);
/* All of them, a line each; begins with a line feed. */
void sim_describe(const sim_t *self, char *out, size_t room);

/* front.c */
void sim_front_start(sim_front_t *self);
void sim_front_kill(sim_front_t *self);
void sim_front_listen(sim_front_t *self);
/* The group of that epoch is whole for it. */
bool sim_front_serves(const sim_front_t *self, uint64_t epoch);
void sim_front_on_tick(sim_front_t *self, uint64_t generation);
void sim_front_on_msg(sim_front_t *self, const msg_t *msg);

/* coord.c */
void sim_coord_start(sim_coord_t *self);
void sim_coord_kill(sim_coord_t *self);
void sim_coord_listen(sim_coord_t *self);
void sim_coord_on_event(sim_coord_t *self, uint64_t at_ns);
void sim_coord_wake(sim_coord_t *self);
void sim_coord_on_msg(sim_coord_t *self, const msg_t *msg);

/* client.c: requests */
struct sim_request {
    size_t index;
    uint32_t client, front;
    int64_t pin; /* the rank it asks for, or -1 */
    uint64_t handle;
    uint32_t n_prompt, max_tokens, n_tokens;
    uint32_t *tokens;   /* prompt and output: [n_prompt + max_tokens + 1] */
    uint64_t *epochs;   /* [max_tokens + 1]: of output token i */
    bool open, aborted; /* by its client */
    finish_reason_t finish;
    lk_status_t status;
    sim_t *sim;
};
#define SIM_NO_CLIENT UINT32_MAX
/* NULL if it was refused at once. */
sim_request_t *sim_request_add(sim_t *self, uint32_t client, uint32_t front, int64_t pin,
                               uint32_t n_prompt, uint32_t max_tokens);
void sim_client_start(sim_t *self);
void sim_client_stop(sim_t *self);
void sim_client_act(sim_t *self, uint32_t client);
/* Goes away, if it still waits for that request. */
void sim_client_leave(sim_t *self, uint32_t client, size_t request);
size_t sim_open_requests(const sim_t *self);
/* The front end has died: its clients see their connections end. */
void sim_requests_lost(sim_t *self, uint32_t front);

/* caller.c: control calls */
typedef enum { SIM_CALL_PAUSE, SIM_CALL_RESUME, SIM_CALL_UPDATE, SIM_CALL_UTILITY } sim_call_kind_t;
typedef void (*sim_call_fn)(sim_t *sim, void *ctx, const sim_call_t *call);
struct sim_call {
    size_t index;
    sim_t *sim;
    uint32_t front;
    sim_call_kind_t kind;
    pause_mode_t mode;
    bool clear_cache;
    update_verb_t verb;
    uint64_t asked_ns, answered_ns;
    bool open;
    lk_status_t status;
    char text[512];
    sim_call_fn fn; /* may be NULL */
    void *ctx;
};
/* value: mode or verb. The callback may come before it returns. timeout_ns 0: the default. */
sim_call_t *sim_call(sim_t *self, uint32_t front, sim_call_kind_t kind, uint64_t value,
                     bool clear_cache, const char *spec, uint64_t timeout_ns, sim_call_fn fn,
                     void *ctx);
const char *sim_call_name(const sim_call_t *call);
void sim_caller_start(sim_t *self);
void sim_caller_stop(sim_t *self);
void sim_caller_act(sim_t *self, uint32_t caller);
size_t sim_open_calls(const sim_t *self);
void sim_calls_lost(sim_t *self, uint32_t front);
void sim_call_refused(sim_t *self, size_t call);

/* trainer.c */
void sim_trainer_start(sim_t *self);
void sim_trainer_stop(sim_t *self);
void sim_trainer_act(sim_t *self, uint32_t trainer);
void sim_trainer_look(sim_t *self, uint32_t trainer);
/* A whole session with every tensor, for the last phase; fn is called once. */
void sim_trainer_repair(sim_t *self, sim_call_fn fn);
bool sim_trainers_idle(const sim_t *self);
/* The tensors of the update_weights call that its trainer makes right now, or has made last. */
typedef struct {
    const tensor_desc_t *descs;
    void *const *data;
    size_t first, n, n_tensors;
} sim_sent_t;
sim_sent_t sim_trainer_sent(const sim_call_t *call);

/* fault.c: what goes wrong */
void sim_fault_start(sim_t *self);
void sim_fault_stop(sim_t *self);
void sim_fault_act(sim_t *self, uint32_t what);
/* Everything that was stopped goes on, and nothing goes wrong any more. */
void sim_fault_heal(sim_t *self);
/* For so long, or until the launcher, which hears nothing of it either, kills it. */
bool sim_everybody_serves(const sim_t *self); /* in one group epoch, all joined */
void sim_fault_stop_node(sim_t *self, uint32_t node, uint64_t ns);
void sim_fault_continue(sim_t *self, uint32_t node, uint64_t life);
/* The process ends by itself, soon; the launcher starts another one. */
void sim_fault_kill(sim_t *self, uint32_t node); /* unless it is the last witness */
void sim_fault_ended(sim_t *self, uint32_t node, const char *why);
void sim_fault_die(sim_t *self, uint32_t node, uint32_t why, uint64_t life);
void sim_fault_born(sim_t *self, uint32_t node);
/* A rank that runs dies, and does not come back. */
void sim_fault_remove(sim_t *self, uint32_t rank);
void sim_fault_told(sim_t *self, uint32_t rank, uint64_t life);
/* The front end's process runs: who calls it gets somewhere. */
bool sim_front_runs(const sim_t *self, uint32_t front);

/* probe.c: the last phase */
void sim_probe_act(sim_t *self);

#endif
