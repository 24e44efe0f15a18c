#include "base/check.h"
#include "coordinator/coordinator.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <string.h>

/* A cluster of two engines and one front end on virtual time; what the coordinator sends is kept.
 */
typedef struct {
    coordinator_t *coordinator;
    uint64_t now_ns;
    lk_env_t env;
    int inits, refusals, stats, starts;
    char refusal[LK_ERROR_TEXT_MAX];
    uint64_t start_round;
    char mesh1[64];
    bool serving, run, paused;
    size_t n_dead;
    char dead[128];
    uint64_t max_model_len, num_blocks, waiting1, group_epoch, floor;
    int dissolves;
    int64_t lost;
    uint64_t dissolved, refused_generation;
    char why[LK_ERROR_TEXT_MAX];
    int rollcalls;
    bool computes; /* what the host says of every silent member */
} world_t;

static uint64_t now(void *ctx)
{
    return ((world_t *)ctx)->now_ns;
}

static void on_reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg)
{
    world_t *w = ctx;
    if (msg->type == MSG_DISSOLVE) {
        ck_assert_uint_eq(role, MSG_ROLE_ENGINE);
        w->dissolves++;
        w->dissolved = msg->dissolve.group_epoch;
        w->lost = msg->dissolve.lost;
        snprintf(w->why, sizeof w->why, "%s", msg_cstr(msg->dissolve.why));
        return;
    }
    ck_assert_int_eq(msg->type, MSG_INIT);
    if (msg->init.error.len > 0) {
        w->refused_generation = generation;
        w->refusals++;
        snprintf(w->refusal, sizeof w->refusal, "%s", msg_cstr(msg->init.error));
        return;
    }
    w->inits++;
    w->group_epoch = msg->init.group_epoch;
    w->floor = msg->init.weight_floor;
    ck_assert_uint_eq(msg->init.mesh.count, 2);
    snprintf(w->mesh1, sizeof w->mesh1, "%s", msg_cstr(msg->init.mesh.items[1].text));
}

static void on_stats(void *ctx, const msg_t *msg)
{
    world_t *w = ctx;
    if (msg->type == MSG_ROLLCALL) {
        return;
    }
    w->stats++;
    w->serving = msg->stats.serving;
    w->run = msg->stats.run;
    w->paused = msg->stats.paused;
    w->n_dead = msg->stats.dead.count;
    w->max_model_len = msg->stats.max_model_len;
    w->num_blocks = msg->stats.num_blocks;
    w->waiting1 = msg->stats.loads.items[1].waiting;
    snprintf(w->dead, sizeof w->dead, "%s",
             w->n_dead > 0 ? msg_cstr(msg->stats.dead.items[0].text) : "");
}

static void on_wave(void *ctx, const msg_t *msg)
{
    world_t *w = ctx;
    if (msg->type == MSG_ROLLCALL) {
        w->rollcalls++;
        return;
    }
    w->starts++;
    w->start_round = msg->start_dp_wave.round;
}

static bool computes(void *ctx, const member_t *m, uint64_t now_ns)
{
    return ((world_t *)ctx)->computes;
}

static void world_init_as(world_t *w, uint64_t life)
{
    *w = (world_t){.now_ns = 1000 * LK_SECOND_NS};
    w->env = (lk_env_t){.ctx = w, .now_ns = now};
    coordinator_config_t config = {.dp_size = 2,
                                   .n_frontends = 1,
                                   .config_hash = "h",
                                   .events_address = "e",
                                   .stats_address = "s",
                                   .wave_address = "w",
                                   .life = life,
                                   .handshake_timeout_ns = 10 * LK_SECOND_NS,
                                   .dead_after_ns = 5 * LK_SECOND_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = &w->env,
                                   .host = {w, on_reply, on_stats, on_wave, computes}};
    w->coordinator = coordinator_new(&config);
    ck_assert_ptr_nonnull(w->coordinator);
}

static void world_init(world_t *w)
{
    world_init_as(w, 1);
}

static lk_status_t step(world_t *w, lk_error_t *err)
{
    lk_status_t status;
    uint64_t next = coordinator_step(w->coordinator, &status, err);
    ck_assert_uint_gt(next, w->now_ns);
    return status;
}

/* What is urgent is published at once, unless something was so a moment ago. */
static void step_later(world_t *w)
{
    w->now_ns += 5 * LK_MS_NS;
    step(w, NULL);
}

static msg_t from(msg_type_t type, uint32_t role, uint32_t rank)
{
    return (msg_t){.type = type, .sender_role = role, .sender_rank = rank, .generation = 1};
}

static void hello(world_t *w, uint32_t role, uint32_t rank, const char *hash)
{
    msg_t m = from(MSG_HELLO, role, rank);
    char mesh[16];
    snprintf(mesh, sizeof mesh, "mesh%u", rank);
    m.hello = (msg_hello_t){.role = role,
                            .rank = rank,
                            .pid = 100 + rank,
                            .config_hash = msg_str(hash),
                            .mesh_address = msg_str(mesh)};
    coordinator_on_message(w->coordinator, &m);
}

static void ready(world_t *w, uint32_t role, uint32_t rank, const char *digest, const char *error)
{
    msg_t m = from(MSG_READY, role, rank);
    m.ready = (msg_ready_t){.role = role,
                            .rank = rank,
                            .num_blocks = 100,
                            .max_model_len = 512 + rank,
                            .vocab_size = 512,
                            .digest = msg_str(digest),
                            .group_epoch = w->group_epoch,
                            .error = msg_str(error)};
    coordinator_on_message(w->coordinator, &m);
}

static void heartbeat(world_t *w, uint32_t role, uint32_t rank)
{
    msg_t m = from(MSG_HEARTBEAT, role, rank);
    m.heartbeat = (msg_heartbeat_t){.role = role, .rank = rank};
    coordinator_on_message(w->coordinator, &m);
}

static void start_cluster(world_t *w)
{
    world_init(w);
    hello(w, MSG_ROLE_ENGINE, 0, "h");
    hello(w, MSG_ROLE_FRONTEND, 0, "h");
    ck_assert_int_eq(w->inits, 0);
    hello(w, MSG_ROLE_ENGINE, 1, "h");
    ck_assert_int_eq(w->inits, 3);
    ck_assert_str_eq(w->mesh1, "mesh1");
    ready(w, MSG_ROLE_FRONTEND, 0, "", NULL);
    ready(w, MSG_ROLE_ENGINE, 0, "d", NULL);
    ck_assert(!coordinator_serving(w->coordinator));
    ready(w, MSG_ROLE_ENGINE, 1, "d", NULL);
    ck_assert(coordinator_serving(w->coordinator));
    ck_assert_int_eq(step(w, NULL), LK_OK);
    ck_assert(w->serving);
    ck_assert_uint_eq(w->max_model_len, 512);
    ck_assert_uint_eq(w->num_blocks, 200);
}

START_TEST(handshake_ends_in_serving)
{
    world_t w;
    start_cluster(&w);
    coordinator_destroy(&w.coordinator);
    coordinator_destroy(&w.coordinator);
    coordinator_destroy(NULL);
}
END_TEST

START_TEST(strangers_are_refused_by_name)
{
    world_t w;
    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 2, "h");
    ck_assert_ptr_nonnull(strstr(w.refusal, "engine 2, but this cluster has 2 engines"));
    hello(&w, MSG_ROLE_ENGINE, 1, "other");
    ck_assert_ptr_nonnull(strstr(w.refusal, "engine 1 was started with other flags"));
    hello(&w, MSG_ROLE_TRAINER, 0, "h");
    ck_assert_int_eq(w.refusals, 3);
    hello(&w, MSG_ROLE_ENGINE, 1, "h");
    hello(&w, MSG_ROLE_ENGINE, 1, "h"); /* repeated: no harm */
    ck_assert_int_eq(w.refusals, 3);
    msg_t twin = from(MSG_HELLO, MSG_ROLE_ENGINE, 1);
    twin.hello =
        (msg_hello_t){.role = MSG_ROLE_ENGINE, .rank = 1, .pid = 99, .config_hash = msg_str("h")};
    coordinator_on_message(w.coordinator, &twin);
    ck_assert_ptr_nonnull(strstr(w.refusal, "engine 1 has said HELLO already"));
    ready(&w, MSG_ROLE_ENGINE, 0, "d", NULL); /* before its HELLO: dropped */
    ck_assert(!coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(handshake_deadline_names_who_is_late)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 0, "h");
    w.now_ns += 11 * LK_SECOND_NS;
    ck_assert_int_eq(step(&w, &err), LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "engine 1, front end 0 did not finish loading"));
    coordinator_destroy(&w.coordinator);

    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 0, "h");
    hello(&w, MSG_ROLE_ENGINE, 1, "h");
    hello(&w, MSG_ROLE_FRONTEND, 0, "h");
    ready(&w, MSG_ROLE_ENGINE, 0, "d", NULL);
    w.now_ns += 11 * LK_SECOND_NS;
    ck_assert_int_eq(step(&w, &err), LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "engine 1, front end 0 did not join the group"));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(loads_of_a_starting_cluster_keep_nobody_busy)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 1, "h");
    w.now_ns += 3 * LK_SECOND_NS; /* nothing was ever published */
    msg_t m = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
    m.load_report.load = (msg_load_t){.rank = 1, .waiting = 2};
    coordinator_on_message(w.coordinator, &m);
    ck_assert_int_eq(step(&w, &err), LK_OK); /* says to come again later, not at once */
    ck_assert_int_eq(w.stats, 0);
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(failed_or_different_loads_stop_the_start)
{
    for (int different = 0; different < 2; different++) {
        world_t w;
        lk_error_t err = LK_ERROR_INIT;
        world_init(&w);
        hello(&w, MSG_ROLE_ENGINE, 0, "h");
        hello(&w, MSG_ROLE_ENGINE, 1, "h");
        hello(&w, MSG_ROLE_FRONTEND, 0, "h");
        ready(&w, MSG_ROLE_ENGINE, 0, "d", NULL);
        ready(&w, MSG_ROLE_ENGINE, 1, "e", different ? NULL : "no such file");
        ck_assert_int_lt(step(&w, &err), 0);
        ck_assert_ptr_nonnull(strstr(err.text, different ? "engine 1 loaded other weights"
                                                         : "engine 1 can not start: no such file"));
        ck_assert(!coordinator_serving(w.coordinator));
        coordinator_destroy(&w.coordinator);
    }
}
END_TEST

START_TEST(announce_and_first_req_become_invitations)
{
    world_t w;
    start_cluster(&w);
    msg_t a = from(MSG_ANNOUNCE, MSG_ROLE_ENGINE, 1);
    a.announce = (msg_announce_t){.rank = 1, .round = 7, .group_epoch = 1};
    coordinator_on_message(w.coordinator, &a);
    coordinator_on_message(w.coordinator, &a); /* repeated: harmless, answered again */
    ck_assert_int_eq(w.starts, 2);
    ck_assert_uint_eq(w.start_round, 7);

    msg_t g = from(MSG_GROUP, MSG_ROLE_ENGINE, 0);
    g.group = (msg_group_t){.round = 9, .wave = 1, .run = false, .group_epoch = 1};
    coordinator_on_message(w.coordinator, &g);
    msg_t f = from(MSG_FIRST_REQ, MSG_ROLE_FRONTEND, 0);
    coordinator_on_message(w.coordinator, &f);
    ck_assert_int_eq(w.starts, 3);
    ck_assert_uint_eq(w.start_round, 9);

    g.group = (msg_group_t){.round = 10, .wave = 1, .run = true, .group_epoch = 1};
    coordinator_on_message(w.coordinator, &g);
    coordinator_on_message(w.coordinator, &f); /* runs already */
    ck_assert_int_eq(w.starts, 3);
    g.group =
        (msg_group_t){.round = 9, .wave = 1, .run = false, .group_epoch = 1}; /* late: ignored */
    coordinator_on_message(w.coordinator, &g);
    step_later(&w);
    ck_assert(w.run);
    g.group = (msg_group_t){.round = 11, .wave = 2, .paused = true, .group_epoch = 1};
    coordinator_on_message(w.coordinator, &g);
    coordinator_on_message(w.coordinator, &f); /* paused: a START would wake nobody */
    ck_assert_int_eq(w.starts, 3);
    step_later(&w);
    ck_assert(w.paused);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* ---- group epochs ---- */

/* HELLO of a life of an engine: a fresh address each time. */
static void come(world_t *w, uint32_t rank, uint64_t generation, uint64_t left, uint64_t member_of)
{
    static unsigned n;
    char mesh[32];
    snprintf(mesh, sizeof mesh, "mesh%u-%u", rank, n++);
    msg_t m = from(MSG_HELLO, MSG_ROLE_ENGINE, rank);
    m.generation = generation;
    m.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                            .rank = rank,
                            .pid = 100 * generation + rank,
                            .config_hash = msg_str("h"),
                            .mesh_address = msg_str(mesh),
                            .left_epoch = left,
                            .member_of = member_of,
                            .members = 2,
                            .why = msg_str(left != 0 ? "rank 1 closed its mesh connection" : "")};
    coordinator_on_message(w->coordinator, &m);
}

static void be_ready(world_t *w, uint32_t rank, uint64_t generation, uint64_t epoch)
{
    msg_t m = from(MSG_READY, MSG_ROLE_ENGINE, rank);
    m.generation = generation;
    m.ready = (msg_ready_t){.role = MSG_ROLE_ENGINE,
                            .rank = rank,
                            .num_blocks = 100,
                            .max_model_len = 512,
                            .digest = msg_str("other weights than the others: no matter"),
                            .group_epoch = epoch};
    coordinator_on_message(w->coordinator, &m);
}

START_TEST(silence_is_death_by_name)
{
    world_t w;
    start_cluster(&w);
    for (int i = 0; i < 6; i++) {
        w.now_ns += LK_SECOND_NS;
        heartbeat(&w, MSG_ROLE_ENGINE, 0);
        heartbeat(&w, MSG_ROLE_FRONTEND, 0);
        ck_assert_int_eq(step(&w, NULL), LK_OK);
    }
    ck_assert_uint_eq(w.n_dead, 1);
    ck_assert_str_eq(w.dead, "engine 1: silent for 6.0 s");
    ck_assert_int_eq(w.dissolves, 2); /* to the silent one, too */
    ck_assert_uint_eq(w.dissolved, 1);
    ck_assert_int_eq(w.lost, 1);
    ck_assert_str_eq(w.why, "engine 1: silent for 6.0 s");
    ck_assert(!w.serving);
    /* it wakes up: its words count for nothing, and it is sent away by name */
    heartbeat(&w, MSG_ROLE_ENGINE, 1);
    step(&w, NULL);
    ck_assert_uint_eq(w.n_dead, 1);
    msg_t woken = from(MSG_HELLO, MSG_ROLE_ENGINE, 1);
    woken.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                                .rank = 1,
                                .pid = 101,
                                .config_hash = msg_str("h"),
                                .mesh_address = msg_str("new"),
                                .left_epoch = 1};
    coordinator_on_message(w.coordinator, &woken);
    ck_assert_ptr_nonnull(strstr(w.refusal, "was expelled: silent for 6.0 s"));
    ck_assert_uint_eq(w.refused_generation, 1);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* It is at work in one long piece: it gets more time, but not for ever. */
START_TEST(who_computes_is_not_dead_yet)
{
    world_t w;
    start_cluster(&w);
    w.computes = true;
    for (int i = 1; i < 65; i++) {
        w.now_ns += LK_SECOND_NS;
        heartbeat(&w, MSG_ROLE_ENGINE, 0);
        heartbeat(&w, MSG_ROLE_FRONTEND, 0);
        step(&w, NULL);
        ck_assert_uint_eq(w.n_dead, i >= 60);
    }
    coordinator_destroy(&w.coordinator);
    start_cluster(&w);
    w.computes = true;
    for (int i = 1; i < 10; i++) {
        w.now_ns += LK_SECOND_NS;
        w.computes = i < 7; /* it is stopped */
        heartbeat(&w, MSG_ROLE_ENGINE, 0);
        heartbeat(&w, MSG_ROLE_FRONTEND, 0);
        step(&w, NULL);
        ck_assert_uint_eq(w.n_dead, i >= 7);
    }
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* Something long was announced: that silence is none. */
START_TEST(announced_silence_is_none)
{
    world_t w;
    start_cluster(&w);
    msg_t m = from(MSG_HEARTBEAT, MSG_ROLE_ENGINE, 1);
    m.heartbeat = (msg_heartbeat_t){.role = MSG_ROLE_ENGINE, .rank = 1, .silence_ms = 8000};
    coordinator_on_message(w.coordinator, &m);
    for (int i = 1; i < 12; i++) {
        w.now_ns += LK_SECOND_NS;
        heartbeat(&w, MSG_ROLE_ENGINE, 0);
        heartbeat(&w, MSG_ROLE_FRONTEND, 0);
        step(&w, NULL);
        ck_assert_uint_eq(w.n_dead, i > 8);
    }
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* It was stopped itself: nobody else is to blame for what it did not hear. */
START_TEST(own_sleep_expels_nobody)
{
    world_t w;
    start_cluster(&w);
    w.now_ns += 100 * LK_SECOND_NS;
    step(&w, NULL);
    ck_assert_uint_eq(w.n_dead, 0);
    ck_assert_int_eq(w.dissolves, 0);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* A front end's silence is no matter of the group's, and ends when it speaks. */
START_TEST(silent_front_end_comes_back)
{
    world_t w;
    start_cluster(&w);
    for (int i = 0; i < 6; i++) {
        w.now_ns += LK_SECOND_NS;
        heartbeat(&w, MSG_ROLE_ENGINE, 0);
        heartbeat(&w, MSG_ROLE_ENGINE, 1);
        step(&w, NULL);
    }
    ck_assert_str_eq(w.dead, "front end 0: silent for 6.0 s");
    ck_assert(w.serving);
    heartbeat(&w, MSG_ROLE_FRONTEND, 0);
    step_later(&w);
    ck_assert_uint_eq(w.n_dead, 0);
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(a_new_life_makes_a_new_epoch)
{
    world_t w;
    start_cluster(&w);
    msg_t load = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
    load.load_report.load = (msg_load_t){.rank = 1, .weight_epoch = 7};
    coordinator_on_message(w.coordinator, &load);
    int inits = w.inits;
    come(&w, 0, 1, 1, 0); /* the survivor is first */
    ck_assert_int_eq(w.dissolves, 2);
    ck_assert_int_eq(w.lost, -1);
    ck_assert_ptr_nonnull(strstr(w.why, "engine 0 left: rank 1 closed its mesh connection"));
    step_later(&w);
    ck_assert(!w.serving);
    ck_assert_int_eq(w.inits, inits);
    come(&w, 1, 2, 0, 0);
    ck_assert_int_eq(w.inits, inits + 2); /* both ranks; front ends know where everybody is */
    ck_assert_uint_eq(w.group_epoch, 2);
    ck_assert_uint_eq(w.floor, 7);
    be_ready(&w, 0, 1, 1); /* of the old epoch: dropped */
    be_ready(&w, 0, 1, 2);
    be_ready(&w, 1, 1, 2); /* of the old life: dropped */
    ck_assert(!coordinator_serving(w.coordinator));
    be_ready(&w, 1, 2, 2);
    ck_assert(coordinator_serving(w.coordinator));
    step_later(&w);
    ck_assert(w.serving);
    come(&w, 1, 1, 1, 0);
    ck_assert_ptr_nonnull(strstr(w.refusal, "expelled: engine 1 has ended and was started again"));
    ck_assert(coordinator_serving(w.coordinator));
    /* rounds are counted from 0 again */
    msg_t g = from(MSG_GROUP, MSG_ROLE_ENGINE, 0);
    g.group = (msg_group_t){.round = 99, .run = true, .group_epoch = 1};
    coordinator_on_message(w.coordinator, &g);
    g.group = (msg_group_t){.round = 2, .paused = true, .group_epoch = 2};
    coordinator_on_message(w.coordinator, &g);
    step_later(&w);
    ck_assert(w.paused);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* The new life is there before anybody misses the old one; then it dies again, while it connects.
 */
START_TEST(breaks_while_connecting)
{
    world_t w;
    start_cluster(&w);
    come(&w, 1, 2, 0, 0);
    ck_assert_int_eq(w.lost, 1);
    ck_assert_ptr_nonnull(strstr(w.why, "engine 1 has ended and was started again"));
    come(&w, 0, 1, 1, 0);
    ck_assert_uint_eq(w.group_epoch, 2);
    be_ready(&w, 0, 1, 2);
    come(&w, 1, 3, 0, 0);
    ck_assert_uint_eq(w.dissolved, 2);
    ck_assert_uint_eq(w.group_epoch, 2);
    come(&w, 0, 1, 2, 0);
    ck_assert_uint_eq(w.group_epoch, 3);
    be_ready(&w, 0, 1, 3);
    be_ready(&w, 1, 3, 3);
    ck_assert(coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(breaks_without_a_death_end_the_cluster)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    start_cluster(&w);
    lk_status_t status = LK_OK;
    for (uint64_t epoch = 1; status == LK_OK; epoch++) {
        ck_assert_uint_lt(epoch, 30);
        come(&w, 0, 1, epoch, 0);
        come(&w, 1, 1, epoch, 0);
        be_ready(&w, 0, 1, epoch + 1);
        be_ready(&w, 1, 1, epoch + 1);
        status = step(&w, &err);
    }
    ck_assert_ptr_nonnull(strstr(err.text, "again and again"));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(a_new_front_end_is_told_and_made_known)
{
    world_t w;
    start_cluster(&w);
    int inits = w.inits;
    msg_t m = from(MSG_HELLO, MSG_ROLE_FRONTEND, 0);
    m.generation = 2;
    m.hello = (msg_hello_t){.role = MSG_ROLE_FRONTEND,
                            .config_hash = msg_str("h"),
                            .pid = 5,
                            .input_address = msg_str("in"),
                            .output_address = msg_str("out")};
    coordinator_on_message(w.coordinator, &m);
    ck_assert_int_eq(w.inits, inits + 3);
    ck_assert_int_eq(w.dissolves, 0);
    ck_assert(coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

static void frontend_comes(world_t *w)
{
    hello(w, MSG_ROLE_FRONTEND, 0, "h");
    ready(w, MSG_ROLE_FRONTEND, 0, "", NULL);
}

/* A coordinator that was started again. */
START_TEST(a_whole_group_is_found_and_left_alone)
{
    world_t w;
    world_init_as(&w, 2);
    step(&w, NULL);
    ck_assert_int_eq(w.rollcalls, 1);
    frontend_comes(&w);
    come(&w, 0, 1, 0, 4);
    be_ready(&w, 0, 1, 4);
    come(&w, 1, 3, 0, 4);
    be_ready(&w, 1, 3, 4);
    ck_assert(coordinator_serving(w.coordinator));
    ck_assert_int_eq(w.dissolves, 0);
    ck_assert_uint_eq(w.group_epoch, 4);
    w.now_ns += LK_SECOND_NS;
    step(&w, NULL);
    ck_assert_int_eq(w.rollcalls, 1);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* A rank hangs in its start, and the coordinator died meanwhile: it is the launcher's to end
 * that rank, and the next life of it finds a group to be in. */
START_TEST(a_later_life_has_no_deadline)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init_as(&w, 2);
    frontend_comes(&w);
    come(&w, 0, 1, 3, 0);
    for (int i = 0; i < 30; i++) { /* three times the handshake timeout */
        w.now_ns += LK_SECOND_NS;
        heartbeat(&w, MSG_ROLE_FRONTEND, 0);
        come(&w, 0, 1, 3, 0);
        ck_assert_msg(step(&w, &err) == LK_OK, "%s", err.text);
    }
    come(&w, 1, 2, 0, 0);
    ck_assert_uint_eq(w.group_epoch, 4);
    be_ready(&w, 0, 1, 4);
    be_ready(&w, 1, 2, 4);
    ck_assert(coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(a_group_that_is_not_whole_is_dissolved)
{
    world_t w;
    world_init_as(&w, 2);
    frontend_comes(&w);
    come(&w, 0, 1, 0, 4);
    come(&w, 1, 2, 0, 0); /* it died meanwhile */
    ck_assert_uint_eq(w.dissolved, 4);
    come(&w, 0, 1, 4, 0);
    ck_assert_uint_eq(w.group_epoch, 5);
    be_ready(&w, 0, 1, 5);
    be_ready(&w, 1, 2, 5);
    ck_assert(coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* One that said it is in a group and was stopped then is refused when it wakes up; it has to be
 * told to leave that group first. */
START_TEST(a_found_group_ends_with_the_member_that_falls_silent)
{
    world_t w;
    world_init_as(&w, 2);
    frontend_comes(&w);
    come(&w, 0, 1, 0, 4);
    be_ready(&w, 0, 1, 4);
    for (int i = 0; i < 8; i++) {
        w.now_ns += LK_SECOND_NS;
        heartbeat(&w, MSG_ROLE_FRONTEND, 0);
        step(&w, NULL);
    }
    ck_assert_int_ge(w.dissolves, 1);
    ck_assert_uint_eq(w.dissolved, 4);
    come(&w, 0, 1, 4, 0); /* it wakes, leaves and says HELLO */
    ck_assert_ptr_nonnull(strstr(w.refusal, "expelled: silent"));
    come(&w, 1, 1, 0, 4);
    come(&w, 0, 2, 0, 0);
    come(&w, 1, 1, 4, 0);
    ck_assert_uint_eq(w.group_epoch, 5);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* A coordinator that was started again, as was every engine: front ends know the last epoch. */
START_TEST(no_epoch_that_a_front_end_knows_is_used_again)
{
    world_t w;
    world_init_as(&w, 2);
    msg_t m = from(MSG_HELLO, MSG_ROLE_FRONTEND, 0);
    m.hello = (msg_hello_t){.role = MSG_ROLE_FRONTEND,
                            .config_hash = msg_str("h"),
                            .pid = 5,
                            .input_address = msg_str("in"),
                            .output_address = msg_str("out"),
                            .member_of = 3};
    coordinator_on_message(w.coordinator, &m);
    come(&w, 0, 2, 0, 0);
    come(&w, 1, 2, 0, 0);
    ck_assert_uint_eq(w.group_epoch, 4);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* It said HELLO before a rank told it, and both that rank and the coordinator died since. */
START_TEST(a_front_end_that_knows_more_ends_an_older_epoch)
{
    world_t w;
    world_init_as(&w, 2);
    frontend_comes(&w);
    come(&w, 0, 2, 0, 0);
    come(&w, 1, 2, 0, 0);
    ck_assert_uint_eq(w.group_epoch, 1);
    msg_t m = from(MSG_HEARTBEAT, MSG_ROLE_FRONTEND, 0);
    m.heartbeat = (msg_heartbeat_t){.role = MSG_ROLE_FRONTEND, .group_epoch = 8};
    coordinator_on_message(w.coordinator, &m);
    ck_assert_uint_eq(w.dissolved, 1);
    come(&w, 0, 2, 1, 0);
    come(&w, 1, 2, 1, 0);
    ck_assert_uint_eq(w.group_epoch, 9);
    be_ready(&w, 0, 2, 9);
    be_ready(&w, 1, 2, 9);
    m.heartbeat.group_epoch = 9;
    coordinator_on_message(w.coordinator, &m);
    ck_assert(coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* Endless input must not starve publication (it is timer driven), nor cause a message per input. */
/* Each rank says by itself that it is paused; who asks is told at once, and then all the rest. */
START_TEST(a_pause_of_many_is_published_twice)
{
    world_t w;
    start_cluster(&w);
    w.now_ns += LK_SECOND_NS;
    step(&w, NULL);
    w.now_ns += 5 * LK_MS_NS;
    int before = w.stats;
    for (int i = 0; i < 100; i++) {
        msg_t m = from(MSG_LOAD, MSG_ROLE_ENGINE, i % 2u);
        m.load_report.load = (msg_load_t){.rank = i % 2u, .paused = i / 2 % 2 == 0};
        coordinator_on_message(w.coordinator, &m);
        w.now_ns += 10 * 1000;
        step(&w, NULL);
        ck_assert_int_le(w.stats - before, 1);
    }
    step_later(&w);
    step_later(&w);
    ck_assert_int_eq(w.stats - before, 2);
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(loads_are_published_by_the_clock)
{
    world_t w;
    start_cluster(&w);
    int before = w.stats;
    for (int i = 1; i <= 1000; i++) {
        w.now_ns += LK_MS_NS;
        msg_t m = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
        m.load_report.load = (msg_load_t){.rank = 1, .waiting = (uint64_t)i};
        coordinator_on_message(w.coordinator, &m);
        step(&w, NULL);
    }
    ck_assert_int_ge(w.stats - before, 9);
    ck_assert_int_le(w.stats - before, 12);
    ck_assert_uint_ge(w.waiting1, 900);
    msg_t bad = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
    bad.load_report.load.rank = 77;
    coordinator_on_message(w.coordinator, &bad);
    msg_t odd = from(MSG_SEEN, MSG_ROLE_ENGINE, 1);
    coordinator_on_message(w.coordinator, &odd);
    coordinator_destroy(&w.coordinator);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("coordinator");
    TCase *tc = tcase_create("coordinator");
    tcase_add_test(tc, handshake_ends_in_serving);
    tcase_add_test(tc, strangers_are_refused_by_name);
    tcase_add_test(tc, handshake_deadline_names_who_is_late);
    tcase_add_test(tc, loads_of_a_starting_cluster_keep_nobody_busy);
    tcase_add_test(tc, failed_or_different_loads_stop_the_start);
    tcase_add_test(tc, announce_and_first_req_become_invitations);
    tcase_add_test(tc, silence_is_death_by_name);
    tcase_add_test(tc, who_computes_is_not_dead_yet);
    tcase_add_test(tc, announced_silence_is_none);
    tcase_add_test(tc, own_sleep_expels_nobody);
    tcase_add_test(tc, silent_front_end_comes_back);
    tcase_add_test(tc, a_later_life_has_no_deadline);
    tcase_add_test(tc, a_new_life_makes_a_new_epoch);
    tcase_add_test(tc, a_pause_of_many_is_published_twice);
    tcase_add_test(tc, breaks_while_connecting);
    tcase_add_test(tc, breaks_without_a_death_end_the_cluster);
    tcase_add_test(tc, a_new_front_end_is_told_and_made_known);
    tcase_add_test(tc, a_whole_group_is_found_and_left_alone);
    tcase_add_test(tc, a_found_group_ends_with_the_member_that_falls_silent);
    tcase_add_test(tc, no_epoch_that_a_front_end_knows_is_used_again);
    tcase_add_test(tc, a_group_that_is_not_whole_is_dissolved);
    tcase_add_test(tc, a_front_end_that_knows_more_ends_an_older_epoch);
    tcase_add_test(tc, loads_are_published_by_the_clock);
    suite_add_tcase(s, tc);
    return s;
}
