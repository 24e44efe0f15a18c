/*
 * scene.h: scenarios: a cluster in which nothing happens but what a script does, step by step. A
 * script is a function that is called after every event and goes on where it stopped (scene->line):
 *
 *     bool scene_x(sim_t *sim, sim_scene_t *scene)
 *     {
 *         SCENE_BEGIN;
 *         scene->r[0] = scene_request(sim, 0, 1, 4, 8);
 *         AWAIT(scene_ended(scene->r[0]));
 *         EXPECT(scene->r[0]->finish == FINISH_LENGTH);
 *         SCENE_END;
 *     }
 *
 * What does not become true within a minute, and what is expected and is not so, ends the run. When
 * the script is over the usual end follows (heal, probe), and the checkers look all the time.
 * Nothing that has to outlive an AWAIT may be a local variable. scenarios.def is the table.
 */
#ifndef LK_TESTS_SIM_SCENE_H
#define LK_TESTS_SIM_SCENE_H

#include "tests/sim/net.h"

#define SCENE_RANKS 8

/* What the script may look at, counted since the start. */
struct sim_scene {
    int line;
    uint64_t since_ns; /* when it got there */
    bool over;
    uint64_t posted[SCENE_RANKS]; /* steps */
    uint64_t fresh[SCENE_RANKS];  /* sequences in them that start at position 0 */
    bool in_step[SCENE_RANKS];
    uint64_t entered[SCENE_RANKS]; /* collective transfers */
    uint64_t sent[64];             /* messages, by type */
    /* its variables */
    sim_request_t *r[64];
    const sim_call_t *c[16];
    uint64_t n[8];
    uint32_t i;
    struct {
        msg_type_t type;
        uint32_t from, to;
        bool due;
    } lose;
    lk_status_t session; /* of the last one that ended */
    bool session_over;
};

struct sim_scenario {
    const char *name;
    const char *fault; /* B1 ... of SCENARIOS.md */
    const char *sets;  /* options: "name=value ..." over those of a quiet cluster */
    const char *holds; /* what must hold */
    const char *fails; /* "": the run passes; else a part of the text with which it has to end */
    bool (*act)(sim_t *sim, sim_scene_t *scene); /* true: over */
};

#define SCENARIO(id, fault, sets, fails, holds) bool scene_##id(sim_t *sim, sim_scene_t *scene);
#include "tests/sim/scenarios.def"
#undef SCENARIO

extern const sim_scenario_t sim_scenarios[];
extern const size_t sim_n_scenarios;
/* "first_request_of_all (B14): the very first ..." one per line. */
void sim_scenario_list(char *out, size_t room);
/* NULL: no such scenario. */
const sim_scenario_t *sim_scenario_find(const char *name);
/* The options of a quiet cluster, the scenario's on top. */
void sim_scenario_options(const sim_scenario_t *scenario, sim_options_t *out);

void sim_scene_start(sim_t *sim);
void sim_scene_stop(sim_t *sim);
bool sim_scene_over(const sim_t *sim);
/* The script wants this message lost. */
bool sim_scene_loses(sim_t *sim, uint32_t from, uint32_t to, const msg_t *msg);
/* Time goes on although nothing happens. */
void sim_scene_tick(sim_t *sim);

/* ---- for scripts ---- */

bool scene_waits(sim_t *sim, const sim_scene_t *scene, const char *what);
bool scene_fails(sim_t *sim, const sim_scene_t *scene, const char *what);

#define AWAIT(cond)                                                                                \
    do {                                                                                           \
        scene->line = __LINE__;                                                                    \
        scene->since_ns = sim->now_ns;                                                             \
        __attribute__((fallthrough));                                                              \
    case __LINE__:                                                                                 \
        if (!(cond)) {                                                                             \
            return scene_waits(sim, scene, #cond);                                                 \
        }                                                                                          \
    } while (0)
#define AWAIT_MS(ms) AWAIT(sim->now_ns - scene->since_ns >= (ms)*LK_MS_NS)
#define EXPECT(cond)                                                                               \
    if (!(cond)) {                                                                                 \
        return scene_fails(sim, scene, #cond);                                                     \
    }
/* A request of that shape (scene_request) runs to its length. */
#define EXPECT_SERVED(front, rank, n_prompt, max_tokens)                                           \
    scene->r[0] = scene_request(sim, front, rank, n_prompt, max_tokens);                           \
    AWAIT(scene_ended(scene->r[0]));                                                               \
    EXPECT(scene->r[0]->finish == FINISH_LENGTH)
/* From the first event on, before the cluster serves. */
#define SCENE_BEGIN_EARLY                                                                          \
    switch (scene->line) {                                                                         \
    case 0:
#define SCENE_BEGIN                                                                                \
    SCENE_BEGIN_EARLY;                                                                             \
    AWAIT(sim->phase == SIM_SAFETY)
#define SCENE_END                                                                                  \
    }                                                                                              \
    return true

/* rank -1: any. Client aborts and the like are not drawn. */
sim_request_t *scene_request(sim_t *sim, uint32_t front, int64_t rank, uint32_t n_prompt,
                             uint32_t max_tokens);
static inline bool scene_ended(const sim_request_t *r)
{
    return r->finish != FINISH_NONE;
}
/* Output tokens so far. */
static inline uint32_t scene_tokens(const sim_request_t *r)
{
    return r->n_tokens - r->n_prompt;
}
/* Of the first n in scene->r. */
bool scene_all_ended(const sim_scene_t *scene, size_t n);
bool scene_all_are(const sim_scene_t *scene, size_t n, finish_reason_t finish);

static inline bool scene_is_retryable(const sim_request_t *r)
{
    return r->finish == FINISH_ERROR && r->status == LK_ERR_UNAVAILABLE;
}

const sim_call_t *scene_pause(sim_t *sim, uint32_t front, pause_mode_t mode, bool clear_cache);
const sim_call_t *scene_resume(sim_t *sim, uint32_t front);
static inline bool scene_ok(const sim_call_t *call)
{
    return !call->open && call->status == LK_OK;
}
/* A trainer's whole session, through front end 0; scene->session_over and ->session at its end. */
void scene_session(sim_t *sim);

/* What is sent from now on takes at least so long. */
void scene_delay(sim_t *sim, sim_link_t link, uint32_t from, uint32_t to, uint64_t ms);
void scene_delay_to_rank(sim_t *sim, uint32_t front, uint32_t rank, uint64_t ms);
void scene_delay_start(sim_t *sim, uint32_t rank, uint64_t ms);
/* The next message of that type is lost with a connection that breaks. */
void scene_lose(sim_t *sim, msg_type_t type, uint32_t from, uint32_t to);
/* SIGKILL; it is started again. */
void scene_kill(sim_t *sim, uint32_t node);
/* SIGKILL; the launcher removes the rank. */
void scene_remove(sim_t *sim, uint32_t rank);
/* SIGSTOP, and SIGCONT after so long. */
void scene_stop(sim_t *sim, uint32_t node, uint64_t ms);

/* Everybody serves in that group epoch. */
bool scene_is_whole(const sim_t *sim, uint64_t epoch);
const group_t *scene_group(const sim_t *sim, uint32_t rank);
bool scene_all_idle(const sim_t *sim);  /* no rank runs */
uint64_t scene_steps(const sim_t *sim); /* posted, all ranks */
bool scene_front_says_run(const sim_t *sim, uint32_t front);

#endif
